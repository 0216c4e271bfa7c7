"""Compare this checkout with a commit: what each computes, writes, prints and refuses.

    .venv/bin/python scripts/same.py COMMIT [WORDS]

Both run side by side on this machine, with the packages of this checkout's environment: models are trained on meshes, memory and time are
planned, screens are drawn, command lines are refused (refused.txt), and what one has saved the other goes on with. ``WORDS``: only the
comparisons whose name has them. Prints each difference as a diff, and exits with 1 if there is one. What a renaming alone changes is a
pair in RENAMED. Twenty minutes on two cores.
"""

import concurrent.futures
import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from llama405b.contract.reader import Json
from llama405b.settings.renamed import translate_setting

ROOT = Path(__file__).resolve().parent.parent
RENAMED = (
    ("llama405b/capacity/hardware.toml", "llama405b/predict/hardware.toml"),
)  # the commit's name, this checkout's
WORDS_BEFORE = {
    "--model.loss chunked": "--parallel.loss parts",
    "--model.loss": "--parallel.loss",
    "--unhealthy": "--odd",
    "--time-limit": "--within",
    "report --run r": "report r",
    "blame --run r": "blame r",
}  # of a commit before settings/renamed.py: what it is asked instead
HOSTS = "node-a address=localhost slots=1\nnode-b address=localhost slots=1\n"
FILES = {  # of a working directory; what is wrong with some is in their names
    "hosts": HOSTS,
    "corpus.jsonl": "".join(json.dumps({"text": f"{n} {'the cat sat on the mat and looked at the rain ' * 3}"}) + "\n" for n in range(300)),
    "bad.jsonl": '{"text": "x"}\n{"txt": "y"}\n',
    "hosts.bin": "\x00\x01\x02",
    "broken.toml": "[model\n",
    "unknown.toml": "[optimizer]\nlearning_rate = 1\n",
    "wrong.toml": '[optimizer]\nlr = "fast"\n',
    "two.toml": "[data]\nseq_len = 8\nseq_len = 9\n",
    "empty.hosts": "# nobody\n",
    "twice.hosts": "a\nb\na\n",
    "dash.hosts": "-oProxyCommand=x\n",
    "quote.hosts": "a workdir='/w x\n",
    "slots.hosts": "a slots=0\n",
    "port.hosts": "10.0.0.1:8\n",
    "ipv6.hosts": "me@fd00::7\n",
    "long.hosts": "a" * 5000 + "\n",
    "control.hosts": "a workdir=/\x1b[31mred\n",
    "loop.hosts": "localhost\nb\n",
}  # fmt: skip
TRAIN = "--preset demo --model.path models/demo --data.paths corpus.jsonl --data.seq_len 64 --parallel.device cpu --evaluation.every 2"
STEPS = (
    f"{TRAIN} --training.global_batch_size 8 --training.micro_batch_size 2 --training.max_steps 4 --checkpoint.every 2"
)
MESHES = {  # ranks and settings
    "alone": (1, ""),
    "dp_shard": (2, ""),
    "ddp": (2, "--parallel.strategy ddp"),
    "zero1": (2, "--parallel.strategy zero1"),
    "hsdp": (4, "--parallel.dp_replicate 2"),
    "tp": (2, "--parallel.tp 2"),
    "cp": (2, "--parallel.cp 2"),
    "pp": (2, "--parallel.pp 2"),
    "tp-pp": (4, "--parallel.tp 2 --parallel.pp 2"),
    "chunked": (2, "--model.loss chunked"),
    "master": (2, "--parallel.numerics fp32-master --parallel.offload optimizer"),
    "all offloaded": (2, "--parallel.numerics fp32-master --parallel.offload all --model.activations host"),
    "stochastic": (2, "--parallel.numerics bf16-stochastic --model.activation_checkpointing operators"),
    "pure": (1, "--parallel.numerics pure-bf16 --model.fused true"),
    "lora": (2, "--adapter.kind lora --adapter.rank 4"),
}
PRESETS = "demo llama3.1-405b llama3.1-70b llama3.1-8b llama3.2-1b mistral-7b olmo2-7b qwen2.5-7b qwen3-8b"
CLUSTERS = (
    "--gpu h100-80 --nodes 8 --search",
    "--gpu a100-40 --nodes 2 --nic 100Gb/s --ram 1000GiB --what-if data.seq_len=2048,4096",
    "--gpu gb200-186 --nodes 16 --tokens 1e9 --price 3",
)
LIMIT_S = 300  # of one command
Said = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Tree:
    """A checkout, and the directory in which its commands run."""

    root: Path
    work: Path

    def command(self, *argv: str, cwd: Path | None = None) -> str:
        """Run a Python module with its arguments; returns exit code and output, in which both trees have one name."""
        if not (self.root / "llama405b/settings/renamed.py").exists():
            line = shlex.join(argv)
            for now, before in WORDS_BEFORE.items():
                line = line.replace(now, before)
            argv = tuple(shlex.split(line))
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.work), "PYTHONPATH": f"{self.root}:{self.root}/tools", "COLUMNS": "100",
            "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        # timeout ends all that the command started
        command = ["timeout", "-k", "5", str(LIMIT_S), sys.executable, "-P", "-m", *argv]
        done = subprocess.run(
            command, cwd=cwd or self.work, env=environment, capture_output=True, text=True, check=False, errors="replace",
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        text = f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
        for path, name in ((sys.prefix, "PYTHON"), (self.work, "WORK"), (self.root, "TREE")):
            text = text.replace(str(path), name)
        return re.sub(r"\d{8}-\d{6}", "NOW", text)  # in the name of a run

    def verb(self, line: str, cwd: Path | None = None) -> str:
        """Run ``llama405b`` with a line of words."""
        return self.command("llama405b_tools.cli", *shlex.split(line), cwd=cwd)

    def furnish(self) -> None:
        """Make the working directory, whose code is this tree's for whatever runs in it."""
        self.work.mkdir(parents=True)
        for name, text in FILES.items():
            (self.work / name).write_text(text)
        self.enter(self.work)
        self.verb("demo models/demo")

    def enter(self, directory: Path) -> None:
        """Have what runs in a directory be of this tree."""
        for name in ("llama405b", "tools"):
            (directory / name).unlink(missing_ok=True)
            (directory / name).symlink_to(self.root / name)


def demo(tree: Tree) -> Said:
    """The bytes of a model that is made."""
    return {path.name: _digest(path) for path in sorted((tree.work / "models/demo").iterdir())}


def losses(tree: Tree) -> Said:
    """Losses, norms and evaluations on meshes."""
    found = {}
    for name, (world, flags) in MESHES.items():
        run = tree.work / "runs" / name.replace(" ", "-")
        argv = f"torch.distributed.run --standalone --nproc-per-node {world} -m llama405b.train --run-dir {run} {STEPS} {flags}"
        said = tree.command(*argv.split())
        if not said.startswith("exit code 0\n"):
            raise SystemExit(f"{tree.root}: {name} does not train: {said}")
        found[name] = _rows(run)
    return found


def plans(tree: Tree) -> Said:
    """What each preset needs on three clusters."""
    lines = [f"plan --preset {preset} {cluster} --json" for preset in PRESETS.split() for cluster in CLUSTERS]
    return {line: _pretty(tree.verb(line)) for line in lines}


def screens(tree: Tree) -> Said:
    """A recording as text and as JSON, and the pictures that tests hold it to."""
    pictures = {
        path.name: path.read_text() for path in sorted((tree.root / "tests/data/screens").rglob("*")) if path.is_file()
    }
    ways = ("--once", "--json", "--plain", "--once --sort name --unhealthy")
    return pictures | {way: _pretty(tree.verb(f"top --replay demo {way}")) for way in ways}


def helps(tree: Tree) -> Said:
    """The help of every verb."""
    usage = tree.verb("--help")
    verbs = re.findall(r"^  (\w+) +\S", usage, re.MULTILINE)
    others = [tree.verb(line) for line in ("train --schema", "data show --help", "data tokenize --help")]
    return {"": usage, "others": "".join(others)} | {verb: tree.verb(f"{verb} --help") for verb in verbs}


def refusals(tree: Tree) -> Said:
    """Exit code and words of command lines that are wrong."""
    lines = [
        line for line in (ROOT / "scripts/refused.txt").read_text().splitlines() if line and not line.startswith("#")
    ]
    return {line: tree.verb(line) for line in lines}


SIDE_BY_SIDE: tuple[Callable[[Tree], Said], ...] = (demo, helps, refusals, plans, screens, losses)


def across(old: Tree, new: Tree, scratch: Path) -> Iterator[tuple[str, str, str]]:
    """Yield what each tree makes of a run that the commit has saved: name, the commit's, this checkout's."""
    place = scratch / "across"
    shutil.copytree(old.work, place, symlinks=True, ignore=shutil.ignore_patterns("runs"))
    launch = f"launch hosts --run r --env OMP_NUM_THREADS=1 {STEPS} --follow"
    old.enter(place)
    began = old.verb(launch, place)
    if not began.startswith("exit code 0\n"):
        raise SystemExit(f"the commit trains no run on two hosts: {began}")
    for line in (
        "status --run r",
        "status --run r --json",
        "report --run r --out page.html",
        "logs --run r -o raw --stderr",
        "top --run r --once",
    ):
        yield (line, *(_timeless(_told(tree, line, place)) for tree in (old, new)))
    of = {}
    for name, tree in (("old", old), ("new", new)):
        copy = scratch / f"across-{name}"
        shutil.copytree(place, copy, symlinks=True)
        tree.enter(copy)
        export = tree.verb("export r out hosts --dtype fp32", copy)
        blame = tree.verb("blame --run r 4 hosts", copy)
        again = launch.replace("max_steps 4", "max_steps 8") + " --resume auto"
        resumed = tree.verb(again, copy)
        resumed, export, blame = (said.replace(str(copy), "WORK") for said in (resumed, export, blame))
        blamed = [path.read_text() for path in sorted(copy.glob("runs/r-blame-4/blamed.jsonl"))]
        of[name] = {
            "export": _timeless(export),
            "model": _digest(copy / "out/model.safetensors"),
            "blame": "".join(blamed) or blame,
            "losses": _rows(copy / "runs/r") if resumed.startswith("exit code 0\n") else resumed,
        }
    fine = "an answer, or one sentence"
    for name, operator, host in (("the commit's", new, old), ("this checkout's", old, new)):
        host.enter(place)
        said = operator.verb("status hosts", place)
        is_fine = said.startswith("exit code 0\n") or (len(said.splitlines()) == 2 and "; run `" in said)
        yield f"what {name} agent says to the other version", fine, fine if is_fine else said
    for what in of["old"]:
        yield f"{what}, of what the commit saved", of["old"][what], of["new"][what]
    yield "restart under a guard of what the commit saved", "restarted", _restarted(new, scratch / "across-new", launch)


def _told(tree: Tree, line: str, place: Path) -> str:
    tree.enter(place)
    return tree.verb(line, place).replace(str(place), "WORK")


def _restarted(tree: Tree, place: Path, launch: str) -> str:
    """Have a guard restart a run that one of its ranks left; returns 'restarted', or what happened."""
    line = launch.replace("max_steps 4", "max_steps 100000").replace("--follow", "--resume auto --restart 2")
    said = tree.verb(line, place)
    deadline, restarts = time.monotonic() + 120, 0
    killed = False
    try:
        while time.monotonic() < deadline and not restarts:
            time.sleep(0.3)
            with contextlib.suppress(OSError, ValueError, KeyError):
                restarts = json.loads((place / "runs/r/guard.json").read_text())["restarts"]
                found = json.loads((place / "runs/r/heartbeat/rank-1.json").read_text())
                if not killed and found["step"] > 9:
                    os.kill(found["pid"], signal.SIGKILL)
                    killed = True
    finally:
        tree.verb("stop --run r --grace 0 hosts", place)
    return "restarted" if restarts else said


def _rows(run: Path) -> str:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "lr", "evaluation_loss")
    return "\n".join(json.dumps({name: row[name] for name in names if name in row}) for row in rows)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _pretty(said: str) -> str:
    """Each line of JSON on lines of its own, so that a diff of it can be read, and settings under their present names."""
    lines = said.splitlines()
    for number, line in enumerate(lines):
        with contextlib.suppress(ValueError):
            lines[number] = json.dumps(json.loads(line, object_hook=_renamed), indent=1, sort_keys=True)
    return "\n".join(lines)


