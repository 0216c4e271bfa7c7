"""What goes where a model does, beside its weights."""

from llama405b.commands.download import is_needed
from llama405b.spec.models import MAX_NOTICE_BYTES, is_small_file, read_small_files


def test_notices_go_where_the_model_does(tmp_path):
    for name in (
        "config.json",
        "LICENSE",
        "License.txt",
        "NOTICE",
        "USE_POLICY.md",
        "LICENCE-MIT",
        "README.md",
        "a.py",
        "LICENSE (1)",
    ):
        (tmp_path / name).write_text("x")
    (tmp_path / "licenses").mkdir()
    (tmp_path / "LICENSES").mkdir()
    (tmp_path / "NOTICE.bin").write_bytes(bytes(MAX_NOTICE_BYTES + 1))
    (tmp_path / "COPYING").symlink_to("nowhere")
    assert [*read_small_files(tmp_path)] == [
        "config.json",
        "LICENCE-MIT",
        "LICENSE",
        "License.txt",
        "NOTICE",
        "USE_POLICY.md",
    ]


def test_a_name_that_a_host_is_sent_is_one_of_a_file():
    """Rank 0 sends them by name to all hosts, which write them."""
    assert not any(
        map(
            is_small_file,
            ("LICENSE/../../x", "../LICENSE", "original/LICENSE", ".LICENSE", "LICENSE\n", "model.safetensors", ""),
        )
    )
    assert is_needed("LICENSE", ["*.safetensors"])
    assert not is_needed("original/LICENSE", ["*.safetensors"])
    assert not is_needed("README.md", ["*.safetensors"])
