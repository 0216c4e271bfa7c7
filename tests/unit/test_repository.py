"""What others find in the repository beside code and pages agrees with it."""

import tomllib

import mutations
import pytest
import yaml

from conftest import ROOT


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = read("CITATION.cff")
    assert [cited["title"], cited["version"], cited["license"]] == [
        project[key] for key in ("name", "version", "license")
    ]


def test_the_workflow_and_the_hook_run_our_scripts():
    steps = read(".github/workflows/ci.yml")["jobs"]["test"]["steps"]
    [hook] = read(".pre-commit-config.yaml")["repos"][0]["hooks"]
    scripts = [steps[-1]["run"].split()[-1], hook["entry"].split()[-1]]
    assert scripts == [".ci/run", "tests/check.sh"]
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
