"""The rate is of all tokens, as the plan counts them; those trained on stand beside it where they are fewer."""

import types

import pytest

from llama405b.contract import reader
from llama405b.contract.paths import RunDir
from llama405b.contract.records import METRICS_LINE, Metrics
from llama405b.training.journal import Journal
from llama405b_tools.run.screen import STEP


def step(**more):
    seconds = dict.fromkeys(("step_s", "data_s", "forward_s", "backward_s", "optimizer_s"), 1.0)
    return Metrics(step=1, time=0.0, loss=1.0, grad_norm=1.0, lr=0.1, tokens=102, tokens_per_s=102.0, **seconds, **more)


@pytest.mark.parametrize(
    ("all_tokens", "words"),
    [
        (1600.0, "  1,600 tokens/s (102 trained on)  1.00 s"),
        (103.0, "  103 tokens/s  1.00 s"),
        (0.0, "  102 tokens/s  1.00 s"),
    ],
)
def test_a_step_s_line(tmp_path, capsys, all_tokens, words):
    me = types.SimpleNamespace(is_rank0=True, index=0, attempt=1)
    journal = Journal(RunDir(tmp_path), me)
    journal.write_metrics(step(all_tokens_per_s=all_tokens))
    line = capsys.readouterr().out.strip()
    assert line.endswith(words)
    rate = STEP.search(line.replace("1/0", "1/9"))[4]
    assert rate == f"{all_tokens or 102:,.0f} tokens/s"
    [written] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert reader.loads(METRICS_LINE, written, "").rate == (all_tokens or 102.0)
