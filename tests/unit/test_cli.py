"""The command line, and that the tools never import torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from conftest import ROOT
from llama405b.contract.paths import UMASK
from llama405b.contract.software import code_version
from llama405b.settings.schema import SETTING_TYPES
from llama405b_tools import cli


def test_help_fits_one_screen_and_names_every_verb():
    lines = cli.usage().splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    assert all(any(line.startswith(f"  {verb} ") for line in lines) for verb in cli.VERBS)


@pytest.mark.parametrize("verb", ["report", "autopsy", "logs", "top", "launch", "blame"])
def test_what_a_verb_writes_is_for_its_owner_alone(verb):
    before = os.umask(0o022)
    try:
        assert cli.main([verb, "--no-such"]) == 2
        assert os.umask(0o022) == UMASK
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "words",
    [
        "ask save --run r /nosuch",
        "ask --run r save /nosuch",
        "blame 5 --run r /nosuch",
        "push /tmp --to d /nosuch",
        "export r out --step 4 /nosuch",
        "status --run r /nosuch",
        "launch --run r /nosuch --preset demo",
    ],
)
def test_hosts_may_follow_an_option(words, capsys):
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err.startswith("llama405b: /nosuch: cannot be read")


def test_the_version_tells_this_code_from_any_other(capsys):
    assert cli.main(["--version"]) == 0
    said = capsys.readouterr().out
    git = ["git", "-C", ROOT, "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    assert said.replace("+changes", "") == f"llama405b {code_version()}" + f" ({commit})" * bool(commit) + "\n"


NO_TORCH = """import sys
for name in ("torch", "transformers", "numpy", "huggingface_hub", "tokenizers", "pyarrow", "safetensors"):
    sys.modules[name] = None
