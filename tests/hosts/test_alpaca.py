"""A data set as it is published: trained on, evaluated and exported, and nothing said about its form."""

import json
import re

from llama405b_tools import cli as program_name
from ops_rig import metrics

WHAT = "data: 1000 documents, "


def alpaca():
    """In the form of alpaca_data.json, where a third of the inputs are empty."""
    numbers = range(1000)
    return [
        {"instruction": f"Count to {n % 7}.", "input": f"From {n}, “aloud”" if n % 3 else "", "output": f"{n}\n" * 5}
        for n in numbers
    ]


def test_alpaca_as_published_is_trained_evaluated_and_exported_with_three_commands(
    work, cli, demo, monkeypatch, capsys
):
    monkeypatch.chdir(work)
    (work / "hosts").write_text("localhost slots=1\n")
    (work / "alpaca_data.json").write_text(json.dumps(alpaca(), indent=4, ensure_ascii=False))
    of = ("--preset", "demo", "--model.path", str(demo), "--data.paths", "alpaca_data.json", "--data.seq_len", "128")
    assert program_name.main(["data", "show", *of, "--sequences", "1"]) == 0
    shown = capsys.readouterr().out
    assert WHAT in shown
    assert re.search(r"### Instruction:\nCount to \d\.\n\n### (Input:\nFrom \d+, “aloud”\n\n### )?Response:", shown)
    assert re.search(r"### Response:\n⟦(\d+)\n(\1\n){4}<\|end_of_text\|>⟧", shown)

    held_out = ("--evaluation.every", 2, "--evaluation.fraction", 0.05, "--evaluation.max_sequences", 4)
    trained = cli(work, "launch", "hosts", *of, *held_out, "--training.max_steps", 2, "--run", "alpaca", "--follow")
    assert trained.returncode == 0, trained.stderr
    assert WHAT in trained.stdout
    assert "evaluation after step 2: loss " in trained.stdout
    assert metrics(work, "alpaca")[2]["evaluation_loss"] > 0

    assert program_name.main(["export", "alpaca", "out"]) == 0
    assert (work / "out/model.safetensors").is_file()