def _renamed(record: dict[str, Json]) -> dict[str, Json]:
    pairs = (translate_setting(f"parallel.{key}", value) for key, value in record.items())
    return {key.partition(".")[2]: value for pair in pairs for key, value in pair.items()}


def _timeless(text: str) -> str:
    """Without times, rates, sizes of memory and process ids, which no two runs share."""
    return re.sub(r" *[\d.,:]*\d[\d.,:e+-]*", " N", text)


def differences(name: str, old: str, new: str) -> list[str]:
    """The lines of a diff; none if both are the same, but for the renamings."""
    for before, after in RENAMED:
        old = old.replace(before, after)
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "the commit", "this checkout", lineterm="", n=1)
    return [f"{name}:", *(f"  {line}" for line in lines)] if old != new else []


def main(commit: str, words: str) -> int:
    """Compare; returns 1 if something differs."""
    found, count = 0, 0
    with tempfile.TemporaryDirectory(prefix="l4same-") as directory:
        scratch = Path(directory)
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", scratch / "commit", commit], cwd=ROOT, check=True
        )
        try:
            old, new = Tree(scratch / "commit", scratch / "old"), Tree(ROOT, scratch / "new")
            with concurrent.futures.ThreadPoolExecutor(2) as both:
                list(both.map(Tree.furnish, (old, new)))
                for compare in SIDE_BY_SIDE:
                    if words not in compare.__name__:
                        continue
                    told = [*both.map(compare, (old, new))]
                    names = dict.fromkeys([*told[0], *told[1]])
                    pairs = [
                        (f"{compare.__name__}: {name}", *(each.get(name, "nothing\n") for each in told))
                        for name in names
                    ]
                    found, count = found + _print(pairs), count + len(pairs)
            if words in "across":
                pairs = [(f"across: {name}", *told) for name, *told in across(old, new, scratch)]
                found, count = found + _print(pairs), count + len(pairs)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", scratch / "commit"], cwd=ROOT, check=True)
    print(f"{count} comparisons, {found} differ")
    return int(found > 0 or count == 0)


def _print(pairs: list[tuple[str, str, str]]) -> int:
    differ = [lines for pair in pairs if (lines := differences(*pair))]
    for lines in differ:
        print(*lines[:40], *([f"  … {len(lines) - 40} lines more"] if len(lines) > 40 else []), sep="\n", flush=True)
    print(f"{pairs[0][0].partition(':')[0]}: {len(pairs) - len(differ)} of {len(pairs)} the same", flush=True)
    return len(differ)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], " ".join(sys.argv[2:])))
