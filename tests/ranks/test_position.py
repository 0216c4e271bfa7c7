"""Every token enters a loss as often as the settings say: through deaths, with readers beside training, on other numbers of ranks.

Each word of the texts is another token, so that a target tells the document and the place in it.
"""

import collections
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import ROOT
from tiny_models import write_llama

SEQ, GLOBAL, EPOCHS = 8, 6, 3
TEXTS, CHATS = 60, 20  # sequences of each source
PASSES = {"t": 2, "c": 6}  # with equal weights: 40 sequences of each in an epoch of 80
WORLDS = (2, 3, 1, 1)  # ranks of each launch; all but the last are killed
LAST = len(WORLDS) - 1
STEPS = EPOCHS * (TEXTS + CHATS) // GLOBAL
SPECIAL = ["<unk>", "<user>", "<assistant>", "<end>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def _texts(draw, n_tokens):
    """Documents of words, each word once, and no more tokens than so many."""
    records, number = [], 0
    while n_tokens > 0:
        length = min(draw.randint(2, 21), n_tokens)
        records.append({"text": " ".join(f"t{number}_{i}" for i in range(length))})
        n_tokens, number = n_tokens - length, number + 1
    return records


def _chats(draw, n_tokens):
    """Conversations of such words, with so many tokens; each turn has two more, its header and its end."""
    lengths = []  # of the turns of each
    while n_tokens > 34:
        lengths.append([draw.randint(1, 5) for _ in range(2 * draw.randint(1, 2))])
        n_tokens -= sum(lengths[-1]) + 2 * len(lengths[-1])
    records = []
    for number, turns in enumerate([*lengths, [1, n_tokens - 5]]):
        words = [[f"c{number}_{turn}_{i}" for i in range(length)] for turn, length in enumerate(turns)]
        roles = ["user", "assistant"] * (len(turns) // 2)
        records.append({"messages": [{"role": r, "content": " ".join(w)} for r, w in zip(roles, words, strict=True)]})
    return records


@pytest.fixture
def work(tmp_path):
    draw = random.Random(7)
    sources = {"texts": _texts(draw, TEXTS * SEQ + 4), "chats": _chats(draw, CHATS * SEQ + 3)}
    for name, records in sources.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    texts = [record["text"] for record in sources["texts"]]
    texts += [turn["content"] for record in sources["chats"] for turn in record["messages"]]
    words = [word for text in texts for word in text.split()]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    write_llama(tmp_path / "model", vocab=len(vocabulary))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "record").mkdir()
    return tmp_path, {number: word for word, number in vocabulary.items()}


def _launch(work, number, world):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {
        "model.path": "model", "data.paths": "texts.jsonl,chats.jsonl", "data.weights": "1,1", "data.seq_len": SEQ,
        "data.documents": "split",
        "data.workers": 4, "training.global_batch_size": GLOBAL, "training.epochs": EPOCHS, "parallel.device": "cpu",
        "parallel.numerics": "fp32", "checkpoint.every": 3,
    }  # fmt: skip
    typed = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    env = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT}/tools:{ROOT}/tests/rigs", "RECORD": str(work / "record"), "LAUNCH": str(number),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "LLAMA405B_HOST": "h", "LLAMA405B_ATTEMPT": str(number + 1),
    }  # fmt: skip
    command = [sys.executable, "-m", "recorded_train", "--run-dir", "runs/r", "--resume", "auto", *typed]
    with (work / "log").open("a") as log:
        return [
            subprocess.Popen(
                command, cwd=work, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=log
            )
            for rank in range(world)
        ]


def _recorded(work):
    """By step, the targets of the last launch that took it."""
    steps = {}
    for file in sorted(Path(work / "record").iterdir()):
        launch = int(file.name.partition("-")[0])
        for line in file.read_text().splitlines():
            if line.endswith("}"):
                found = json.loads(line)
                steps.setdefault(found["step"], collections.defaultdict(list))[launch] += found["targets"]
    return {step: by_launch[max(by_launch)] for step, by_launch in steps.items()}


def _children(pids):
    """Processes that these ranks have started, and theirs."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = set(pids)
    for _ in range(4):
        family |= {child for child, parent in found.items() if parent in family}
    return family - set(pids)


def _wait(condition, what, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def _expected(records, name):
    """The words that are learnt when a source is read once, and those that are dropped after its last sequence."""
    flat = []  # a word, and whether it is learnt
    for record in records:
        if "text" in record:
            flat += [(word, i > 0) for i, word in enumerate(record["text"].split())]
        else:
            for turn in record["messages"]:
                answer = turn["role"] == "assistant"
                flat += [("", False), *((word, answer) for word in turn["content"].split()), ("", False)]
    kept = {"texts": TEXTS, "chats": CHATS}[name] * SEQ + 1
    assert 0 < len(flat) - kept < SEQ
    return [word for word, learnt in flat[:kept] if learnt]


def _ends(work, ranks, number, draw):
    """Let a launch train; kill one of its ranks at some step, or let the last one end. Nothing of it is left."""
    family = set()
    log = lambda: (work / "log").read_text()[-3000:]  # noqa: E731
    try:
        until = 9 * (number + 1) + draw.randint(1, 6) if number < LAST else STEPS
        _wait(lambda: max(_recorded(work), default=0) >= until or ranks[0].poll() is not None, log)
        family = _children([rank.pid for rank in ranks])
        if number < LAST:
            assert len(family) >= 5 * len(ranks), log()  # four readers of each, and their server
            ranks[draw.randrange(len(ranks))].send_signal(signal.SIGKILL)
        else:
            assert ranks[0].wait(60) == 0, log()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    _wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family), lambda: "readers outlive their rank", 30)


@pytest.mark.timeout(600)
def test_no_token_is_lost_or_seen_twice(work):
    directory, words = work
    draw = random.Random(11)
    for number, world in enumerate(WORLDS):
        _ends(directory, _launch(directory, number, world), number, draw)
    steps = _recorded(directory)
    assert sorted(steps) == list(range(1, STEPS + 1))
    found = collections.Counter(words[token] for targets in steps.values() for token in targets)
    expected = collections.Counter()
    for name in ("texts", "chats"):
        records = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        once = _expected(records, name)
        expected.update(dict.fromkeys(once, PASSES[once[0][0]]))
    assert {word: count for word, count in found.items() if not word.startswith("<")} == expected
