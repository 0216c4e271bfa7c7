import os

import pytest

from llama405b.contract.errors import UserError
from llama405b.contract.files import check_only_owner_writes
from llama405b.settings import command
from llama405b_tools.launch import request

HERE = {"HF_TOKEN": "t0p"}


def parse(*words):
    return request.parse_launch(["--preset", "demo", *words], 0.0)


def test_variables_and_secrets_part_ways(tmp_path):
    path = tmp_path / "run.env"
    path.write_text("# ours\nexport NCCL_DEBUG='INFO'\nWANDB_API_KEY=abc\n\nEMPTY=\n")
    env, secrets = request.read_env(["A=x=y z", "NCCL_DEBUG=WARN"], [path], ["HF_TOKEN"], HERE)
    assert request.read_env(["TOKENIZERS_PARALLELISM=false"], [], [], {})[0]
    assert env == {"NCCL_DEBUG": "WARN", "EMPTY": "", "A": "x=y z"}
    assert secrets == {"WANDB_API_KEY": "abc", "HF_TOKEN": "t0p"}


@pytest.mark.parametrize(
    ("pairs", "names", "words"),
    [
        (["HF_TOKEN=abc"], [], "--env: HF_TOKEN looks like a secret"),
        (["A"], [], "--env: 'A' has no value"),
        (["1A=x"], [], "--env: '1A' is not a valid variable"),
        (["LLAMA405B_NODE=x"], [], "--env: LLAMA405B_NODE is set by the run itself"),
        (["A=x\ny"], [], "line break"),
        ([], ["NO_SUCH"], "--secret: NO_SUCH is not set here"),
        ([], ["HF_TOKEN=abc"], "--secret: HF_TOKEN is not set here"),
    ],
)
def test_what_cannot_be_handed_on_is_refused(pairs, names, words):
    with pytest.raises(UserError, match=words) as refused:
        request.read_env(pairs, [], names, HERE)
    assert "abc" not in str(refused.value)


def test_a_bad_line_of_an_env_file_is_named(tmp_path):
    path = tmp_path / "run.env"
    path.write_text("A=1\nB\n")
    with pytest.raises(UserError, match=r"run\.env:2: there is no '='"):
        request.read_env([], [path], [], {})
    with pytest.raises(UserError, match="cannot be read"):
        request.read_env([], [tmp_path / "none"], [], {})


def test_times():
    assert [request.parse_seconds(text, "--x") for text in ("30", "30s", "1.5m", "2h")] == [30, 30, 90, 7200]
    for text in ("", "x", "-1", "1d", "1e9", "s"):
        with pytest.raises(UserError, match="--x: "):
            request.parse_seconds(text, "--x")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--restart", "-1"], "--restart: -1 times"),
        (["--notify", "x"], "--notify needs --restart"),
        (["--rehearse", "--restart", "1"], "--rehearse is a run of its own"),
        (["--hang-after", "soon"], "--hang-after: 'soon' is not a valid time"),
    ],
)
def test_options_that_do_not_fit(words, fault):
    with pytest.raises(UserError, match=fault):
        parse(*words)


def test_a_rehearsal_keeps_the_shapes_and_cuts_the_rest(tmp_path):
    from llama405b_tools.launch.probes import rehearsal_request

    whole = parse("--rehearse", "--run", "r", "--checkpoint.dir", "/shared/r/", "--optimizer.lr", "0.01")
    trial = rehearsal_request(whole)
    assert trial.run == "r-rehearsal"
    assert (trial.config.model.layers, trial.config.model.weights) == (2, "random")
    assert trial.config.checkpoint.dir == "/shared/r/r-rehearsal"
    assert trial.config.optimizer == whole.config.optimizer
    assert trial.config.data == whole.config.data
    never = rehearsal_request(parse("--rehearse", "--checkpoint.every", "0"))
    assert never.config.checkpoint.every == "0"


