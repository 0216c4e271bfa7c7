"""A document that does not belong is found in the step that read it, and a resume leaves it out."""

import json
import random
import re

import pytest

from conftest import HOSTS, ONE_HOST
from llama405b.commands.blame_step import iterate_documents
from llama405b.data.batches import Batches
from llama405b.data.sources import Mixture, open_source
from ops_rig import fake_trainer, settings, wait_for

WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "looked",
    "at",
    "rain",
    "while",
    "dogs",
    "ran",
    "over",
    "green",
    "hills",
    "to",
    "find",
    "bones",
)
SEQ, BATCH, PLANTED = 128, 8, 5


def _corpus(path):
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=50)) for _ in range(90)]
    texts[PLANTED - 1] = "".join(chr(draw.randrange(0x4E00, 0x9000)) for _ in range(40))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _step_of(work, name):
    """The step that reads a document first."""
    [tokens] = (work / "runs/.cache").glob("tokens-*.bin")
    batches = Batches(Mixture.from_weights([open_source(tokens, SEQ, "auto")], 0))
    for step in range(1, 99):
        if any(
            piece.name.endswith(name) for piece in iterate_documents(batches, range((step - 1) * BATCH, step * BATCH))
        ):
            return step
    raise AssertionError(name)


@pytest.mark.parametrize("hosts", [ONE_HOST, pytest.param(HOSTS, marks=pytest.mark.soak)], ids=["one", "two"])
def test_the_planted_document_is_blamed_and_left_out(work, cli, demo, hosts):
    (work / "hosts").write_text(hosts)
    corpus = _corpus(work / "c.jsonl")
    flags = [*settings(demo, corpus, 12), "--checkpoint.keep", 9, "--optimizer.lr", 3e-3, "--optimizer.min_lr", 3e-3]
    flags += [
        "--data.seq_len",
        SEQ,
        "--training.global_batch_size",
        BATCH,
        "--optimizer.warmup",
        0,
        "--checkpoint.every",
        2,
    ]
    first = cli(work, "launch", "--run", "x", "--follow", *flags)
    assert first.returncode == 0, first.stdout + first.stderr
    step = _step_of(work, f"c.jsonl {PLANTED}")
    assert 4 <= step <= 12, step  # of a model that has learnt something before

    found = cli(work, "blame", step, "--run", "x")
    assert found.returncode == 0, found.stdout + found.stderr
    before = re.search(r"using the weights of \S+/x/checkpoints/step-(\d{8})$", found.stdout, re.MULTILINE)
    assert step - 2 <= int(before[1]) < step
    assert re.search(
        rf"^to blame: \S+c\.jsonl {PLANTED}; resume with --data.skip (\S+) to leave it out$", found.stdout, re.MULTILINE
    )
    lines = [json.loads(line) for line in (work / f"runs/x-blame-{step}/blamed.jsonl").read_text().splitlines()]
    assert lines[0]["measured"]["piece"]["name"].endswith(f"c.jsonl {PLANTED}")

    skip = f"runs/x-blame-{step}/skip.jsonl"
    again = cli(
        work,
        "launch",
        "--run",
        "x",
        "--follow",
        "--resume",
        "auto",
        *flags,
        "--training.max_steps",
        14,
        "--data.skip",
        skip,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert re.search(r"data: 1 range of \d+ tokens excluded from the loss", again.stdout)
    refused = cli(work, "blame", 99, "--run", "x")
    assert (refused.returncode, "reached step 14; name one up to 15" in refused.stderr) == (2, True)


def test_a_run_that_trains_is_not_disturbed(work, cli, demo, corpus):
    flags = [*fake_trainer(demo, corpus), "--training.max_steps", 10**6, "--checkpoint.every", 10**5]
    assert cli(work, "launch", "--run", "y", *flags).returncode == 0
    refused = wait_for(lambda: "still training" in (tried := cli(work, "blame", 1, "--run", "y")).stderr and tried)
    assert (refused.returncode, "run y is still training on the same GPUs" in refused.stderr) == (2, True)
    assert cli(work, "stop", "--run", "y").returncode == 0
