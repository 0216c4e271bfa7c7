"""A checkpoint becomes a model that transformers loads: the same weights, whatever saved it, and only what is intact."""

import contextlib
import http.server
import json
import os
import re
import shutil
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from llama405b.commands import export as writing
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import USERS_UMASK, set_private_umask
from llama405b.contract.paths import RunDir
from llama405b.settings.config import to_toml
from llama405b.settings.schema import Config
from llama405b.spec.models import SMALL_FILES
from llama405b.spec.tensors import read_tensors
from llama405b_tools.verbs import export
from ranks_rig import run_ranks
from update_rig import batch, build, data_file, flip, save, take

HELD = torch.randint(0, 131, (4, 17), generator=torch.Generator().manual_seed(99))


def _save(me, directory, root, steps, form):
    """Train, save, and return the loss of a held batch."""
    from llama405b.checkpoint.store import Store

    module, updater = build(me, directory, overlap=True, **form)
    for number in range(1, steps + 1):
        take(me, module, updater, number)
    updater.wait()
    run = RunDir(root / "runs/r")
    if me.is_rank0:
        run.model(me.host).mkdir(parents=True)
        for name in SMALL_FILES:
            if (directory / name).is_file():
                (run.model(me.host) / name).write_bytes((directory / name).read_bytes())
        (run.model(me.host) / "LICENSE.txt").write_text("terms")
        run.config.write_text(to_toml(Config()))
    with contextlib.closing(Store(run.checkpoints, 2, me, run=run)) as store:
        store.acquire()
        save(store, steps, updater)
    with torch.no_grad():
        logits = module(input_ids=HELD[:, :-1], use_cache=False).logits
        return float(F.cross_entropy(logits.flatten(0, 1).float(), HELD[:, 1:].flatten()))


def saved(directory, root, *, world=1, steps=2, offload="all", numerics="fp32"):
    losses = run_ranks(world, _save, directory, root, steps, {"offload": offload, "numerics": numerics})
    return losses[0]


def loss_of(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", attn_implementation="sdpa").eval()
    with torch.no_grad():
        logits = model(input_ids=HELD[:, :-1]).logits
    return float(F.cross_entropy(logits.flatten(0, 1).float(), HELD[:, 1:].flatten()))


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("exported")
    saved(tiny, root, steps=1)
    return root


@pytest.fixture
def at(run, monkeypatch):
    monkeypatch.chdir(run)
    return run


@pytest.mark.parametrize(("model", "world"), [("tiny", 2), ("tiny_tied", 3)])
def test_transformers_computes_the_trainers_own_loss(request, tmp_path, monkeypatch, model, world):
    monkeypatch.chdir(tmp_path)
    loss = saved(request.getfixturevalue(model), tmp_path, world=world)
    assert export.main(["r", "out", "--dtype", "fp32"]) == 0
    assert loss_of("out") == pytest.approx(loss, abs=1e-5)
    assert ("lm_head.weight" in read_tensors(Path("out"))) == (model == "tiny")


@pytest.mark.parametrize("offload", ["all", "optimizer"])
def test_an_untrained_load_is_given_back_bit_for_bit(tiny, tmp_path, monkeypatch, offload):
    monkeypatch.chdir(tmp_path)
    LlamaForCausalLM.from_pretrained(tiny).to(torch.bfloat16).save_pretrained("bf16")
    for name in SMALL_FILES[1:]:
        if (tiny / name).is_file():
            (tmp_path / "bf16" / name).write_bytes((tiny / name).read_bytes())
    saved(tmp_path / "bf16", tmp_path, world=2, steps=0, offload=offload, numerics="fp32-master")
    assert export.main(["runs/r/checkpoints/step-00000000", "out"]) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict() for path in ("bf16", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_many_files_have_an_index_and_are_one_model(at, tmp_path, monkeypatch):
    assert export.main(["r", str(tmp_path / "one"), "--dtype", "fp32"]) == 0
    monkeypatch.setattr(writing, "FILE_BYTES", 20_000)
    assert export.main(["r", str(tmp_path / "many"), "--dtype", "fp32"]) == 0
    assert export.main(["r", str(tmp_path / "whole"), "--dtype", "fp32", "--one-file"]) == 0
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) == 1
    losses = {loss_of(tmp_path / name) for name in ("one", "many", "whole")}
    assert len(losses) == 1
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.n_bytes for info in read_tensors(tmp_path / "many").values())


