"""``llama405b download`` with the real huggingface_hub client, against a loopback server that speaks the Hub's protocol."""

import gzip
import hashlib
import http.server
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.parse

import pyarrow
import pyarrow.parquet
import pytest

from llama405b.commands.download import MAX_PARALLEL
from llama405b.contract.errors import UserError
from llama405b.data.hub import hub_files
from llama405b_tools.verbs import data
from ops_rig import wait_for

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one model from a directory: its list of files, and each of them, with ranges."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        hub = self.server.hub
        hub["asked"].append((self.command, self.path, self.headers.get("Authorization"), self.headers.get("Range")))
        path = self.path.partition("?")[0]
        if path.startswith(("/api/models/o/gated", "/o/gated")):
            return self.say(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"}, body)
        known = ("/api/models/o/tiny", "/o/tiny/resolve/", "/api/datasets/o/tiny", "/datasets/o/tiny/resolve/")
        if not path.startswith(known):
            return self.say(401, {"error": "none"}, {"X-Error-Code": "RepoNotFound"}, body)
        if path.startswith("/api/"):
            if not path.endswith(("/revision/main", f"/revision/{COMMIT}", "/o/tiny")):
                return self.say(404, {"error": "none"}, {"X-Error-Code": "RevisionNotFound"}, body)
            siblings = []
            for file in sorted(path for path in hub["root"].rglob("*") if path.is_file()):
                data = file.read_bytes()
                name = file.relative_to(hub["root"]).as_posix()
                entry = {"rfilename": name, "size": len(data), "blobId": "x"}
                if file.suffix == ".safetensors":
                    entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
                siblings.append(entry)
            return self.say(200, {"id": "o/tiny", "modelId": "o/tiny", "sha": COMMIT, "siblings": siblings}, {}, body)
        data = (hub["root"] / urllib.parse.unquote(path.partition("/resolve/")[2]).partition("/")[2]).read_bytes()
        etag = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        data = bytes(len(data)) if hub["broken"] and path.endswith(".safetensors") else data
        if span := self.headers.get("Range"):
            begin, _, last = span.removeprefix("bytes=").partition("-")
            begin, last = int(begin), int(last or len(data) - 1)
            if hub["unwell"] and begin:
                hub["unwell"] -= 1
                return self.say(503, {"error": "busy"}, {}, body)
            self.send_response(206)
            headers["Content-Range"] = f"bytes {begin}-{last}/{len(data)}"
            data = data[begin : last + 1]
        else:
            self.send_response(200)
        for name, value in {**headers, "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if body and hub["stalls"] and path.endswith(".safetensors"):
            self.stall(data)
        elif body:
            self.wfile.write(data)
        return None

    def stall(self, data):
        """Send half of it, and then nothing, or break the connection."""
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        if self.server.hub["stalls"] == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        else:
            self.server.hub["go on"].wait(60)

    def say(self, code, record, headers, body):
        data = json.dumps(record).encode()
        self.send_response(code)
        for name, value in {**headers, "Content-Type": "application/json", "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(tiny, tmp_path):
    root = tmp_path / "hub"
    root.mkdir()
    for file in tiny.iterdir():
        (root / file.name).write_bytes(file.read_bytes())
    (root / "consolidated.00.pth").write_bytes(b"no")
    (root / "tokenizer.json").write_text("{}")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.hub = {"root": root, "asked": [], "broken": False, "unwell": 0, "stalls": "", "go on": threading.Event()}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.hub["env"] = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "",
        "HF_HUB_DOWNLOAD_TIMEOUT": "120",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    yield server.hub
    server.shutdown()


def test_only_what_is_needed_verified_and_not_fetched_twice(hub, cli, tmp_path):
    done = cli(tmp_path, "download", "o/tiny", env=hub["env"])
    assert done.returncode == 0, done.stderr
    target = tmp_path / "models/tiny"
    for file in hub["root"].iterdir():
        if file.suffix != ".pth":
            assert (target / file.name).read_bytes() == file.read_bytes()
    assert not (target / "consolidated.00.pth").exists()
    assert "complete: " in done.stdout
    hub["asked"].clear()
    again = cli(tmp_path, "download", "o/tiny", env=hub["env"])
    assert "0 to download" in again.stdout
    assert not any("/resolve/" in path for _, path, *_ in hub["asked"])
    weights = next(target.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)  # touched: fetched again
    assert cli(tmp_path, "download", "o/tiny", env=hub["env"]).returncode == 0
    assert weights.read_bytes() == (hub["root"] / weights.name).read_bytes()


def test_a_dataset(hub, cli, tmp_path):
    for name in ("data/train-0.parquet", "data/test-0.parquet", "notes.txt", "image.png", "README.md"):
        (hub["root"] / name).parent.mkdir(exist_ok=True)
        (hub["root"] / name).write_bytes(name.encode() * 50)

    def brought():
        root = tmp_path / "data/tiny"
        return {path.relative_to(root).as_posix() for path in [*root.glob("[!.]*.*"), *root.glob("data/*")]}

    done = cli(tmp_path, "download", "o/tiny", "--dataset", "--only", "data/train-*", env=hub["env"])
    assert done.returncode == 0, done.stderr
    assert brought() == {"data/train-0.parquet"}
    done = cli(tmp_path, "download", "o/tiny", "--dataset", env=hub["env"])
    assert "3 files, 0.00 GB; 2 to download into data/tiny" in done.stdout
    assert done.stdout.splitlines()[-1] == "complete: train on it with --data.paths data/tiny"
    assert brought() == {"data/train-0.parquet", "data/test-0.parquet", "notes.txt"}
    assert (tmp_path / "data/tiny/notes.txt").read_bytes() == (hub["root"] / "notes.txt").read_bytes()


def test_a_dataset_is_read_where_it_is(hub, cli, demo, tmp_path, monkeypatch):
    records = [{"text": f"größer als {number} " * (1 + number % 7)} for number in range(3000)]
    folder = hub["root"] / "data"
    folder.mkdir()
    lines = "\n".join(json.dumps(each, ensure_ascii=False) for each in records).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[:5000].rpartition(b"\n")[0]))
    pyarrow.parquet.write_table(pyarrow.table({"text": [each["text"] for each in records]}), folder / "c.parquet")
    small = "from llama405b.data import hub, tokens\nhub.RANGE_BYTES = tokens.PART_BYTES = 50_000\n"
    (tmp_path / "sitecustomize.py").write_text(small)  # in the readers' processes too
    hub["env"] |= {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    hub["unwell"] = 2

    def flags(path, out):
        return ["tokenize", "--model.path", str(demo), "--data.paths", path, "--out", out, "--workers", "2"]

    def tokenize(path, out):
        return cli(tmp_path, "data", *flags(path, out), env=hub["env"])

    done = tokenize("hf://datasets/o/tiny/data/*", "streamed")
    assert done.returncode == 0, done.stderr
    assert hub["unwell"] == 0
    assert len([path for _, path, _, span in hub["asked"] if path.endswith("/data/a.jsonl") and span]) > 4  # pieces
    monkeypatch.chdir(tmp_path)
    data.main(flags(str(folder), "local"))
    found = [(tmp_path / out / "tokens.bin").read_bytes() for out in ("streamed", "local")]
    assert found[0] == found[1]
    assert f'"hf://datasets/o/tiny@{COMMIT[:8]}/data/a.jsonl"' in (tmp_path / "streamed/tokens.files").read_text()
    assert {path.name for path in tmp_path.rglob("*") if path.suffix in (".jsonl", ".gz", ".parquet")} == {
        "a.jsonl", "b.jsonl.gz", "c.parquet",
    }  # fmt: skip
    assert {path.parent for path in tmp_path.rglob("a.jsonl")} == {folder}

    (folder / "a.jsonl").write_bytes(lines.replace(b'"text"', b'"no"', 1))
    refused = tokenize("hf://datasets/o/tiny/data/a.jsonl", "bad")
    assert (refused.returncode, f"hf://datasets/o/tiny@{COMMIT[:8]}/data/a.jsonl:1: not " in refused.stderr) == (
        2,
        True,
    )
    refused = tokenize("hf://datasets/o/none", "bad")
    assert (refused.returncode, refused.stderr.count("datasets/o/none: not found on the Hub, or private")) == (2, 1)
    with pytest.raises(
        UserError, match=r"'hf://o/tiny' is not hf://datasets/OWNER/NAME\[@REVISION\]\[/GLOB\]; correct"
    ):
        hub_files("hf://o/tiny")


def test_without_the_weights(hub, cli, tmp_path):
    done = cli(tmp_path, "download", "o/tiny", "--skip-weights", "--to", "small", env=hub["env"])
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "small").iterdir()}
    assert "config.json" in names
    assert not any(name.endswith((".safetensors", ".index.json")) for name in names)


