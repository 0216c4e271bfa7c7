"""What makes a run learn other things, as its checkpoints record it."""

import dataclasses
from types import SimpleNamespace

import numpy as np

from llama405b.checkpoint.compatibility import describe_version_changes, identity_of, software_versions
from llama405b.contract.software import code_version
from llama405b.data.batches import Batches
from llama405b.data.encode import DOCUMENT_START, NOT_TRAINED
from llama405b.data.sources import Mixture, Source
from llama405b.settings.config import Config
from llama405b.spec.rules import reads_same_data
from llama405b.training.setup import Start


def test_how_documents_are_packed_is_part_of_it_but_not_where_they_begin(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    plain = np.arange(5000, dtype=np.uint32)  # without marks
    marked = plain.copy()
    marked[::50] |= DOCUMENT_START
    masked = marked.copy()
    masked[7] |= NOT_TRAINED

    def identity(tokens_N, *, isolated):
        return identity_of(
            Config(), tmp_path, Batches(Mixture.from_weights([Source(tokens_N, 16)], 0), isolated=isolated)
        )

    before = identity(plain, isolated=False)
    assert identity(marked, isolated=False) == before
    assert before.changes(identity(marked, isolated=True)) == {"data.packing": "concatenated -> isolated"}
    assert identity(masked, isolated=False).data != before.data


def test_a_position_counts_under_the_rules_by_which_texts_became_tokens(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    batches, ours = Batches(Mixture.from_weights([Source(np.arange(5000, dtype=np.uint32), 16)], 0)), Config()
    parses = dataclasses.replace(ours, data=dataclasses.replace(ours.data, special_tokens="parse"))
    before = identity_of(ours, tmp_path, batches)
    assert not reads_same_data(before, identity_of(parses, tmp_path, batches))
    monkeypatch.setattr("llama405b.checkpoint.compatibility.RULES_VERSION", 1000)
    assert not reads_same_data(before, identity_of(ours, tmp_path, batches))


def test_which_documents_are_held_out_is_part_of_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    tokens_N = np.arange(6000, dtype=np.uint32)
    tokens_N[::6] |= DOCUMENT_START
    whole = Batches(Mixture.from_weights([Source(tokens_N, 600)], 0))
    first, second = (
        identity_of(Config(), tmp_path, whole.hold_out(fraction)[0]).data for fraction in (0.1, 0.101)
    )  # as many sequences
    assert first != second
    assert first == identity_of(Config(), tmp_path, whole.hold_out(0.1)[0]).data


def test_a_checkpoint_of_other_code_says_so():
    def start(**versions):
        manifest = SimpleNamespace(versions=versions, identity=None)
        return SimpleNamespace(path="c/step-00000002", manifest=manifest)

    def said(**versions):
        return describe_version_changes(start(**versions))

    now = software_versions()
    assert now["llama405b"] == code_version()
    assert said(**now, mine="sha256:1") == said() == ""  # an older manifest does not record this code
    assert said(**now | {"llama405b": "0.2.0+0000", "torch": "2.1"}) == (
        f"c/step-00000002 was saved with other versions (torch 2.1 -> {now['torch']}, llama405b 0.2.0+0000 -> {code_version()})"
    )
    rounded = start(torch=now["torch"])
    rounded.manifest.identity = SimpleNamespace(numerics="bf16-stochastic")
    assert describe_version_changes(rounded).endswith("(stochastic rounding 1 -> 2)")
    rounded.manifest.versions["stochastic rounding"] = "2"
    assert describe_version_changes(rounded) == ""
    lines, config = [], SimpleNamespace(checkpoint=SimpleNamespace(allow_changes=()))
    begin = SimpleNamespace(config=config, point=lambda _: SimpleNamespace(identity=None))
    Start.check(begin, start(torch="2.1"), SimpleNamespace(journal=SimpleNamespace(log=lines.append)))
    assert lines[0] == said(torch="2.1")
