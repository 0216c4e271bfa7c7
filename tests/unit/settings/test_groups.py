"""Groups of parameters, as they are written."""

import pytest

from llama405b.contract.errors import UserError
from llama405b.settings.config import read_toml
from llama405b.settings.rules import Group, check_groups, group_of
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
    groups = [Group.read(text) for text in texts]
    assert groups == [Group("lm_head.*", 0.5), Group("*norm*", 1.0, 0.0), Group("*bias", frozen=True)]
    assert group_of(groups, "model.norm.weight") is groups[1]
    assert group_of(groups, "model.layers.0.mlp.up_proj.weight") is None


def test_a_group_of_nothing_is_refused():
    check_groups(["lm_head.* lr_factor=2"], ["model.embed_tokens.weight", "lm_head.weight"], Parallel())
    with pytest.raises(
        UserError,
        match=r"--optimizer.groups: 'head\*' matches no parameter; names look like model.embed",
    ):
        check_groups(["head* lr_factor=2"], ["model.embed_tokens.weight", "lm_head.weight"], Parallel())
