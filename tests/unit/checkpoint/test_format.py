"""What is in a checkpoint's files: any reader of safetensors finds it, ours refuses all that is not as it was saved."""

import dataclasses
import json
import random
import re
import shutil
import textwrap

import pytest
import torch
from manifests import hash_file
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_index import SHAPES, held_by_ranks

from llama405b.checkpoint import format as format_module
from llama405b.checkpoint.copy_on_update import CopyOnUpdate, Staging
from llama405b.checkpoint.format import (
    CheckpointReader,
    DamagedError,
    RejectedCheckpoint,
    Target,
    check_files,
    open_manifest,
)
from llama405b.checkpoint.index import Chunk, Holdings, plan_index
from llama405b.checkpoint.saving import write_parts
from llama405b.contract import reader
from llama405b.contract.checkpoints import Manifest, read_manifest, write_manifest
from llama405b.contract.errors import UserError
from llama405b.settings.axes import Axes
from llama405b.spec.tensors import ShardLayout
from ranks_rig import ROOT


def _cut(tensor, box):
    return tensor[tuple(slice(*ends) for ends in box)]


def whole_tensors(ranks):
    generator = torch.Generator().manual_seed(0)
    kinds = {name: held for of_rank in ranks for name, held in of_rank.items()}
    return {
        name: torch.randint(0, 100, held.shape, dtype=torch.uint8, generator=generator)
        if held.dtype == "U8"
        else torch.randn(held.shape, generator=generator)
        for name, held in kinds.items()
    }


def save(path, axes, scale=1):
    """Save as the ranks of a mesh do; returns the whole tensors."""
    path.mkdir(parents=True)
    ranks = held_by_ranks(axes, scale)
    tensors = whole_tensors(ranks)
    index = plan_index([Holdings.of(held) for held in ranks])
    (path / "index.json").write_text(reader.dumps(index))
    files = {"index.json": hash_file(path / "index.json", 0)}
    for rank in range(axes.world_size):
        parts = [*index.parts_of(rank)]
        live = [_cut(tensors[part.name], part.box) for part in parts]
        files |= write_parts(path, rank, parts, CopyOnUpdate([], live, Staging((), 0, torch.device("cpu"), print)))
    content, _ = write_manifest(Manifest(3, 4, files, axes.world_size))
    (path / "manifest.json").write_bytes(content)
    return tensors


