"""``llama405b --version``: the version, the digest of the code, and the commit where it is known."""

import contextlib
import importlib.metadata
import subprocess

from llama405b.contract.errors import fmt_if
from llama405b.contract.software import INSTALLED_SOURCE, ROOT, code_version


def main() -> int:
    """Print them, and the project's addresses if it has any."""
    print(f"llama405b {code_version()}{fmt_if(' ({})', commit())}")
    for address in _addresses():
        print(address)
    return 0


def commit() -> str:
    """Return the commit that a checkout is at or a wheel was built from, with ``+changes`` if it had any; '' if unknown."""
    with contextlib.suppress(OSError):
        return (INSTALLED_SOURCE / "COMMIT").read_text(encoding="utf-8").strip()
    if not (ROOT / ".git").exists():  # installed into an environment that another repository has
        return ""
    with contextlib.suppress(OSError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _addresses() -> list[str]:
    """Return ``project.urls`` of pyproject.toml, as ``label: address``."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        urls = importlib.metadata.metadata("llama405b").get_all("Project-URL") or []
        return [": ".join(url.split(", ", 1)) for url in urls]
    return []
