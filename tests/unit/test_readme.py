"""What the README shows as input is accepted as it stands there."""

import json
import re
import textwrap

from conftest import ROOT
from llama405b.capacity.estimate import Load, table_row
from llama405b.contract import command, config
from llama405b.contract.weights import parse_llama
from llama405b_tools.hosts.inventory import parse_hosts

README = (ROOT / "README.md").read_text()


def test_the_settings_are_accepted(tmp_path):
    [text] = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "my.toml"
    path.write_text(textwrap.dedent(text.replace("\n   ", "\n")))
    found = command.parse(["--config", str(path)]).config
    assert (found.data.paths, found.checkpoint.dir, found.optimizer.warmup) == (("corpus",), "/shared/run1", 20)
    config.check_world(found, 64)


def test_the_hosts_are_accepted():
    [line] = re.findall(r"^ {7}(gpu-\[.*)$", README, re.MULTILINE)
    [other] = re.findall(r"^ {7}# or: (.*)$", README, re.MULTILINE)
    [places] = re.findall(r"^ {7}# with a fast local disk: (.*)$", README, re.MULTILINE)
    hosts = parse_hosts(f"{line}\n", "README") + parse_hosts(
        f"{other} {re.sub(r' *[(].*?[)]', '', places)}\n", "README"
    )
    assert [host.name for host in hosts] == [*(f"gpu-{i:02}" for i in range(1, 9)), "gpu-01"]
    assert hosts[-1].places == {"cache": "/nvme/hf", "scratch": "/nvme/tmp"}


def test_the_estimates_are_those_that_are_computed():
    shapes = json.loads((config.PRESET_DIR / "architectures.json").read_text())
    rows = re.findall(r"^\| (llama3\S+) \| (\S+) \| (none|states|full) \| (\d+) \|.*$", README, re.MULTILINE)
    assert len(rows) > 5
    for name, numerics, offload, gpus in rows:
        load = Load(parse_llama(shapes[name], name), numerics, offload, int(gpus))
        assert table_row(name, load) in README


def test_nothing_to_paste_has_a_placeholder():
    pasted = re.findall(r"^```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert [line for block in pasted for line in block.splitlines() if re.search(r"\bURL\b|clone …", line)] == []
