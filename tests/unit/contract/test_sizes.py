"""Sizes as people write them."""

import pytest

from llama405b.contract.errors import UserError, parse_staging_bytes
from llama405b.settings import config


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("auto", None), ("0", 0), ("500MB", 500_000_000), ("40GB", 40_000_000_000), ("1.5TB", 1_500_000_000_000)],
)
def test_sizes_are_read(text, n_bytes, tmp_path):
    assert parse_staging_bytes(text) == n_bytes
    file = tmp_path / "c.toml"
    file.write_text(f'[checkpoint]\nstaging = "{text}"\n')
    file.chmod(0o600)
    assert config.read_toml(file)["checkpoint.staging"][0] == text


@pytest.mark.parametrize("text", ["", "lots", "40 GB", "-1", "40gb", "1e9"])
def test_other_words_are_refused(text):
    with pytest.raises(UserError, match=r"checkpoint.staging: '.*' is not a valid size; write 500MB, 40GB or 1.5TB"):
        parse_staging_bytes(text)
