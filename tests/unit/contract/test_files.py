"""Files that no reader sees half-written, and trees that are what they seem."""

import resource
from pathlib import Path

import pytest

from llama405b.contract.disk import sync, unsupported_operation
from llama405b.contract.errors import UserError
from llama405b.contract.files import append_line, walk, write_atomic


@pytest.fixture
def limited():
    """No file may become longer than so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda n_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_for_which_there_is_no_room_leaves_nothing_and_names_its_file(tmp_path, limited):
    path = tmp_path / "lines"
    append_line(path, "first")
    limited(10)
    with pytest.raises(OSError, match="File too large") as refused:
        append_line(path, "a second one")
    assert refused.value.filename == str(path)
    assert path.read_bytes() == b"first\n"
    append_line(path, "two")
    assert path.read_bytes() == b"first\ntwo\n"


def test_a_file_that_cannot_be_replaced_is_named_and_kept(tmp_path, limited):
    path = tmp_path / "kept"
    write_atomic(path, "kept")
    limited(10)
    with pytest.raises(OSError, match="File too large") as refused:
        write_atomic(path, "x" * 100)
    assert refused.value.filename == str(path)
    assert path.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]


def test_a_walk_goes_through_links_and_refuses_those_that_lead_nowhere(tmp_path):
    tree, elsewhere = tmp_path / "tree", tmp_path / "elsewhere"
    (tree / "a" / ".hidden").mkdir(parents=True)
    elsewhere.mkdir()
    for file in (tree / "a" / "1", elsewhere / "2", tree / "a" / ".hidden" / "3"):
        file.write_text("x")
    (tree / "b").symlink_to(elsewhere)
    (tree / ".#lock").symlink_to("nobody@nowhere")  # hidden
    found = {str(here / name) for here, _, files in walk(tree) for name in files if not name.startswith(".")}
    assert found == {f"{tree}/a/1", f"{tree}/b/2"}
    for name, target, words in (
        ("dead", "nothing", "which does not exist; add the missing file, or delete the link"),
        ("round", tree, "a directory that it is in; delete the link"),
    ):
        (tree / "a" / name).symlink_to(target)
        with pytest.raises(UserError, match=f"^{tree}/a/{name}: is a link to {target}, {words}$"):
            list(walk(tree))
        (tree / "a" / name).unlink()


def test_a_disk_that_is_tried_and_synced_has_no_file_open_afterwards(tmp_path):
    assert unsupported_operation(str(tmp_path)) == ""
    sync(str(tmp_path))
    open_files = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    assert [path for path in open_files if path.is_relative_to(tmp_path)] == []
    assert list(tmp_path.iterdir()) == []