def open_reader(path):
    return CheckpointReader(path, open_manifest(path)[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "step-00000004"
    return path, save(path, Axes(dp_shard=2, tp=2))


@pytest.mark.parametrize(
    "axes",
    [{"dp_shard": 1}, {"dp_shard": 3}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 1, "pp": 2, "dp_replicate": 2}],
    ids=str,
)
@pytest.mark.parametrize(
    "onto", [{"dp_shard": 1}, {"dp_shard": 4}, {"dp_shard": 2, "tp": 4}, {"dp_shard": 1, "tp": 3}], ids=str
)
def test_what_one_mesh_saves_every_other_loads(tmp_path, axes, onto):
    path = tmp_path / "step-00000004"
    tensors = save(path, Axes(**axes))
    assert all(torch.equal(open_reader(path).read_whole(name), tensor) for name, tensor in tensors.items())
    layout = ShardLayout.from_shapes(SHAPES, Axes(**onto))
    for rank in range(Axes(**onto).world_size):
        found = {}
        for name, shape in SHAPES.items():
            box = layout.slice_of(name, shape, rank)
            found[name] = Target(f"model.{name}", shape, box, torch.full([b - a for a, b in box], 77.0))
        opened = open_reader(path)
        reads = opened.plan(found.values())
        assert all(name.startswith("weights-") for name in opened.files_of(reads))
        opened.read(reads)
        for target in found.values():
            assert torch.equal(target.tensor, _cut(tensors[target.name], target.box))


def test_a_rank_opens_the_files_of_those_alone_whose_parts_it_needs(saved):
    path, _ = saved
    opened = open_reader(path)
    [chunk] = [chunk for chunk in opened.index.chunks("model.lm_head.weight") if chunk.rank == 3]
    size = [b - a for a, b in chunk.box]
    reads = opened.plan([Target("model.lm_head.weight", (50, 12), chunk.box, torch.empty(size))])
    assert opened.files_of(reads) == {f"weights-3-{thread}.safetensors" for thread in range(4)}


def test_a_resume_on_the_same_ranks_opens_their_own_files_and_the_first_ones_small_tensors(tmp_path):
    path, axes = tmp_path / "step-00000004", Axes(dp_shard=4)
    save(path, axes, scale=100)
    for rank, held in enumerate(held_by_ranks(axes, scale=100)):
        opened = open_reader(path)
        reads = opened.plan(
            Target(name, shape, box, torch.empty([b - a for a, b in box]))
            for name, (_, shape, boxes) in held.items()
            for box in boxes
        )
        own = {f"{kind}-{rank}-{thread}.safetensors" for kind in ("weights", "optimizer") for thread in range(4)}
        assert opened.files_of(reads) == own | {f"small-{rank}-0.safetensors", "small-0-0.safetensors"}
        opened.read(reads)


def test_each_header_is_read_once_however_many_tensors_are(saved, monkeypatch):
    path, tensors = saved
    headers, read_header = [], format_module.read_header
    monkeypatch.setattr(format_module, "read_header", lambda path: headers.append(path) or read_header(path))
    opened = open_reader(path)
    for name in tensors:
        opened.read_whole(name)
    assert sorted(headers) == sorted([*path.glob("weights-*"), *path.glob("small-*")])


def _copied(saved, tmp_path):
    path = tmp_path / saved[0].name
    path.mkdir(parents=True)
    for file in saved[0].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def _vouch(path):
    """Write the manifest anew, as whoever changed a file can."""
    manifest, _ = read_manifest((path / "manifest.json").read_bytes())
    files = {
        name: dataclasses.replace(hash_file(path / name, old.rank), weights=old.weights)
        for name, old in manifest.files.items()
    }
    (path / "manifest.json").write_bytes(write_manifest(dataclasses.replace(manifest, files=files))[0])


def _with_index(change):
    def changed(path):
        index = json.loads((path / "index.json").read_text())
        change(index)
        (path / "index.json").write_text(json.dumps(index))

    return changed


def _layout(index):
    return index["layouts"][index["tensors"]["model.lm_head.weight"]["layout"]]


def _file_with(path, key, rank):
    return next(file for file in path.glob(f"weights-{rank}-*.safetensors") if key in load_file(file))


def _with_file(change):
    def changed(path):
        file = _file_with(path, "model.lm_head.weight", 0)
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        places = json.loads(metadata["llama405b.pieces"])
        change(tensors, places)
        save_file(tensors, file, metadata | {"llama405b.pieces": json.dumps(places)})

    return changed


def _exchange(index):
    one, other = _layout(index)[:2]
    one["rank"], other["rank"] = other["rank"], one["rank"]


def _swap_files(path):
    one, other = (_file_with(path, "model.lm_head.weight", rank) for rank in (0, 1))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _twice(path):
    one = _file_with(path, "model.lm_head.weight", 0)
    other = next(file for file in path.glob("weights-0-*") if "model.lm_head.weight" not in load_file(file))
    other.write_bytes(one.read_bytes())


def _garble(path):
    file = _file_with(path, "model.lm_head.weight", 0)
    file.write_bytes(file.read_bytes().replace(b'"dtype"', b'"dtyqe"', 1))


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (_with_index(lambda index: _layout(index).pop()), "its parts of model.lm_head.weight are not the whole tensor"),
        (_with_index(lambda index: _layout(index)[0]["box"][0].__setitem__(1, 20)), "are not the whole tensor"),
        (
            _with_index(lambda index: _layout(index).append(_layout(index)[0] | {"suffix": "#1"})),
            "are not the whole tensor",
        ),
        (_with_index(lambda index: _layout(index)[0].update(rank=1)), "index.json: a rank has two parts of one name"),
        (
            _with_index(lambda index: _layout(index)[0].update(rank=9)),
            "rank 9's part of model.lm_head.weight is not in",
        ),
        (
            _with_index(lambda index: index["tensors"]["model.lm_head.weight"].update(dtype="I32")),
            "is not that of the index",
        ),
        (_with_index(lambda index: index.pop("layouts")), "index.json: object missing required field `layouts`"),
        (_with_index(_exchange), "part of model.lm_head.weight is not in its files"),
        (
            _with_file(lambda tensors, _: tensors.pop("model.lm_head.weight")),
            "rank 0's part of model.lm_head.weight is not",
        ),
        (
            _with_file(lambda _, places: places.pop("model.lm_head.weight")),
            "its model.lm_head.weight is not that of the index",
        ),
        (
            _with_file(lambda _, places: places["model.lm_head.weight"].__setitem__(1, [51, 12])),
            "is not that of the index",
        ),
        (
            _with_file(lambda tensors, _: tensors.update({"model.lm_head.weight": torch.zeros(1)})),
            "header cannot be read",
        ),
        (
            _with_file(lambda tensors, _: tensors.update({"other": torch.zeros(1)})),
            "its other is not that of the index",
        ),
        (_garble, "its header cannot be read"),
        (_twice, "that another file has"),
        (lambda path: (path / "index.json").write_text("{"), "index.json is not JSON"),
    ],
)
def test_whoever_wrote_the_hashes_too_gets_no_other_numbers_in(saved, tmp_path, lie, why):
    path = _copied(saved, tmp_path)
    lie(path)
    _vouch(path)
    with pytest.raises(DamagedError, match=re.escape(why)):
        open_reader(path).read_whole("model.lm_head.weight")


