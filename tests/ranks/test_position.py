"""Every token enters a loss as often as the settings say: through deaths, with readers beside training, on other numbers of ranks.

Each word of the texts is another token, so that a target tells the document and the place in it.
"""

import collections
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ops_rig import wait_for
from ranks_rig import start_program
from tiny_models import write_llama

SEQ, GLOBAL, EPOCHS = 8, 6, 3
TEXTS, CHATS = 60, 20  # sequences of each source
PASSES = {"t": 2, "c": 6}  # with equal weights: 40 sequences of each in an epoch of 80
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


def _launch(work, number, world, workers):
    flags = {
        "model.path": "model", "data.paths": "texts.jsonl,chats.jsonl", "data.weights": "1,1", "data.seq_len": SEQ,
        "data.documents": "split",
        "data.workers": workers, "training.global_batch_size": GLOBAL, "training.epochs": EPOCHS, "parallel.device": "cpu",
        "parallel.numerics": "fp32", "checkpoint.every": 3,
    }  # fmt: skip
    typed = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    env = {
        "RECORD": str(work / "record"), "LAUNCH": str(number), "LLAMA405B_HOST": "h", "LLAMA405B_ATTEMPT": str(number + 1),
    }  # fmt: skip
    argv = ("--run-dir", "runs/r", "--resume", "auto", *typed)
    return start_program("recorded_train:main", *argv, cwd=work, env=env, world=world, output=work)


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


def _ends(work, ranks, until, workers):
    """Let a launch train; kill one of its ranks after a step, or let the last one end. Nothing of it is left."""
    family = set()
    log = lambda: "".join((work / name).read_text()[-3000:] for name in ("out", "err"))  # noqa: E731
    try:
        wait_for(lambda: max(_recorded(work), default=0) >= until or ranks[0].exitcode is not None, 120, log)
        family = _children([rank.pid for rank in ranks])
        if until < STEPS:
            assert len(family) >= (workers + 1) * len(ranks), log()  # the readers of each, and their server
            ranks[-1].kill()
        else:
            ranks[0].join(60)
            assert ranks[0].exitcode == 0, log()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    wait_for(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in family), says=lambda: "readers outlive their rank"
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("worlds", "workers"), [((2, 1), 2), pytest.param((2, 3, 1, 1), 4, marks=pytest.mark.soak)])
def test_no_token_is_lost_or_seen_twice(work, worlds, workers):
    directory, words = work
    draw = random.Random(11)
    for number, world in enumerate(worlds):
        until = 9 * (number + 1) + draw.randint(1, 6) if number < len(worlds) - 1 else STEPS
        _ends(directory, _launch(directory, number, world, workers), until, workers)
    steps = _recorded(directory)
    assert sorted(steps) == list(range(1, STEPS + 1))
    found = collections.Counter(words[token] for targets in steps.values() for token in targets)
    expected = collections.Counter()
    for name in ("texts", "chats"):
        records = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        once = _expected(records, name)
        expected.update(dict.fromkeys(once, PASSES[once[0][0]]))
    assert {word: count for word, count in found.items() if not word.startswith("<")} == expected