def test_after_a_full_disk_no_hidden_file_takes_the_room_that_is_asked_for_in_words(at, tmp_path, monkeypatch):
    out, read = tmp_path / "out", writing.SavedWeights.read

    def full(self, name):
        if "norm" in name:
            raise OSError(28, "No space left on device")
        return read(self, name)

    monkeypatch.setattr(writing.SavedWeights, "read", full)
    with pytest.raises(RunError, match="No space left on device"):
        export.main(["r", str(out)])
    assert [path.name for path in out.iterdir()] == [writing.EXPORT_RECORD]
    monkeypatch.undo()
    monkeypatch.chdir(at)
    killed = out / ".model.safetensors.partial"
    killed.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(writing, "disk_free_bytes", lambda _: 1000 if killed.exists() else 2000)
    with pytest.raises(UserError, match=r"out: 0\.00 MB free, but 0\.[0-9]+ MB are needed; name another disk"):
        export.main(["r", str(out)])
    assert not killed.exists()


def test_every_reader_finds_the_template_of_the_training_and_no_code_that_is_not_there(at, demo, tmp_path, monkeypatch):
    small = tmp_path / "small"
    shutil.copytree(at / "runs/r/model" / next((at / "runs/r/model").iterdir()).name, small)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, small)
    for name, more in (
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}}),
        (
            "tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}, "chat_template": "old"},
        ),
    ):
        (small / name).write_text(json.dumps(json.loads((small / name).read_text()) | more))
    (small / "chat_template.jinja").write_text("new é")
    out, users = tmp_path / "out", os.umask(0o022)
    monkeypatch.delenv(USERS_UMASK, raising=False)
    try:
        set_private_umask()  # as launch, a guard and an agent do before they start an export
        assert export.main(["r", str(out), "--model", str(small)]) == 0
    finally:
        os.umask(users)
    assert {oct(path.stat().st_mode & 0o777) for path in (out, *out.iterdir())} == {"0o755", "0o644"}
    described = {name: json.loads((out / name).read_text()) for name in ("config.json", "tokenizer_config.json")}
    assert not any("auto_map" in each for each in described.values())
    assert (out / "chat_template.jinja").read_text() == described["tokenizer_config.json"]["chat_template"] == "new é"
    assert AutoTokenizer.from_pretrained(out).chat_template == "new é"
    assert loss_of(out) > 0  # without code of anybody


def test_an_interrupted_export_goes_on_where_it_was(at, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writing, "FILE_BYTES", 20_000)
    out, write, written = tmp_path / "out", writing.write_tensors, []

    def full(path, *args):
        written.append(path.name)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return write(path, *args)

    monkeypatch.setattr(writing, "write_tensors", full)
    with pytest.raises(RunError, match="run the same command to resume"):
        export.main(["r", str(out)])
    assert not (out / "model.safetensors.index.json").exists()
    (out / written[0]).write_bytes(b"touched")  # which is written again
    done, written[:] = written[:2], ["", "", "", ""]
    assert export.main(["r", str(out)]) == 0
    assert done[0] in written
    assert done[1] not in written
    capsys.readouterr()
    count = len(written)
    assert export.main(["r", str(out)]) == 0
    assert len(written) == count
    with pytest.raises(UserError, match="another checkpoint, or in another dtype"):
        export.main(["r", str(out), "--dtype", "fp32"])
    with pytest.raises(UserError, match="of the same model into other files; name another directory"):
        export.main(["r", str(out), "--one-file"])


