"""Code of the user's own in a run, over a resume: the module that the documents show."""

import json
import re

from conftest import ONE_HOST, ROOT
from llama405b.contract.software import code_version
from ops_rig import metrics, settings, train

MODULE = re.search(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)[1]
GAMES = "\n\n".join(f'[Event "{i}"]\n\n1. e4 e5 2. Nf3 Nc6 3. Bb5 a6 4. Ba4 Nf6 {i}. O-O Be7' for i in range(200))


def test_a_module_of_ones_own_runs_over_a_resume(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    (work / "my_module.py").write_text(MODULE)
    (work / "games.pgn").write_text(GAMES)
    flags = [*settings(demo, work / "games.pgn", 8), "--evaluation.every", 4, "--evaluation.fraction", 0.1]
    flags += ["--evaluation.prompts", '["1. e4 e5", "[Event \\"1"]', "--evaluation.prompt_tokens", 4]
    first = cli(work, "launch", "--run", "x", "--follow", *flags, "--extend", "my_module.py")
    assert first.returncode == 0, first.stdout + first.stderr
    assert re.search(r"data: 200 documents", first.stdout)
    for words in ("parameters after step 4 of 8", "held out after step 0: ", "held out after step 8: "):
        assert words in first.stdout, words
    assert first.stdout.count("parameters after step") == 2
    assert json.loads((work / "runs/x/saved.json").read_text())["path"].endswith("step-00000008")
    own = {step: line["own"]["perplexity"] for step, line in metrics(work, "x").items()}
    assert list(own) == list(range(1, 9))
    manifest = json.loads((work / "runs/x/checkpoints/step-00000008/manifest.json").read_text().splitlines()[0])
    assert re.fullmatch("sha256:[0-9a-f]{64}", manifest["versions"]["my_module.py"])
    assert manifest["versions"]["llama405b"] == code_version()

    (work / "my_module.py").write_text(MODULE.replace("label_smoothing=0.1", "label_smoothing=0.2"))
    again = [*flags, "--training.max_steps", 12, "--resume", "auto"]
    extended = ["--training.extend", "my_module.py"]
    refused = train(work, "x", *again, *extended, code=2)
    assert re.search(r"extension my_module.py \w+ -> my_module.py \w+", refused.stderr)
    (work / "my_module.py").write_text(MODULE)
    resumed = cli(work, "launch", "--run", "x", "--follow", *again, "--extend", "my_module.py")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert list(metrics(work, "x")) == list(range(1, 13))
    page = cli(work, "report", "--run", "x")
    assert page.returncode == 0, page.stderr
    html = (work / "runs/x/report.html").read_text()
    assert "own: perplexity" in html
    assert html.count("<td>1. e4 e5</td>") == 1 + 4  # before the first step, after 4, 8 and 12; and the last again
    samples = [json.loads(line) for line in (work / "runs/x/samples.jsonl").read_text().splitlines()]
    assert [(each["step"], each["prompt"]) for each in samples] == [
        (step, prompt) for step in (0, 4, 8, 12) for prompt in ("1. e4 e5", '[Event "1')
    ]
    assert "'1. e4 e5' → " in first.stdout

    bad = MODULE.replace('{"perplexity": math.exp(min(20.0, context.metrics.loss))}', "{}[context.step]")
    (work / "my_module.py").write_text(bad)
    raised = train(work, "y", *flags, *extended, code=1)
    line = 1 + bad[: bad.index("{}[context.step]")].count("\n")
    assert f"my_module.py:{line}: metrics() raised KeyError: 1" in raised.stderr
    gone = cli(work, "launch", "--run", "z", *flags, "--extend", "other.py")
    assert gone.returncode == 2
    assert "--extend: other.py: cannot be read" in gone.stderr
