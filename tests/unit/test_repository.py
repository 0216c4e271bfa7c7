"""What others find in the repository beside code and pages agrees with it."""

import shutil
import subprocess
import tomllib

import mutations
import pytest
import release
import yaml

from conftest import ROOT
from llama405b import __version__


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = read("CITATION.cff")
    assert [cited["title"], cited["version"], cited["license"]] == [project["name"], __version__, project["license"]]


def test_a_release_is_refused_until_all_of_it_is_there(tmp_path):
    for name in ("pyproject.toml", "README.md", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [1.2.3] - Unreleased\n\n### Added\n\n- news\n\n## [0.2.0] - 2026-11-24\n\n- old\n"
    )

    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", tmp_path, *words],
            check=True,
            capture_output=True,
        )

    def edit(name, before, after):
        (tmp_path / name).write_text((tmp_path / name).read_text().replace(before, after))
        return [line.partition(":")[0] for line in release.missing_for_release(tmp_path, "1.2.3")]

    git("init", "-q")
    git("commit", "-qm", "begin", "--allow-empty")
    lacks = ["pyproject.toml", "CHANGELOG.md", "CITATION.cff"]
    lacks += ["there are changes that are not committed; commit or stash them"]
    lacks += ["the last commit is 'begin'; commit the release as 'Release 1.2.3'"]
    assert edit("pyproject.toml", "no change", "") == lacks
    url = "https://example.org/x"
    lacks[0] = "README.md"
    assert edit("pyproject.toml", "[project.urls]", f'[project.urls]\nRepository = "{url}"') == lacks
    assert edit("README.md", "clone the repository", f"clone {url}") == lacks[1:]
    assert edit("CHANGELOG.md", "Unreleased", "2026-11-29") == lacks[2:]
    assert edit("CITATION.cff", f"version: {__version__}", "version: 1.2.3") == lacks[3:]
    git("add", "-A")
    git("commit", "-qm", "Release 1.2.3")
    assert list(release.missing_for_release(tmp_path, "1.2.3")) == []
    assert release.release_notes(tmp_path, "1.2.3") == "### Added\n\n- news"
    git("tag", "v1.2.3")
    assert edit("README.md", "no change", "") == ["the tag v1.2.3 exists; raise __version__ in llama405b/__init__.py"]


def test_the_workflow_and_the_hook_run_our_scripts():
    jobs = read(".github/workflows/ci.yml")["jobs"]
    commands = [step["run"] for job in ("quick", "all") for step in jobs[job]["steps"] if step.get("name") == "Test"]
    assert commands == ["bash tests/run.sh quick && bash tests/check.sh", "bash .ci/run"]
    [hook] = read(".pre-commit-config.yaml")["repos"][0]["hooks"]
    scripts = ["tests/run.sh", ".ci/run", hook["entry"].split()[-1]]
    assert scripts[-1] == "tests/check.sh"
    assert all((ROOT / name).is_file() for name in scripts)


def test_a_report_comes_with_what_is_asked_first():
    labels = " ".join(each["attributes"].get("label", "") for each in read(".github/ISSUE_TEMPLATE/bug.yml")["body"])
    assert all(command in labels for command in ("doctor HOSTS --json", "logs HOSTS --first-error", "--version"))


def test_no_two_test_files_have_one_name():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))  # pytest refuses them, when it collects both


@pytest.mark.parametrize("name", ["mutations.toml", "mutants.toml"])
def test_every_mutation_still_stands_once_in_the_product_and_has_its_tests(name):
    sources = [path.read_text() for package in mutations.PACKAGES for path in (ROOT / package).rglob("*.py")]
    for mutation in mutations.read_mutations(name):
        assert sum(source.count(mutation.old) for source in sources) == 1, mutation.old
        for test in mutation.tests:
            path, _, function = test.partition("::")
            assert (
                f"def {function.partition('[')[0]}" in (ROOT / path).read_text() if function else (ROOT / path).exists()
            ), test
