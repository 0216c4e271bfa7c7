"""What others find in the repository beside code and pages agrees with it."""

import tomllib

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