def test_one_that_was_interrupted_in_its_first_file_goes_on(at, tmp_path, monkeypatch):
    read = writing.SavedWeights.read

    def interrupted(saved, name):
        raise KeyboardInterrupt

    monkeypatch.setattr(writing.SavedWeights, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export.main(["r", str(tmp_path / "out")])
    monkeypatch.setattr(writing.SavedWeights, "read", read)
    assert export.main(["r", str(tmp_path / "out")]) == 0
    assert not list((tmp_path / "out").glob(".*.partial"))


def test_one_tensor_at_a_time_is_in_memory(at, tmp_path, monkeypatch):
    alive, most, read = [], [], writing.SavedWeights.read

    def watched(saved, name):
        most.append(sum(each() is not None for each in alive))
        tensor = read(saved, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(writing.SavedWeights, "read", watched)
    assert export.main(["r", str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    assert len(most) > 10
    assert max(most) == 0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda step: flip(step / "index.json"), "index.json: its content does not match its checksum"),
        (
            lambda step: flip(data_file(step, 0, "weights")),
            r"\w+-0-\d.safetensors: its content does not match its checksum",
        ),
        (
            lambda step: data_file(step, 0, "weights").write_bytes(b""),
            r"\w+-0-\d.safetensors: missing, or its size differs from what was saved",
        ),
        (lambda step: flip(step / "manifest.json"), "its manifest does not verify"),
        (lambda step: (step / "manifest.json").unlink(), "has no manifest"),
    ],
)
def test_what_is_damaged_is_not_exported(run, tmp_path, monkeypatch, damage, words):
    import shutil

    shutil.copytree(run / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    step = tmp_path / "runs/r/checkpoints/step-00000001"
    damage(step)
    with pytest.raises(UserError) as refused:
        export.main(["r", "out"])
    assert re.search(words, str(refused.value))
    assert not list(tmp_path.glob("out/*.safetensors"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nosuch", "out"], "nosuch: neither a run in this directory nor a checkpoint"),
        (["r", "out", "--step", "7"], "--step: runs/r/checkpoints has no step 7; choose from 1"),
        (["r", "runs"], "runs: holds r, which is not from an export; name another directory"),
        (["r", "out", "--model", "runs"], "runs/config.json: No such file or directory"),
        (["r", "out", "--push-to-hub", "name"], "--push-to-hub: 'name' is not a model name"),
    ],
)
def test_bad_input_writes_nothing(at, args, words):
    with pytest.raises(UserError) as refused:
        export.main(args)
    assert words in str(refused.value)
    assert not (at / "out").exists()


def test_a_directory_that_a_file_server_or_git_has_filled_is_empty(at):
    for name in ("@eaDir/x", ".git/config", ".gitattributes", "Thumbs.db"):
        (at / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (at / "out" / name).write_text("x")
    for _ in range(2):
        assert export.main(["r", "out"]) == 0


def test_another_models_files_are_refused(at, tiny_tied, tmp_path):
    other = json.loads((tiny_tied / "config.json").read_text()) | {"intermediate_size": 999}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"mlp.gate_proj.weight is .* requires"):
        export.main(["r", str(tmp_path / "out"), "--model", str(tmp_path)])


def test_what_this_machine_cannot_hold_is_not_tried(at, tmp_path, monkeypatch, capsys):
    assert export.main(["r", str(tmp_path / "out"), "--try", "x"]) == 1
    assert "has no tokenizer.json to read a prompt with" in capsys.readouterr().out
    (tmp_path / "out/tokenizer.json").touch()
    monkeypatch.setattr(writing, "_pick_device", lambda: ("cpu", 1000))
    assert export.main(["r", str(tmp_path / "out"), "--try", "x"]) == 3
    said = capsys.readouterr().out
    assert "but this machine has 0.0 GB; give " in said
    assert "exported " in said


class Hub(http.server.BaseHTTPRequestHandler):
    """Takes one upload, in the Hub's protocol for files that it stores itself."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        answer = {"url": f"{self.server.url}/o/new", "name": "o/new", "id": "1"}
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif self.path.endswith("/commit/main"):
            self.server.took += [json.loads(line) for line in body.splitlines()]
            answer = {
                "success": True,
                "commitUrl": f"{self.server.url}/o/new/commit/1",
                "commitOid": "1",
                "hookOutput": "",
            }
        self.say(answer)

    def do_HEAD(self):
        """Whether it has the card."""
        assert self.path.endswith("/README.md")
        card = self.server.card
        self.send_response(200 if card else 404)
        self.send_header("ETag" if card else "X-Error-Code", '"1"' if card else "EntryNotFound")
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(card)))
        self.end_headers()

    def do_GET(self):
        if self.path.endswith("/README.md"):
            self.do_HEAD()
            self.wfile.write(self.server.card)
            return
        self.say({"id": "o/new", "sha": "0" * 40, "siblings": [], "gitalyUid": "", "private": True})

    def say(self, answer):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_it_is_uploaded_whole(at, tmp_path, cli):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.took, server.card, server.url = [], b"", f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_x",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    out, sent = tmp_path / "out", []
    for card in (
        b"",
        b"theirs",
        b"---\nlibrary_name: transformers\n---\n\n# x\n\nTrained with llama405b 0.1: step 7.\n",
    ):
        server.took, server.card = [], card
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)  # where it keeps what it has read
        done = cli(at, "export", "r", out, "--push-to-hub", "o/new", env=env)
        assert done.returncode == 0, done.stderr
        assert "uploaded to o/new" in done.stdout
        sent.append({entry["value"]["path"] for entry in server.took if entry["key"] == "file"})
    assert (
        sent[0]
        == {path.name for path in out.iterdir() if not path.name.startswith(".")}
        >= {"README.md", "LICENSE.txt"}
    )
    assert sent[1] == sent[0] - {"README.md"}
    assert sent[2] == sent[0]  # that one is of another step
    assert (out / "LICENSE.txt").read_text() == "terms"
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n---\n\n# out\n\nTrained with llama405b ")
    assert ": step 1" in card
    (out / "README.md").write_text("mine")
    (out / "LICENSE.txt").unlink()
    again = cli(at, "export", "r", out, "--push-to-hub", "o/new", env=env)
    assert again.returncode == 0, again.stderr
    assert server.took[0]["key"] == "header"
    assert [entry["value"]["path"] for entry in server.took if entry["value"].get("path") == "README.md"]
    assert (out / "README.md").read_text() == "mine"
    server.shutdown()
    env["HF_ENDPOINT"] = "http://127.0.0.1:9"
    refused = cli(at, "export", "r", tmp_path / "other", "--push-to-hub", "o/new", env=env)
    assert refused.returncode == 1
    assert not (tmp_path / "other").exists()  # nothing was begun


def test_the_held_batch_is_not_one_that_was_trained_on():
    class Me:
        world_size, index = 1, 0

    trained = [x for number in range(1, 3) for x in (each.ids_BS for each in batch(number, Me, 1))]
    assert not any(bool((row[:16] == HELD[0, :16]).all()) for x in trained for row in x)


def _pickle(tiny, root, *, legacy=False, single=False, dtype=torch.float16):
    """Write a model as transformers did before safetensors; returns its tensors."""
    model = LlamaForCausalLM.from_pretrained(tiny).to(dtype)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    root.mkdir()
    for name in SMALL_FILES:
        if (tiny / name).is_file():
            (root / name).write_bytes((tiny / name).read_bytes())
    names = list(state)
    parts = {"pytorch_model.bin": names}
    if not single:
        parts = {f"pytorch_model-0000{i}-of-00002.bin": names[i - 1 :: 2] for i in (1, 2)}
        index = {name: file for file, held in parts.items() for name in held}
        (root / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    for file, held in parts.items():
        content = {name: state[name] for name in held} | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
        torch.save(content, root / file, _use_new_zipfile_serialization=not legacy)
    return state


@pytest.mark.parametrize(("legacy", "single", "dtype"), [(False, False, torch.float16), (True, True, torch.bfloat16)])
def test_an_older_models_files_are_converted_bit_for_bit(tiny, tmp_path, legacy, single, dtype):
    state = _pickle(tiny, tmp_path / "old", legacy=legacy, single=single, dtype=dtype)
    with pytest.raises(UserError, match=r"has \.bin files; convert them with `llama405b export .*old OUT`"):
        read_tensors(tmp_path / "old")
    assert export.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto").state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == dtype for name in state)


@pytest.mark.parametrize("full", [False, True])
def test_a_file_for_each_layer_is_converted_bit_for_bit(tiny, tmp_path, full):
    root, state = tmp_path / "layers", LlamaForCausalLM.from_pretrained(tiny).state_dict()
    shutil.copytree(tiny, root, ignore=shutil.ignore_patterns("*.safetensors*"))
    modules = {}
    for name, tensor in state.items():
        module = ".".join(name.split(".")[:3]) if ".layers." in name else name.rpartition(".")[0]
        modules.setdefault(module, {})[name if full else name.removeprefix(f"{module}.")] = tensor
    for module, content in modules.items():
        torch.save(content, root / f"{module}.pt")
    with pytest.raises(UserError, match=r"has \.pt files; convert them with `llama405b export .*layers OUT`"):
        read_tensors(root)
    assert export.main([str(root), str(tmp_path / "new"), "--dtype", "fp32"]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto").state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    torch.save({"model.norm.weight": torch.ones(24)}, root / "lm_head.pt")
    with pytest.raises(UserError, match=r"model\.norm\.weight is also in lm_head\.pt; delete one of them"):
        export.main([str(root), str(tmp_path / "twice")])
    (root / "lm_head.pt").unlink()
    with pytest.raises(UserError, match="lm_head"):
        export.main([str(root), str(tmp_path / "lacking")])


class _Evil:
    def __reduce__(self):
        return Path.touch, (Path("was-run"),)


def test_an_older_models_file_is_not_trusted(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, spoil, words in (
        ("evil", lambda file: torch.save({"x": _Evil()}, file), "contains more than tensors, or is damaged"),
        ("torn", lambda file: file.write_bytes(file.read_bytes()[:-3000]), "cannot be read"),
        ("gone", lambda file: file.unlink(), "missing; download the files of the index"),
        ("list", lambda file: torch.save([torch.ones(1)], file), "is not a dictionary of tensors"),
        ("more", lambda file: torch.save(torch.load(file) | {"x": torch.ones(1)}, file), "has x, but a model of"),
    ):
        _pickle(tiny, tmp_path / name)
        file = tmp_path / name / "pytorch_model-00002-of-00002.bin"
        spoil(file)
        with pytest.raises(UserError, match=words):
            export.main([name, "out"])
        assert not Path("out").exists()
    assert not Path("was-run").exists()