def test_files_that_others_may_write_are_refused(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a\n")
    path.chmod(0o644)
    check_only_owner_writes(path)
    path.chmod(0o666)
    with pytest.raises(UserError, match="is writable by everyone"):
        check_only_owner_writes(path)
    path.chmod(0o664)
    check_only_owner_writes(path)  # the owner's own group
    if os.getuid() == 0:
        os.chown(path, 0, 1)
        with pytest.raises(UserError, match="is writable by its group"):
            check_only_owner_writes(path)
        os.chown(path, 12345, 0)
        path.chmod(0o644)
        with pytest.raises(UserError, match="belongs to another user"):
            check_only_owner_writes(path)


@pytest.mark.parametrize("words", [["--resume", "auto"], ["--resume"], ["--resume", "5"]])
def test_a_resume_of_no_run_asks_which_was_meant(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^--resume: nothing to resume; name the run with --run$"):
        parse(*words)
    for age, name in ((90, "short"), (50, "long")):
        plan = tmp_path / "runs" / name / "plan.json"
        plan.parent.mkdir(parents=True)
        plan.touch()
        os.utime(plan, (1e9 - age, 1e9 - age))
    with pytest.raises(UserError, match=r"^--resume: nothing to resume; did you mean --run long\?$"):
        parse(*words)
    manifest = tmp_path / "runs/long/checkpoints/step-00000005/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    with pytest.raises(UserError, match=r"^--resume: nothing to resume; did you mean --run long \(step 5\)\?$"):
        parse(*words)
    assert parse(*words, "--run", "long").resume == {"--resume": "auto"}.get(words[-1], words[-1])
    parse(*words, "--checkpoint.dir", "elsewhere")  # which may hold some


def test_resume_alone_means_auto_and_hides_no_other_flag():
    request = parse("hosts", "--run", "r", "--resume", "--follow", "--restart=2")
    assert (request.resume, request.follow) == ("auto", True)
    assert request.typed == ("--preset", "demo", "hosts", "--follow", "--restart=2")


def test_no_trial_evaluates_more_than_a_moment():
    """Before its first step either would take as long as the held-out data is."""
    from llama405b.settings import command
    from llama405b_tools.launch import probes

    request = parse("--evaluation.every", "5", "--evaluation.paths", "held.txt", "--rehearse")
    assert probes.rehearsal_request(request).config.evaluation.max_sequences == 1
    assert not command.parse(probes.trial_flags(request)).config.evaluation.is_enabled


ONLY = "--evaluate-only"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], f"{ONLY}: no data to evaluate on; set evaluation.paths or evaluation.fraction"),
        (["--evaluation.fraction", "0.1"], "--data.paths: no data given"),
        (
            ["--evaluation.paths", "x", "--resume", "auto"],
            f"{ONLY}: --resume is 'auto'; name the checkpoint by its path",
        ),
        (["--evaluation.paths", "x", "--resume"], f"{ONLY}: --resume is 'auto'; name the checkpoint by its path"),
        (["--evaluation.paths", "x", "--resume", "40"], f"{ONLY}: --resume is '40'; name the checkpoint by its path"),
        (["--evaluation.paths", "x", "--restart", "2"], f"{ONLY} takes no step; remove --restart and --rehearse"),
        (["--evaluation.paths", "x", "--rehearse"], f"{ONLY} takes no step; remove --restart and --rehearse"),
    ],
)
def test_what_an_evaluation_without_training_refuses(words, fault):
    with pytest.raises(UserError, match=fault):
        request.parse_launch(["--model.path", "m", ONLY, *words], 0.0)
    with pytest.raises(UserError, match=f"{ONLY}: settings are for the trainer"):
        request.parse_launch([ONLY, "--", "mine.py"], 0.0)


def test_an_evaluation_without_training_is_a_run_of_its_own(tmp_path):
    known = ["--model.path", "m", "--checkpoint.dir", "/shared/run1", "--checkpoint.keep_best", "true"]
    found = request.parse_launch(
        [*known, ONLY, "--evaluation.paths", "x", "--resume", "/shared/run1/step-00000040"], 0.0
    )
    assert found.run.startswith("run-evaluation-")
    assert found.training_program().count(ONLY) == 1
    assert command.parse(found.training_program()[2:]).config == found.config
    assert (found.saves, found.new_checkpoints, found.spec().checkpoint_dir) == (False, "", "")
    assert found.data_paths == ("x",)
    of_training = request.parse_launch([*known, ONLY, "--evaluation.fraction", "0.1", "--data.paths", "d"], 0.0)
    assert of_training.data_paths == ("d",)
    assert of_training.config.evaluation.is_enabled


def test_a_budget_is_so_many_gpu_hours():
    words = ["--preset", "demo", "--budget", "500", "--price", "2.5"]
    asked = request.parse_launch(words, 0.0)
    assert asked.config.training.gpu_hours == 200
    assert "--training.gpu_hours=200.0" in asked.flags
    for wrong in (["--budget", "500"], ["--price", "-2"], ["--budget", "-1", "--price", "2"]):
        with pytest.raises(UserError, match="--budget: needs --price per GPU-hour, and both must be above 0"):
            request.parse_launch(["--preset", "demo", *wrong], 0.0)
    with pytest.raises(UserError, match="--budget: settings are for the trainer"):
        request.parse_launch(["--budget", "500", "--price", "2", "--", "train.py"], 0.0)