@pytest.mark.parametrize("how", ["killed", "interrupted", "reset"])
def test_what_an_interrupted_download_left_is_deleted_and_begun_again(hub, cli, tmp_path, how):
    hub["stalls"] = "reset" if how == "reset" else "stands"
    words = [sys.executable, "-P", "-m", "llama405b_tools.cli", "download", "o/tiny"]
    left = tmp_path / "models/tiny/.cache/huggingface/download"
    for _ in range(2 if how == "killed" else 1):
        before = set(left.rglob("*.incomplete"))
        with subprocess.Popen(
            words, cwd=tmp_path, env=os.environ | hub["env"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as child:
            if how != "reset":
                wait_for(lambda before=before: set(left.rglob("*.incomplete")) - before)
                if how == "interrupted":
                    other = cli(tmp_path, "download", "o/tiny", env=hub["env"])
                    assert "models/tiny: another download is writing there; wait for it" in other.stderr
                child.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
            said, _ = child.communicate(timeout=50)  # a request's own time limit is longer
            assert child.returncode != 0
            assert (b"interrupted: complete files are kept; run the same command again" in said) == (
                how == "interrupted"
            )
        hub["go on"].set()
        hub["go on"].clear()
        assert len(list(left.rglob("*.incomplete"))) <= MAX_PARALLEL
    hub["stalls"] = ""
    (left / "x.incomplete").write_bytes(b"of an older try")
    done = cli(tmp_path, "download", "o/tiny", env=hub["env"])
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"an interrupted download left \d files? incomplete \(.* MB\): deleted, will be downloaded again", done.stdout
    )
    assert not list(left.rglob("*.incomplete"))
    offline = hub["env"] | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    again = cli(tmp_path, "download", "o/tiny", env=offline)
    assert again.returncode == 0, again.stderr
    assert (
        f"models/tiny: complete as of {COMMIT}; whether o/tiny has changed since is unknown: the Hub cannot be reached"
        in again.stdout
    )
    assert cli(tmp_path, "download", "o/tiny", "--revision", "v1", env=offline).returncode == 1


def test_a_hub_that_sends_something_else_is_found_out(hub, cli, tmp_path):
    hub["broken"] = True
    done = cli(tmp_path, "download", "o/tiny", env=hub["env"])
    assert done.returncode == 1
    assert "its content does not match the Hub's SHA-256, twice" in done.stderr


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="NOT RUN: needs root and unshare")
def test_a_complete_model_where_nobody_may_write_is_complete(hub, cli, tmp_path):
    assert cli(tmp_path, "download", "o/tiny", env=hub["env"]).returncode == 0
    target = tmp_path / "models/tiny"
    (target / ".llama405b-download.json").unlink()  # as older versions left it
    bind = f"mount --bind {target} {target} && mount -o remount,ro,bind {target}"
    words = [sys.executable, "-P", "-m", "llama405b_tools.cli", "download", "o/tiny"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{bind} && exec {shlex.join(words)}"],
        cwd=tmp_path, env=os.environ | hub["env"], capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 to download" in done.stdout


def test_what_failed_halfway_is_complete_of_no_commit(hub, cli, tmp_path):
    assert cli(tmp_path, "download", "o/tiny", env=hub["env"]).returncode == 0
    config = hub["root"] / "config.json"
    config.write_text(config.read_text() + "\n")  # the next commit: this file comes, and the weights break
    next((tmp_path / "models/tiny").glob("*.safetensors")).unlink()
    (tmp_path / "models/tiny/config.json").unlink()
    hub["broken"] = True
    assert cli(tmp_path, "download", "o/tiny", env=hub["env"]).returncode == 1
    offline = cli(tmp_path, "download", "o/tiny", env=hub["env"] | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert offline.returncode == 1
    assert "the Hub cannot be reached" in offline.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["tiny"], 2, "download: 'tiny' is not the name of a model or dataset; write owner/name"),
        (["o/tiny", "--only", "*"], 2, "--only is for datasets, and --skip-weights for models"),
        (["o/tiny", "--dataset", "--skip-weights"], 2, "--only is for datasets, and --skip-weights for models"),
        (["o/none", "--dataset"], 2, "datasets/o/none: not found on the Hub, or private (401)"),
        (["o/tiny", "--dataset", "--only", "train-*"], 2, "o/tiny: has no file train-* (it has "),
        (["o/gated"], 2, "o/gated: access is gated (403); accept the license at https://huggingface.co/o/gated"),
        (["o/none"], 2, "o/none: not found on the Hub, or private (401); check the name, or export HF_TOKEN"),
        (["o/tiny", "--revision", "v9"], 2, "--revision: o/tiny has no such revision"),
    ],
)
def test_what_is_refused_is_one_sentence(hub, cli, tmp_path, args, code, words):
    done = cli(tmp_path, "download", *args, env=hub["env"])
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_network(hub, cli, tmp_path):
    done = cli(tmp_path, "download", "o/tiny", env=hub["env"] | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.returncode == 1
    assert "the Hub cannot be reached" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_token_goes_to_the_hub_alone(hub, cli, tmp_path):
    token = "hf_canaryabcdefghijklmnopqrstuv"
    done = cli(tmp_path, "download", "o/tiny", env=hub["env"] | {"HF_TOKEN": token})
    assert done.returncode == 0, done.stderr
    assert f"Bearer {token}" in {authorization for _, _, authorization, _ in hub["asked"]}
    assert token not in done.stdout + done.stderr
    assert not any(token.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_an_older_model_is_fetched_as_it_is(hub, cli, tmp_path):
    for file in hub["root"].glob("*.safetensors*"):
        file.unlink()
    for name in ("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "optimizer.bin"):
        (hub["root"] / name).write_text("{}")
    done = cli(tmp_path, "download", "o/tiny", env=hub["env"])
    assert done.returncode == 0, done.stderr
    found = {path.name for path in (tmp_path / "models/tiny").iterdir()}
    assert found >= {"pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "config.json"}
    assert "optimizer.bin" not in found
    assert "convert its .bin files with `llama405b export models/tiny OUT`" in done.stdout
