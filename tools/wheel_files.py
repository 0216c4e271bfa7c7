"""Build hook of the wheel: it carries what ``setup`` copies to hosts beside the packages, the pages, and its commit."""

import contextlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "tools/wheel_files.py")
INSTALLED = "llama405b_tools/source"  # as in llama405b.contract.software


class WheelFiles(BuildHookInterface[Any]):
    """Adds the files to a wheel; an editable install has them in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files and where the wheel has them."""
        if version == "editable":
            return
        root = Path(self.root)
        pages = [str(path.relative_to(root)) for path in root.glob("docs/**/*") if path.is_file()]
        if has_git := (root / ".git").exists():
            pages = self._git("ls-files", "docs").splitlines()  # nothing that git ignores is published
        paths = {str(root / name): f"{INSTALLED}/{name}" for name in [*SOURCE, *pages] if (root / name).exists()}
        if has_git and (commit := self._git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes")):
            with tempfile.NamedTemporaryFile("w", delete=False) as file:
                file.write(commit)
            self.commit_file = Path(file.name)
            paths[file.name] = f"{INSTALLED}/COMMIT"
        build_data["force_include"].update(paths)

    def _git(self, *words: str) -> str:
        """Return git's output; '' without git, or if it fails."""
        with contextlib.suppress(OSError):
            return subprocess.run(["git", "-C", self.root, *words], capture_output=True, text=True, check=False).stdout
        return ""

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Delete the temporary file."""
        getattr(self, "commit_file", Path("/nonexistent")).unlink(missing_ok=True)
