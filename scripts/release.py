"""Check that everything is ready for a release, tag it and build its wheel: nothing is done while anything is missing.

In a checkout whose last commit is `Release X.Y.Z`:

    .venv/bin/python scripts/release.py --check     only name what is missing
    .venv/bin/python scripts/release.py
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from llama405b import __version__ as VERSION

ROOT = Path(__file__).parent.parent


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    if unknown := [word for word in argv if word != "--check"]:
        print(f"release: unknown argument {unknown[0]}; only --check is known", file=sys.stderr)
        return 2
    missing = list(missing_for_release(ROOT, VERSION))
    for line in missing:
        print(f"release: {line}", file=sys.stderr)
    if missing:
        return 2
    if "--check" in argv:
        print(f"{VERSION} is ready for a release")
        return 0
    tag = f"v{VERSION}"
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", ROOT / "dist", ROOT], check=True)
    message = f"llama405b {VERSION}\n\n{release_notes(ROOT, VERSION)}\n"
    tagging = ["git", "-C", ROOT, "tag", "-a", tag, "--cleanup=whitespace", "-F", "-"]  # headings begin with #
    subprocess.run(tagging, input=message, text=True, check=True)
    print(f"try it: uv tool install dist/llama405b-{VERSION}-py3-none-any.whl && llama405b --version")
    print(f"then: git push origin main {tag}")
    return 0


def missing_for_release(root: Path, version: str) -> Iterator[str]:
    """Yield what a release lacks, with what to do."""
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"].get("urls", {})
    if not urls.get("Repository"):
        yield "pyproject.toml: [project.urls] has no Repository; write the address of the project there"
    elif urls["Repository"] not in (root / "README.md").read_text():
        yield f"README.md: {urls['Repository']} is missing; name it where the page says how to get the project"
    if not re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        yield f"CHANGELOG.md: no section `## [{version}] - YYYY-MM-DD`; set its date"
    if (cited := yaml.safe_load((root / "CITATION.cff").read_text())["version"]) != version:
        yield f"CITATION.cff: version is {cited}; write {version}"
    if _git(root, "status", "--porcelain"):
        yield "there are changes that are not committed; commit or stash them"
    if (subject := _git(root, "log", "-1", "--format=%s")) != f"Release {version}":
        yield f"the last commit is {subject!r}; commit the release as 'Release {version}'"
    if _git(root, "tag", "--list", f"v{version}"):
        yield f"the tag v{version} exists; raise __version__ in llama405b/__init__.py"


def release_notes(root: Path, version: str) -> str:
    """Return the version's section of CHANGELOG, without its heading."""
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return next(text.partition("\n")[2].strip() for text in sections if text.startswith(f"[{version}]"))


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
