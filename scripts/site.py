"""Hook of mkdocs: the site links to the project's addresses in pyproject.toml, and to none while there are none."""

import tomllib
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Set the address of the repository and of the site."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    urls = project.get("urls", {})
    config.repo_url, config.site_url = urls.get("Repository"), urls.get("Documentation", "")
    config.repo_name = project["name"]
    return config
