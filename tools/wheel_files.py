"""Build hook of the wheel: it carries what ``setup`` copies to hosts beside the packages, the pages, and its commit."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "tools/wheel_files.py", "docs")
INSTALLED = "llama405b_tools/source"  # as in llama405b.contract.software


class WheelFiles(BuildHookInterface[Any]):
    """Adds the files to a wheel; an editable install has them in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files and where the wheel has them."""
        if version == "editable":
            return
        root = Path(self.root)
        paths = {str(root / name): f"{INSTALLED}/{name}" for name in SOURCE if (root / name).exists()}
        git = ["git", "-C", self.root, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"]
        if (root / ".git").exists() and (commit := subprocess.run(git, capture_output=True, check=False).stdout):
            with tempfile.NamedTemporaryFile(delete=False) as file:
                file.write(commit)
            self.commit_file = Path(file.name)
            paths[file.name] = f"{INSTALLED}/COMMIT"
        build_data["force_include"].update(paths)

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Delete the temporary file."""
        getattr(self, "commit_file", Path("/nonexistent")).unlink(missing_ok=True)