from llama405b.settings.schema import SETTING_TYPES
from llama405b_tools import cli
sys.exit(cli.main(sys.argv[1:]))"""


def without_torch(*words):
    """Run a command on an operator's machine, which has none of the trainer's packages."""
    return subprocess.run([sys.executable, "-c", NO_TORCH, *words], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["data"],
        ["data", "show"],
        ["data", "tokenize"],
        ["demo"],
        ["bench"],
        ["download"],
        ["export"],
    ],
    ids=" ".join,
)
def test_help_needs_none_of_the_trainers_packages(words):
    done = without_torch(*words, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: llama405b {' '.join(words)}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["export", "step-00000002", "out"],
        ["download", "owner/name"],
        ["data", "show", "--model.path", "m", "--data.paths", "d"],
        ["demo", "d"],
        ["bench"],
    ],
    ids=lambda words: words[0],
)
def test_a_verb_whose_packages_are_missing_says_so(words, tmp_path):
    done = without_torch(*words)
    assert done.returncode == 2
    assert re.fullmatch(rf"llama405b: {words[0]} needs \w+, which is not installed; in a checkout: .*\n", done.stderr)


def test_what_other_programs_call_a_verb_is_answered_with_ours():
    for word, command in cli.SYNONYMS.items():
        verb, *options = command.split()
        assert word not in cli.VERBS
        assert verb in cli.VERBS
        if options:
            done = subprocess.run(
                [sys.executable, "-m", "llama405b_tools.cli", verb, "--help"],
                capture_output=True,
                text=True,
                check=True,
            )
            assert options[0] in done.stdout


def test_unknown_verb(capsys):
    assert cli.main(["lunch"]) == 2
    assert "unknown verb 'lunch'" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["\x1b]0;title\x07\x1b[31mred\x9b", "x" * 1_000_000])
def test_nothing_raw_reaches_the_terminal(word, capsys):
    assert cli.main(["status", "hosts", word]) == 2
    said = capsys.readouterr().err
    assert said.startswith("llama405b: ")
    assert said.rstrip("\n").isprintable()
    assert len(said) < 30_000


@pytest.mark.parametrize("argv", [["--help"], ["launch", "--preset", "demo", "--dry-run"], ["train", "--help"]])
def test_the_control_plane_needs_msgspec_alone(argv, tmp_path):
    (tmp_path / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    code = (
        f"import sys\nsys.path[:0] = ['{ROOT}', '{ROOT}/tools', '{tmp_path}']\n"
        f"from llama405b_tools.cli import main\nsys.exit(main({argv!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_training_verbs_say_what_is_missing():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.path[:0] = ['{ROOT}', '{ROOT}/tools']\n"
        "from llama405b_tools.cli import main\nsys.exit(main(['demo', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    said = "llama405b: demo needs torch, which is not installed; in a checkout: uv tool install '.[train]', or "
    assert done.stderr == f"{said}.venv/bin/llama405b after `bash launch.sh`\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["top", "--watch", "0"], "--watch: 0.0 s"),
        (["top", "--watch", "nan"], "--watch: nan s"),
        (["top", "--speed", "0"], "--speed: 0;"),
        (["top", "--speed", "2"], "--speed works only with --replay"),
        (["top", "--interval", "0.1"], "--interval: 0.1 s"),
        (["top", "--replay", "x", "--run", "y"], "--replay: a recording has its own hosts"),
        (["launch", "--restart", "2000"], "--restart: 2000 times"),
        (["launch", "--notify", "x"], "--notify needs --restart"),
        (["launch", "--slurm", "", "--restart", "2"], "--slurm: --restart"),
        (["launch", "--port", "70000"], "--port: 70000"),
        (["launch", "--rehearse", "--resume", "auto"], "--rehearse is a run of its own"),
        (["launch", "--rehearse", "--preset", "x", "--", "a.py"], "--preset: settings are for the trainer"),
        (["launch", "--rehearse", "--", "a.py"], "--rehearse: settings are for the trainer"),
        (["launch", "--cache", "/nvme"], "--cache and --scratch are for --slurm"),
        (["launch", "--slurm", "", "--scratch", "tmp"], "--scratch: 'tmp' is relative"),
        (["launch", "--"], "--: no program after it"),
        (["stop", "--end"], "--end needs --orphans"),
        (["statsu"], "unknown verb 'statsu' (did you mean 'status'?)"),
        (["ps", "hosts"], "unknown verb 'ps' (here it is 'status'); use one of plan, "),
        (["tail"], "unknown verb 'tail' (here it is 'logs --follow')"),
        (["launch", "--flow"], "--flow: unknown option (did you mean '--follow'?)"),
        (
            ["status", "--jsno"],
            "--jsno: unknown option or argument (did you mean '--json'?); see `llama405b status --help`",
        ),
        (["doctor", "--depe"], "--depe: unknown option (did you mean '--deep'?)"),
        (
            ["train", "--optimizer.lrr", "3"],
            "--optimizer.lrr: 'optimizer.lrr' is not a setting (did you mean 'optimizer.lr'?)",
        ),
        (["logs", "a", "b"], "b: unknown option or argument; see `llama405b logs --help`"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_anything_is_done(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"llama405b: {said}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [*cli.VERBS, "data show", "data tokenize"])
def test_the_help_of_every_verb_fits_a_terminal_and_quotes_plainly(verb, capsys):
    assert cli.main([*verb.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "`" not in said


def test_the_help_of_train_shows_the_usual_settings_first_and_each_once(capsys):
    cli.main(["train", "--help"])
    said = capsys.readouterr().out
    named = re.findall(r"^  --([a-z_]+\.[a-z_0-9]+) ", said, re.MULTILINE)
    assert named[:3] == ["model.path", "data.paths", "data.seq_len"]
    assert sorted(named) == sorted(SETTING_TYPES)
    assert "llama405b launch hosts --config my.toml --optimizer.lr 2e-5" in said


@pytest.mark.parametrize("more", [[], ["--slurm="]], ids=["hosts", "slurm"])
def test_a_dry_run_says_how_to_download_a_model_of_the_hub(more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("gpu-01 slots=8\n")
    said = "unless the first host has it, run `llama405b download o/m`, which writes models/m\n"
    for model, n_times in (("o/m", 1), ("models/demo", 0), (str(tmp_path), 0)):
        assert cli.main(["launch", "--preset", "demo", "--model.path", model, "--dry-run", *more]) == 0
        assert capsys.readouterr().out.count(said) == n_times