@pytest.mark.parametrize("change", [_swap_files, _garble, _with_index(lambda index: _layout(index).pop())])
def test_what_is_not_as_it_was_saved_is_refused(saved, tmp_path, change):
    path = _copied(saved, tmp_path)
    change(path)
    with pytest.raises(DamagedError):
        open_reader(path).read_whole("model.lm_head.weight")


def test_another_models_state_is_refused_by_name(saved):
    path, _ = saved
    box = ((0, 50), (0, 12))
    for target, words in (
        (
            Target("model.other", (50, 12), box, torch.empty(50, 12)),
            "does not hold model.other; it is of another model",
        ),
        (Target("model.lm_head.weight", (50, 13), box, torch.empty(50, 12)), "is [50, 12] there, but [50, 13] here"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            open_reader(path).plan([target])


def test_what_the_documentation_shows_runs(saved, monkeypatch, capsys):
    path, tensors = saved
    text = (ROOT / "docs/checkpoints.md").read_text()
    one, whole = (textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert [len([*filter(None, code.splitlines())]) for code in (one, whole)] == [3, 9]
    monkeypatch.chdir(path)
    exec(one.replace("weights-0-0", _file_with(path, "model.lm_head.weight", 0).stem), {})
    assert "tensor(" in capsys.readouterr().out
    found = {}
    exec(whole, found)
    assert torch.equal(found["tensor"], tensors["model.model.embed_tokens.weight"])


def test_a_chunk_has_one_place_by_file_and_name(saved):
    path, _ = saved
    index = json.loads((path / "index.json").read_text())
    assert {tuple(sorted(entry)) for layout in index["layouts"] for entry in layout} == {("box", "rank")}
    assert Chunk(0, ((0, 1),)).suffix == ""


def _spoil(path, chosen):
    """Do one thing at random to a checkpoint's files; returns what."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    file, other = chosen.sample(files, 2)
    content = file.read_bytes()
    at = chosen.randrange(len(content))
    match chosen.choice(("bit", "zeros", "shorter", "longer", "gone", "swapped", "another's")):
        case "bit":
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << chosen.randrange(8)]) + content[at + 1 :])
        case "zeros":
            end = at + chosen.randrange(1, 5000)
            file.write_bytes(content[:at] + bytes(len(content[at:end])) + content[end:])
        case "shorter":
            file.write_bytes(content[:at])
        case "longer":
            file.write_bytes(content + b"x")
        case "gone":
            file.unlink()
        case "swapped":
            file.write_bytes(other.read_bytes())
            other.write_bytes(content)
        case _:
            file.write_bytes(other.read_bytes())


def _load(path):
    """All tensors, or why a resume does not use the checkpoint."""
    opened = open_manifest(path)
    if isinstance(opened, RejectedCheckpoint):
        return str(opened)
    manifest, _ = opened
    if fault := check_files(path, manifest)[1]:
        return str(fault)
    try:
        opened = open_reader(path)
        return {name: opened.read_whole(name) for name in opened.index.tensors}
    except DamagedError as error:
        return str(error)


def test_of_200_corruptions_each_is_noticed_or_changes_nothing(saved, tmp_path):
    chosen, n_refused = random.Random(0), 0
    for number in range(200):
        path = _copied(saved, tmp_path / f"{number}")
        _spoil(path, chosen)
        found = _load(path)
        if isinstance(found, str):
            n_refused += 1
            assert str(path) in found
        else:  # zeros where there were some, or a file for its equal
            assert found.keys() == saved[1].keys()
            assert all(torch.equal(tensor, saved[1][name]) for name, tensor in found.items())
        shutil.rmtree(path)
    assert n_refused > 100
