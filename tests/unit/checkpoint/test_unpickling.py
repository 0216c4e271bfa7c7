"""What a pickle may name: DCP's own types, and nothing that runs."""

import os
import pickle

import pytest
import torch
from manifests import hash_file
from torch.distributed.checkpoint import metadata as dcp

from llama405b.checkpoint.format import CheckpointReader
from llama405b.checkpoint.legacy import read_metadata
from llama405b.contract.checkpoints import Manifest
from llama405b.contract.errors import UserError


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def _metadata(**more):
    chunk = dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    entry = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.bfloat16), torch.Size([4]), [chunk])
    fields = {"state_dict_metadata": {"a": entry, "b": dcp.BytesStorageMetadata()}, "storage_data": {}} | more
    return dcp.Metadata(**fields)


def _read(place, content):
    (place / ".metadata").write_bytes(content)
    (place / "__0_0.distcp").touch()
    files = {name: hash_file(place / name, 0) for name in (".metadata", "__0_0.distcp")}
    CheckpointReader(place, Manifest(2, 4, files, 1)).index  # noqa: B018 - read, and refused
    return read_metadata(place / ".metadata")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.system, "touch {}/ran"), "posix.system"),
        ((eval, "open('{}/ran', 'w')"), "builtins.eval"),
        ((torch.load, "{}/other"), "torch.serialization.load"),
    ],
)
def test_what_is_none_of_dcps_types_is_refused_by_name(tmp_path, call, name):
    evil = Runs(call[0], call[1].format(tmp_path))
    with pytest.raises(UserError, match=f"^{tmp_path}/.metadata: holds '{name}', which DCP's metadata never contains"):
        _read(tmp_path, pickle.dumps(_metadata(planner_data={"a": evil})))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps(7),
        pickle.dumps(_metadata(storage_data={"a": 1})),
        pickle.dumps(_metadata(state_dict_metadata={1: dcp.BytesStorageMetadata()})),
        pickle.dumps(_metadata())[:-9],
    ],
)
def test_what_is_not_metadata_is_refused_in_a_sentence(tmp_path, content):
    with pytest.raises(UserError, match=rf"^{tmp_path}/.metadata: is not DCP's metadata \(\w+\); use another"):
        _read(tmp_path, content)


def test_metadata_of_another_python_is_read(tmp_path):
    """3.13's paths are of another module, which older ones do not have."""
    meta = dcp.StorageMeta(checkpoint_id=tmp_path)
    content = pickle.dumps(_metadata(storage_meta=meta), protocol=2)
    newer = content.replace(b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n")
    assert newer != content
    found = _read(tmp_path, newer)
    assert found.state_dict_metadata["a"].properties.dtype is torch.bfloat16
    assert str(found.storage_meta.checkpoint_id) == str(tmp_path)


def test_an_enums_member_as_pythons_before_3_11_4_write_it_is_read_and_no_other_attribute(tmp_path):
    formats = dcp._MEM_FORMAT_ENCODING
    member = Runs(getattr, formats, "TORCH_CHANNELS_LAST")
    assert _read(tmp_path, pickle.dumps(_metadata(planner_data=member))).planner_data is formats.TORCH_CHANNELS_LAST
    for call in ((formats, "__class__"), (dcp.Metadata, "__init__")):
        with pytest.raises(UserError, match=r"holds 'builtins\.getattr', which DCP's metadata never contains"):
            _read(tmp_path, pickle.dumps(_metadata(planner_data=Runs(getattr, *call))))
