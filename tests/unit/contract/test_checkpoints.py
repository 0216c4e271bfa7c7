"""A manifest is intact and describes all files of a checkpoint, or is refused; nothing else happens."""

import dataclasses
import hashlib
import json

import pytest
from manifests import FILES, HASH, IDENTITY, MANIFEST

from llama405b.contract.checkpoints import FileDigest, read_manifest, write_manifest
from llama405b.contract.hashes import BLOCK_BYTES
from llama405b.contract.reader import MalformedError


def flips(content):
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def test_what_was_written_is_read():
    content, digest = write_manifest(MANIFEST)
    assert read_manifest(content) == (MANIFEST, digest)


def test_every_flipped_bit_is_refused():
    for changed in flips(write_manifest(MANIFEST)[0]):
        with pytest.raises(MalformedError):
            read_manifest(changed)


def test_every_truncation_is_refused():
    content, _ = write_manifest(MANIFEST)
    for size in range(len(content)):
        with pytest.raises(MalformedError):
            read_manifest(content[:size])


def sealed(body):
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def without(name):
    return {key: seal for key, seal in FILES.items() if key != name}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"files": {}}, "it lacks index.json"),
        ({"files": without("index.json")}, "it lacks index.json"),
        ({"files": without("weights-1-0.safetensors")}, "it has files of 1 rank, not of all 2"),
        ({"world_size": 3}, "it has files of 2 ranks, not of all 3"),
        ({"world_size": 0}, "world size 0"),
        ({"block_bytes": 0}, "block size 0"),
        (
            {"files": FILES | {"../../etc/passwd": FileDigest(1, 0, (HASH,))}},
            "'../../etc/passwd' is not a file of a checkpoint",
        ),
        (
            {"files": FILES | {"index.json": FileDigest(BLOCK_BYTES + 1, 0, (HASH,))}},
            "index.json of 67108865 bytes cannot have 1 blocks",
        ),
        ({"format": 4}, "manifest.json.format: invalid enum value 4"),
        ({"step": None}, "manifest.json.step: expected `int`, got `null`"),
        ({"files": [1]}, "manifest.json.files: expected `object`, got `array`"),
        (
            {"files": {"index.json": {"bytes": 1, "rank": 0, "blocks": HASH}}},
            "manifest.json.files[...].blocks: expected `array`, got `str`",
        ),
        ({"identity": {"model": 1}}, "manifest.json.identity.model: expected `str`, got `int`"),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(changes, words):
    members = json.loads(write_manifest(MANIFEST)[0].splitlines()[0]) | {"format": 3}
    body = json.dumps(members | changes, default=dataclasses.asdict).encode()
    with pytest.raises(MalformedError) as refused:
        read_manifest(sealed(body))
    assert words in str(refused.value)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"files":' * 50_000, b"\xff\xfe", b"null", b""])
def test_what_is_no_manifest_at_all_is_refused(body):
    for content in (body, sealed(body)):
        with pytest.raises(MalformedError):
            read_manifest(content)


def test_changes_are_named():
    now = dataclasses.replace(IDENTITY, global_batch_size=3, data="901 tokens 5")
    assert IDENTITY.changes(now) == {
        "data": "900 tokens 2 -> 901 tokens 5",
        "training.global_batch_size": "6 -> 3",
    }
    assert IDENTITY.changes(IDENTITY) == {}
