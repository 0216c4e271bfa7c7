"""The values of secrets are overwritten in logs, wherever they lie, and nothing else is."""

import os
import random

from llama405b_tools.agent import processes
from llama405b_tools.agent.processes import LogMask

LONG, SHORT = "correct horse battery staple", "pa55wd"


def test_wherever_a_value_lies_it_is_overwritten_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BLOCK_BYTES", 64)
    chance, log = random.Random(0), tmp_path / "attempt/0/stdout.log"
    log.parent.mkdir(parents=True)
    mask, plain = LogMask(tmp_path, (LONG, SHORT)), b""
    for _ in range(300):
        more = b"".join(chance.choice([LONG, SHORT, "horse\n", "x" * chance.randrange(9)]).encode() for _ in range(9))
        cut = chance.randrange(len(more) + 1)  # a value may be half written when it is looked for
        for part in (more[:cut], more[cut:]):
            with log.open("ab") as file:
                file.write(part)
            mask.redact(log)
        plain += more
    covered = plain.replace(LONG.encode(), b"REDACTED".ljust(len(LONG), b"*")).replace(SHORT.encode(), b"REDACT")
    assert log.read_bytes() == covered


def test_a_log_shorter_than_the_longest_value_is_searched(tmp_path):
    mask = LogMask(tmp_path, (LONG, SHORT))
    (tmp_path / "b.log").write_text(f"{SHORT}\n")
    mask.redact_all()
    assert (tmp_path / "b.log").read_text() == "REDACT\n"
    (tmp_path / "new").write_text(f"another file\n{LONG}\n")
    (tmp_path / "new").replace(tmp_path / "b.log")
    mask.redact_all()
    assert LONG not in (tmp_path / "b.log").read_text()


def test_a_log_that_cannot_be_written_now_is_tried_again(tmp_path, monkeypatch):
    log, mask = tmp_path / "a.log", LogMask(tmp_path, (LONG,))
    log.write_text(LONG)
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda *_: os.close(-1))  # an OSError
        mask.redact_all()
    mask.redact_all()
    assert LONG not in log.read_text()
