"""What README and the pages of docs/ show as input is accepted as it stands there; README and pages are as short as they should be."""

import json
import re

import pytest

from conftest import ROOT
from llama405b.contract.records import Metrics
from llama405b.predict.estimate import estimate
from llama405b.predict.hardware import GIB
from llama405b.predict.run_shape import PredictedRun
from llama405b.settings import command, config
from llama405b.settings.axes import Axes
from llama405b.spec.models import parse_llama
from llama405b_tools.hosts.inventory import parse_hosts

README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))
GENERATED = re.compile(r"^<!-- .*written by .*?^<!-- end", re.DOTALL | re.MULTILINE)


def page(name):
    return (ROOT / "docs" / name).read_text()


def settings(text, path):
    [toml] = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    path.write_text(toml)
    found = command.parse(["--config", str(path)]).config
    config.check_ranks(found, Axes(dp_shard=64))
    return found


def test_the_settings_are_accepted(tmp_path):
    found = settings(page("running.md"), tmp_path / "my.toml")
    assert (found.data.paths, found.checkpoint.dir, found.optimizer.warmup) == (("corpus",), "/shared/run1", 20)


def test_the_short_settings_are_accepted(tmp_path):
    found = settings(README, tmp_path / "my.toml")
    assert (found.data.paths, found.checkpoint.storage, found.checkpoint.every) == (("corpus/*.jsonl",), "local", "10m")
    assert len((tmp_path / "my.toml").read_text().splitlines()) == 14


def test_the_hosts_are_accepted():
    text = page("running.md")
    [line] = re.findall(r"^(gpu-\[.*)$", text, re.MULTILINE)
    [other] = re.findall(r"^# or: (.*)$", text, re.MULTILINE)
    [places] = re.findall(r"^# with a fast local disk: (.*)$", text, re.MULTILINE)
    hosts = parse_hosts(f"{line}\n", "running.md") + parse_hosts(
        f"{other} {re.sub(r' *[(].*?[)]', '', places)}\n", "running.md"
    )
    assert [host.name for host in hosts] == [*(f"gpu-{i:02}" for i in range(1, 9)), "gpu-01"]
    assert hosts[-1].places == {"cache": "/nvme/hf", "scratch": "/nvme/tmp"}
    assert f"`{line}`" in README


def table_row(name, run):
    needs = estimate(run)
    sizes = (needs.gpu_bytes, needs.gpu_reserved_bytes, needs.host_bytes, needs.weights_bytes, needs.checkpoints_bytes)
    gib = [f"{n_bytes / GIB:,.0f}" for n_bytes in sizes]
    memory, ram = f"{gib[0]} / {gib[1]} GiB", f"{gib[2]} GiB" if needs.host_bytes else "-"
    step = f"{needs.step_s:.0f} s" if needs.step_s else "-"
    return f"| {name} | {run.numerics} | {run.offload} | {run.world} | {memory} | {ram} | {gib[3]} GiB | {gib[4]} GiB | {step} |"


def test_the_estimates_are_those_that_are_computed():
    text = page("plan.md")
    shapes = json.loads((config.PRESET_DIR / "architectures.json").read_text())
    rows = re.findall(r"^\| (llama3\S+) \| (\S+) \| (none|optimizer|all) \| (\d+) \|.*$", text, re.MULTILINE)
    assert len(rows) == 10
    for model, numerics, offload, gpus in rows:
        load = PredictedRun(parse_llama(shapes[model], model), numerics, offload, int(gpus), fused=True)
        assert table_row(model, load) in text
    [row] = [line for line in text.splitlines() if line.startswith("| llama3.1-405b | fp32-master | all | 64 |")]
    allocated, reserved, ram, seconds = re.search(r"(\d+) / (\d+) GiB \| (\d+) GiB .* (\d+) s \|", row).groups()
    said = f"{allocated} GiB allocated and {reserved} reserved per GPU, {ram} GiB of RAM per host, {seconds} s a step."
    assert said in README


def test_nothing_to_paste_has_a_placeholder():
    pasted = [
        block
        for text in (README, *(path.read_text() for path in PAGES))
        for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]
    assert [line for block in pasted for line in block.splitlines() if re.search(r"\bURL\b|clone …", line)] == []


def test_every_column_of_the_metrics_is_explained():
    assert re.findall(r"`(\w+)`", page("training.md").partition("## Columns")[2]) == [
        "null",
        *Metrics.__dataclass_fields__,
    ]


def test_the_readme_is_read_to_its_end():
    lines = README.splitlines()
    assert len(lines) <= 90
    assert max(map(len, lines)) <= 120
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    paragraphs = re.split(r"\n\n|\n(?=[-|])", prose)
    assert [text for text in paragraphs if len(text.split()) > 60] == []


def test_links_of_the_readme_lead_somewhere():
    targets = [target for target in re.findall(r"\]\((.*?)\)", README) if "://" not in target]
    assert len(targets) > 10
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_page_by_hand_is_long(path):
    assert len(GENERATED.sub("", path.read_text()).splitlines()) <= 200


def test_contributing_and_architecture_name_files_that_exist():
    there = [
        path
        for part in ("llama405b", "tools", "tests", "benchmarks", "scripts", "docs", ".ci")
        for path in (ROOT / part).rglob("*")
    ]
    known = "".join(f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}\n" for path in (*there, *ROOT.glob("*")))
    named = {
        name
        for text in ((ROOT / "CONTRIBUTING.md").read_text(), page("architecture.md"))
        for name in re.findall(r"`([\w./-]+\.(?:py|toml|json|sh|md|yml|cff)|[\w/]+/)`", text)
    }
    assert len(named) > 50
    written_by_runs = {"runs/"}
    assert {name for name in named - written_by_runs if f"/{name}\n" not in known} == set()


def test_pages_that_the_program_names_exist():
    code = [*(ROOT / "llama405b").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    texts = [path.read_text().replace("{DOCS}", "docs") for path in code]
    named = {name for text in texts for name in re.findall(r"\b(?:docs|examples)/[\w/-]+\.\w+", text)}
    assert {"docs/faq.md", "docs/data.md", "docs/proof.md"} <= named
    assert {name for name in named if not (ROOT / name).exists()} == set()
