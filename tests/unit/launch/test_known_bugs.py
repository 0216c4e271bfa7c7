"""Versions that are known to go wrong: what is told of them, and by whom."""

import dataclasses
import re
import tomllib

import pytest

from conftest import ROOT
from llama405b.settings import command, config
from llama405b.settings.schema import SETTING_TYPES
from llama405b_tools.launch import preflight
from llama405b_tools.launch.preflight import KnownBug, load_known_bugs, parse_version
from llama405b_tools.launch.preflight import known_bugs as found_in

GIVEN = ["--model.path", "m", "--data.paths", "d"]
STATES = command.parse([*GIVEN, "--parallel.offload", "optimizer"]).config
FULL = command.parse([*GIVEN, "--parallel.offload", "all"]).config


def test_the_bounds_are_what_ci_has_run():
    train = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for package in ("torch", "transformers"):
        [bound] = [each.partition(",<")[2] for each in train if each.startswith(f"{package}>")]
        assert parse_version(pinned[package])[:2] < parse_version(bound)
        assert found_in(None, {package: pinned[package]}) == {}
        assert f"{package} {bound}.1 is newer than what this was tested with" in found_in(None, {package: f"{bound}.1"})


def test_every_entry_names_settings_that_there_are():
    for bug in load_known_bugs():
        assert parse_version(bug.since)
        assert bug.link.startswith("https://") or not bug.settings
        for key, value in bug.settings.items():
            assert key in SETTING_TYPES
            config.coerce(key, value, "known_bugs.toml")


@pytest.mark.parametrize(
    ("version", "settings", "is_told"),
    [
        ("2.15.0+cu130", STATES, True),
        ("2.16", STATES, True),
        ("2.14.1", STATES, False),
        ("2.15.0", FULL, False),
        ("2.15.0", None, False),
        ("missing", STATES, False),
    ],
)
def test_a_bug_needs_its_versions_and_its_settings(version, settings, is_told):
    told = [what for what in found_in(settings, {"torch": version}) if "FP32 gradients of every unit" in what]
    assert len(told) == is_told


def test_one_that_was_mended_is_told_of_no_later_version(monkeypatch):
    bug = KnownBug("torch", "2.12", "warn", "is slow", "use another", until="2.13")
    monkeypatch.setattr(preflight, "load_known_bugs", lambda: (bug, dataclasses.replace(bug, package="transformers")))
    versions = ("2.11.9", "2.12", "2.12.7", "2.13", "2.13.0")
    assert [bool(found_in(None, {"torch": version})) for version in versions] == [False, True, True, False, False]
