"""One source has one digest, however it came to be where it is; another source has another."""

import shutil

import pytest

from conftest import ROOT
from llama405b.contract.software import code_digest, code_version

PACKAGES = {"llama405b": "llama405b", "tools/llama405b_tools": "llama405b_tools"}  # in a checkout, and installed


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkout")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_a_checkout_with_compiled_files_and_a_wheel_have_one_digest(checkout, tmp_path):
    for here, installed in PACKAGES.items():
        shutil.copytree(checkout / here, tmp_path / installed)
    (tmp_path / "llama405b/optim/__pycache__").mkdir()
    (tmp_path / "llama405b/optim/__pycache__/adamw.cpython-311.pyc").write_bytes(b"compiled")
    (tmp_path / "llama405b/optim/adamw.py~").write_text("an editor's copy")
    (tmp_path / "llama405b/optim/.#adamw.py").symlink_to("ann@desk.4711:1")  # an editor's lock
    (tmp_path / "llama405b/.ipynb_checkpoints").mkdir()
    (tmp_path / "llama405b/.ipynb_checkpoints/adamw.py").touch()
    assert code_digest(tmp_path) == code_digest(checkout)
    assert code_version().endswith(f"+{code_digest(checkout)}")


@pytest.mark.parametrize(
    "file", ["llama405b/optim/adamw.py", "llama405b/predict/hardware.toml", "tools/llama405b_tools/agent/node.py"]
)
def test_a_change_of_either_package_shows(checkout, file):
    path, before = checkout / file, code_digest(checkout)
    content = path.read_text()
    path.write_text(content + "\n")
    assert code_digest(checkout) != before
    path.write_text(content)
    path.rename(path.with_stem("renamed"))
    assert code_digest(checkout) != before
    path.with_stem("renamed").rename(path)
    assert code_digest(checkout) == before
