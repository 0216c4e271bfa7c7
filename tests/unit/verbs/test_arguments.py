"""Arguments that several verbs share: hosts by a file or by names."""

from pathlib import Path

import pytest

from llama405b.contract.errors import UserError
from llama405b_tools.verbs.arguments import resolve_hosts


def test_hosts_are_those_of_a_file_or_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cluster").write_text("gpu-1\ngpu-2\n")
    names = {
        source: [host.name for host in resolve_hosts(source)]
        for source in (Path("cluster"), ("cluster",), ("./cluster",), ("gpu-3",), ("gpu-3", "cluster"), None)
    }
    assert list(names.values()) == [*[["gpu-1", "gpu-2"]] * 3, ["gpu-3"], ["gpu-3", "cluster"], []]
    with pytest.raises(UserError, match=r"^clusters: cannot be read"):  # a path is never the name of a host
        resolve_hosts(("./clusters",))
