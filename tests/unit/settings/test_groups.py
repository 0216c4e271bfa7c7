"""Groups of parameters, as they are written."""

import pytest

from llama405b.contract.errors import UserError
from llama405b.settings.config import read_toml
from llama405b.settings.rules import ParameterGroup, check_groups, find_group
from llama405b.settings.schema import Parallel


def test_tables_are_what_flags_are(tmp_path):
    file = tmp_path / "a.toml"
    tables = (
        'names = "lm_head.*"\nlr_factor = 0.5',
        'names = "*norm*"\nweight_decay = 0',
        'names = "*bias"\nfrozen = true',
    )
    file.write_text("".join(f"[[optimizer.groups]]\n{table}\n" for table in tables))
    [(texts, _)] = read_toml(file).values()
    groups = [ParameterGroup.parse(text) for text in texts]
    assert groups == [
        ParameterGroup("lm_head.*", 0.5),
        ParameterGroup("*norm*", 1.0, 0.0),
        ParameterGroup("*bias", frozen=True),
    ]
    assert find_group(groups, "model.norm.weight") is groups[1]
    assert find_group(groups, "model.layers.0.mlp.up_proj.weight") is None


def test_a_group_of_nothing_is_refused():
    check_groups(["lm_head.* lr_factor=2"], ["model.embed_tokens.weight", "lm_head.weight"], Parallel())
    with pytest.raises(
        UserError,
        match=r"--optimizer.groups: 'head\*' matches no parameter; names look like model.embed",
    ):
        check_groups(["head* lr_factor=2"], ["model.embed_tokens.weight", "lm_head.weight"], Parallel())
