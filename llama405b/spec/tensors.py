"""Which tensors a checkpoint has and where, and what each stage, rank and host holds of them. Standard library only.

Reads headers of safetensors (8 bytes little-endian header length, a JSON header, the tensors' bytes; see the format description in the
safetensors repository), never tensors, so that an 812 GB checkpoint is listed in milliseconds. A part of a checkpoint, of every tensor
what the ranks of one host own, lies below the checkpoint's directory (``ranks-0-7-of-64``), as safetensors files that any reader can
open; each says in its header's metadata which pieces of which checkpoint it has.

What a rank holds of a tensor is a box, one range of indices per dimension; all that reads, sends, packs or checks weights asks for it
here. A rank has one pipeline stage, or with the interleaved schedule two: stage k is on rank k modulo the ranks of a pipeline. Stages take
about equally long, and of the ways to do that have about equally many parameters: the embedding counts as its parameters, the head as both.
Of a matrix that tensor parallelism splits, a rank has one block of rows or columns; of that, and of all else, FSDP gives it some rows.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama405b.contract.errors import UserError, and_more
from llama405b.settings.axes import SHARD_AXES, Axes

LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")
EMBEDDING_PREFIX = "model.embed_tokens."


def split_layers(shapes: Mapping[str, Sequence[int]], n_stages: int) -> tuple[tuple[int, ...], ...]:
    """Divide a model's layers into stages; a stage may have none."""
    sizes: dict[int, int] = collections.defaultdict(int)
    first_size = last_size = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if match := LAYER_NAME.match(name):
            sizes[int(match[1])] += size
        elif name.startswith(EMBEDDING_PREFIX):
            first_size += size
        else:
            last_size += size
    layer_size = max(1, max(sizes.values(), default=1))
    # In units of one layer. The head costs compute in the last stage; the embedding costs memory only, so it just breaks ties.
    time = [0.0] * n_stages
    time[-1] = last_size / layer_size
    parameters = list(time)
    parameters[0] += first_size / layer_size
    counts = [0] * n_stages
    for _ in sizes:
        stage = min(range(n_stages), key=lambda candidate: (time[candidate], parameters[candidate]))
        counts[stage] += 1
        time[stage] += 1
        parameters[stage] += 1
    layers = iter(sorted(sizes))
    return tuple(tuple(next(layers) for _ in range(count)) for count in counts)


def find_stage(name: str, stages: Sequence[Sequence[int]]) -> int:
    """Return the stage of a parameter."""
    if match := LAYER_NAME.match(name):
        return next(stage for stage, layers in enumerate(stages) if int(match[1]) in layers)
    return 0 if name.startswith(EMBEDDING_PREFIX) else len(stages) - 1


IndexRange = tuple[int, int]  # [start, stop)
TensorSlice = tuple[IndexRange, ...]  # by dimension
# Which dimension of a module's weight tensor parallelism splits (arXiv 1909.08053, section 3): its outputs, or its inputs.
OUTPUT_SPLIT_MODULES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
INPUT_SPLIT_MODULES = ("o_proj", "down_proj")
QUERY_NORMS = ("q_norm", "k_norm")


def tp_dimension(name: str, *, splits_query_norms: bool = False) -> int | None:
    """Return the dimension of a tensor that tensor parallelism splits; None: each rank has all of it.

    ``splits_query_norms``: the norms of queries and keys are of all heads together, see ``Family.query_norms``.
    """
    module, _, kind = name.rpartition(".")
    module, _, factor = module.partition(".lora_")  # an adapter's A has the inputs of its matrix, and its B the outputs
    module_name = module.rpartition(".")[2]
    if splits_query_norms and module_name in QUERY_NORMS:
        return 0
    if module_name in OUTPUT_SPLIT_MODULES:
        return 0 if factor != "A" else None
    return 1 if module_name in INPUT_SPLIT_MODULES and kind == "weight" and factor != "B" else None


def shard_range(size: int, rank: int, n_ranks: int) -> IndexRange:
    """Return a rank's indices: torch.chunk's split, which DTensor's Shard uses."""
    shard_size = -(-size // n_ranks)
    return min(rank * shard_size, size), min((rank + 1) * shard_size, size)


@dataclasses.dataclass(frozen=True, slots=True)
class ShardLayout:
    """What the ranks of a mesh hold of a model."""

    axes: Axes
    stages: tuple[tuple[int, ...], ...] = ((),)  # the layers of each pipeline stage; one stage has all
    names: tuple[str, ...] = ()  # of a pipeline's parameters, in the order of use
    splits_query_norms: bool = False  # see ``tp_dimension``

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]], axes: Axes, virtual_stages: int = 1) -> "ShardLayout":
        """Return the layout of a model with these parameters; ``virtual_stages``: stages of each rank of a pipeline."""
        norm, queries = (shapes.get(f"model.layers.0.self_attn.{name}.weight", ()) for name in ("q_norm", "q_proj"))
        splits_query_norms = bool(norm) and norm[0] == queries[0]
        if axes.pp == 1:
            return cls(axes, splits_query_norms=splits_query_norms)
        return cls(axes, split_layers(shapes, axes.pp * virtual_stages), tuple(shapes), splits_query_norms)

    def has_tensor(self, name: str, rank: int) -> bool:
        """Check whether a tensor is in one of a rank's stages."""
        if self.axes.pp == 1:
            return True
        return find_stage(name, self.stages) % self.axes.pp == self.axes.coordinate(rank, ("pp",)).rank

    def slice_of(self, name: str, shape: Sequence[int], rank: int) -> TensorSlice:
        """Return the slice of a tensor that a rank holds; empty for another stage's tensor."""
        box = list(full_slice(shape))
        if not box:
            return ()
        tp, shard = self.axes.coordinate(rank, ("tp",)), self.axes.coordinate(rank, SHARD_AXES)
        dimension = tp_dimension(name, splits_query_norms=self.splits_query_norms)
        if dimension is not None:
            box[dimension] = shard_range(shape[dimension], tp.rank, tp.size)
        begin, end = box[0]
        start, stop = shard_range(end - begin, shard.rank, shard.size)
        box[0] = (begin + start, begin + stop) if self.has_tensor(name, rank) else (0, 0)
        return tuple(box)


def full_slice(shape: Sequence[int]) -> TensorSlice:
    """Return the slice of a whole tensor."""
    return tuple((0, size) for size in shape)


def count_elements(box: TensorSlice) -> int:
    """Return the number of elements of a slice."""
    return math.prod(stop - start for start, stop in box)


def slice_contains(box: TensorSlice, other: TensorSlice) -> bool:
    """Check whether a slice contains all elements of another."""
    return not count_elements(other) or all(a <= c and d <= b for (a, b), (c, d) in zip(box, other, strict=True))


def relative_slice(box: TensorSlice, other: TensorSlice) -> TensorSlice:
    """Return a contained slice relative to the begin of its container."""
    return tuple((c - a, d - a) for (a, _), (c, d) in zip(box, other, strict=True))


def merge_slices(boxes: Iterable[TensorSlice]) -> list[TensorSlice]:
    """Merge neighboring slices into as few as possible; at least one, which may be empty."""
    unmerged = list(boxes)
    result = sorted({box for box in unmerged if count_elements(box)}) or unmerged[:1]
    for dimension in reversed(range(len(result[0]))):
        joined: list[TensorSlice] = []

        def other_ranges(box: TensorSlice, axis: int = dimension) -> TensorSlice:
            return (*box[:axis], *box[axis + 1 :])

        for _, group in itertools.groupby(
            sorted(result, key=lambda box: (other_ranges(box), box[dimension])), other_ranges
        ):
            for box in group:
                last = joined[-1] if joined else None
                if last and other_ranges(last) == other_ranges(box) and last[dimension][1] == box[dimension][0]:
                    union = (last[dimension][0], box[dimension][1])
                    joined[-1] = (*last[:dimension], union, *last[dimension + 1 :])
                else:
                    joined.append(box)
        result = sorted(joined)
    return result


def contiguous_runs(shape: Sequence[int], box: TensorSlice) -> list[tuple[int, int]]:
    """Return a slice as contiguous runs (begin, length) of the whole tensor's elements, in order."""
    if not count_elements(box):
        return []
    inner = len(shape)  # dimensions from here on are whole
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    sizes = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    if not inner:
        return [(0, math.prod(shape))]
    start, stop = box[inner - 1]
    length = (stop - start) * sizes[inner - 1]
    outer = itertools.product(*(range(*box[dimension]) for dimension in range(inner - 1)))
    return [
        (sum(index * sizes[dimension] for dimension, index in enumerate(place)) + start * sizes[inner - 1], length)
        for place in outer
    ]


HOST_SHARD_NAME = re.compile(r"ranks-(\d{1,6})-(\d{1,6})-of-(\d{1,6})")
# in a header's metadata: by entry, its tensor's name and shape, and which box of that it is
SLICES_KEY = "llama405b.pieces"
FINGERPRINT_KEY = "llama405b.whole"  # in a header's metadata: the fingerprint of the checkpoint


def is_shard_for(name: str, rank: int, world: int) -> bool:
    """Check whether a shard directory is for a rank; with another number of ranks it may be outdated."""
    match = HOST_SHARD_NAME.fullmatch(name)
    return match is not None and int(match[3]) == world and int(match[1]) <= rank <= int(match[2])


@dataclasses.dataclass(frozen=True, slots=True)
class HostShard:
    """What the ranks from ``first`` to ``last`` of a mesh own."""

    first: int
    last: int
    axes: Axes
    chunks: int = 1  # pipeline stages of each rank

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"ranks-{self.first}-{self.last}-of-{self.axes.world_size}"

    def slices(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[TensorSlice]]:
        """Return the merged slices of each tensor that these ranks own; tensors of other stages are left out."""
        layout, ranks = ShardLayout.from_shapes(shapes, self.axes, self.chunks), range(self.first, self.last + 1)
        return {
            name: merge_slices(layout.slice_of(name, shape, rank) for rank in ranks)
            for name, shape in shapes.items()
            if any(layout.has_tensor(name, rank) for rank in ranks)
        }


DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLED_FILE, PICKLED_INDEX_FILE = "pytorch_model.bin", "pytorch_model.bin.index.json"  # of older models
LAYER_PICKLE_FILE = "model.layers.0.pt"  # of models with a file for each module
SAMPLE_BYTES = 4096  # of each end of each tensor: training changes every tensor, or some rows, as those of added tokens
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice of a tensor, stored contiguously in a file."""

    box: TensorSlice
    offset: int  # in the file, of its first byte


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor, or slices of it, is stored."""

    file: Path
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]  # of the whole tensor
    offset: int = 0  # in the file, of the first byte of a whole tensor
    slices: tuple[StoredSlice, ...] = ()  # that the file has of it; none: it has all of it
    source_fingerprint: str = ""  # fingerprint of the checkpoint that the pieces are of

    @property
    def n_bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def stored_slices(self) -> tuple[StoredSlice, ...]:
        """The stored slices; a whole tensor is one."""
        return self.slices or (StoredSlice(full_slice(self.shape), self.offset),)

    @property
    def stored_bytes(self) -> int:
        """Size of what the file holds."""
        return sum(self.slice_bytes(piece.box) for piece in self.stored_slices)

    def slice_bytes(self, box: TensorSlice) -> int:
        """Return the bytes of a slice."""
        return count_elements(box) * DTYPE_BYTES[self.dtype]

    def find_slice(self, box: TensorSlice) -> StoredSlice | None:
        """Return the stored slice that contains a slice; None if none does."""
        return next((piece for piece in self.stored_slices if slice_contains(piece.box, box)), None)


Layout = dict[str, TensorInfo]  # by name


def read_tensors(directory: Path) -> Layout:
    """List a checkpoint's tensors (of host shards the first's), and check that all files are complete.

    Raises:
        UserError: A file is missing, truncated or not safetensors, the index names a tensor that no file holds, two files
        hold one tensor, or there is a single file beside an index of others.
    """
    return next(read_layouts(directory))


def read_layouts(directory: Path, is_wanted: Callable[[str], bool] = lambda _: True) -> Iterator[Layout]:
    """Yield the tensors of a full checkpoint once, or of each wanted host shard, newest first.

    Raises:
        UserError: As ``read_tensors``.
    """
    if (directory / INDEX_FILE).is_file():
        yield _read_indexed(directory / INDEX_FILE)
        return
    if (directory / SINGLE_FILE).is_file():
        yield read_header(directory / SINGLE_FILE)
        return
    indexes = [path / INDEX_FILE for path in sorted(directory.glob("ranks-*")) if HOST_SHARD_NAME.fullmatch(path.name)]
    indexes = [index for index in indexes if index.is_file()]  # else it was not pushed to its end
    indexes.sort(key=lambda index: index.parent.stat().st_mtime, reverse=True)  # renaming what arrived changes that
    if not indexes and is_pickled(directory):
        kind = ".pt" if (directory / LAYER_PICKLE_FILE).is_file() else ".bin"
        raise UserError(f"{directory}: has {kind} files; convert them with `llama405b export {directory} OUT`")
    if not indexes:
        raise UserError(
            f"{directory}: has neither {INDEX_FILE} nor {SINGLE_FILE}; download the weights in safetensors format"
        )
    for index in indexes:
        if is_wanted(index.parent.name):
            yield _read_indexed(index)


def is_pickled(directory: Path) -> bool:
    """Check whether a directory has only pickled weights: an older model's, or a file for each layer."""
    exists = [
        (directory / name).is_file()
        for name in (PICKLED_FILE, PICKLED_INDEX_FILE, LAYER_PICKLE_FILE, SINGLE_FILE, INDEX_FILE)
    ]
    return any(exists[:3]) and not any(exists[3:])


def _read_indexed(index: Path) -> Layout:
    weight_map = read_weight_map(index)
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    single = index.parent / SINGLE_FILE
    if single.is_file() and files != [single]:  # which transformers would read instead
        raise UserError(
            f"{single}: is next to {INDEX_FILE}, which lists other files; delete the one that is not the model's"
        )
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]}: missing{and_more(missing)} of {len(files)} files in the index; download them")
    tensors: Layout = {}
    for file in files:
        header = read_header(file)
        if duplicates := sorted(tensors.keys() & header.keys()):
            other = tensors[duplicates[0]].file.name
            raise UserError(
                f"{file}: contains {duplicates[0]}{and_more(duplicates)}, as {other} does; download both again"
            )
        tensors |= header
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise UserError(f"{index}: lists {name} in {file_name}, which does not contain it; download both again")
    return tensors


def read_header(path: Path) -> Layout:
    """Read one safetensors file's header and check the file's size against it."""
    actual = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # Bound the length before reading: a truncated or foreign file could name any size.
        if actual < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, actual - 8):
            raise UserError(f"{path}: not a safetensors file, or truncated at {actual} bytes; download it again")
        try:
            header = json.loads(file.read(length))
            infos, end = _parse_header(header, path, 8 + length)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise UserError(f"{path}: its safetensors header cannot be read; download it again") from None
    if actual != 8 + length + end:
        raise UserError(f"{path}: {actual} bytes, but its header says {8 + length + end}; download it again")
    return infos


def _parse_header(header: Mapping[str, Any], path: Path, begin: int) -> tuple[Layout, int]:
    """Return the tensors of a parsed header, and where their bytes end; the format allows no gaps."""
    infos: Layout = {}
    end = 0
    metadata = header.get("__metadata__", {})
    slices, source_fingerprint = json.loads(metadata.get(SLICES_KEY, "{}")), str(metadata.get(FINGERPRINT_KEY, ""))
    if source_fingerprint and not slices:
        raise UserError(f"{path}: an older version pushed it; push it again with --shards")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if entry["dtype"] not in DTYPE_BYTES:
            raise UserError(
                f"{path}: {name} is {entry['dtype']}; only F32, F16 and BF16 can be trained; download the model in BF16"
            )
        # JSON may hold floats or booleans here; those would pass the arithmetic below.
        if not all(type(n) is int for n in (start, stop, *entry["shape"])):
            raise ValueError
        info = TensorInfo(path, entry["dtype"], tuple(entry["shape"]), begin + start)
        if start != end or stop - start != info.n_bytes:
            raise ValueError
        if name in slices:
            name, info = _parse_slice(info, slices[name], source_fingerprint)
            info = dataclasses.replace(info, slices=(*(infos[name].slices if name in infos else ()), *info.slices))
        infos[name] = info
        end = stop
    return infos, end


def _parse_slice(info: TensorInfo, entry: Sequence[Any], source_fingerprint: str) -> tuple[str, TensorInfo]:
    """Return the name of the tensor of which an entry is a piece, and the piece; ``entry``: that name, its shape, the box."""
    name, shape, ranges = entry
    box = tuple((start, stop) for start, stop in ranges)
    fits = all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True))
    if not fits or info.shape != tuple(stop - start for start, stop in box):
        raise ValueError
    return name, dataclasses.replace(
        info, shape=tuple(shape), slices=(StoredSlice(box, info.offset),), source_fingerprint=source_fingerprint
    )


def cut_host_shard(
    header: Layout, boxes: Mapping[str, Sequence[TensorSlice]], source_fingerprint: str
) -> tuple[bytes, list[tuple[int, int]]]:
    """Cut a part out of a safetensors file: what comes before the tensors, and the ranges of the file (offset, bytes).

    ``boxes``: what the part has of each tensor, see ``HostShard.slices``. ``source_fingerprint``: the fingerprint of the checkpoint.
    """
    parts: dict[str, TensorPart] = {}
    ranges: list[tuple[int, int]] = []
    for name, info in sorted(header.items(), key=lambda item: item[1].offset):
        for number, box in enumerate(boxes.get(name, ())):
            parts[f"{name}#{number}" if number else name] = TensorPart(info.dtype, name, info.shape, box)
            element_bytes = DTYPE_BYTES[info.dtype]
            ranges += [
                (info.offset + begin * element_bytes, length * element_bytes)
                for begin, length in contiguous_runs(info.shape, box)
            ]
    return build_parts_header(parts, {FINGERPRINT_KEY: source_fingerprint}), ranges


class TensorPart(NamedTuple):
    """What a file says of a part of a tensor."""

    dtype: str
    name: str  # of the tensor
    shape: Sequence[int]  # of the whole tensor
    box: TensorSlice


def build_parts_header(
    parts: Mapping[str, TensorPart], metadata: Mapping[str, str] | None = None, n_bytes: int = 0
) -> bytes:
    """Return what a file of parts of tensors begins with, by their keys in the file; see ``build_header``."""
    tensors = {key: (part.dtype, [stop - start for start, stop in part.box]) for key, part in parts.items()}
    places = {key: (part.name, part.shape, part.box) for key, part in parts.items()}
    return build_header(tensors, {SLICES_KEY: json.dumps(places), **(metadata or {})}, n_bytes)


def build_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None, n_bytes: int = 0
) -> bytes:
    """Return what a safetensors file with these tensors (dtype and shape), in this order, begins with.

    ``metadata``: its metadata; ``n_bytes``: the length to fill with spaces, if any.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    text = text.ljust(n_bytes - 8)
    return len(text).to_bytes(8, "little") + text


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index says.

    Raises:
        UserError: It does not say that.
    """
    weight_map = read_hf_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: has no weight_map; download the file again")
    return {name: str(file) for name, file in weight_map.items()}


def read_hf_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: The file is missing, or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; a Hugging Face checkpoint must have this file") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON; download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; download it again")
    return value


def compute_fingerprint(tensors: Layout) -> str:
    """Return what tells a checkpoint from others, however its tensors are spread over files; a part says that of its whole.

    It is the SHA-256 of each tensor's name, dtype, shape, and first and last ``SAMPLE_BYTES``.

    Raises:
        UserError: The files of a part are from more than one checkpoint.
        OSError: A file cannot be read.
    """
    sources = {info.source_fingerprint for info in tensors.values()}
    if len(sources) > 1:
        directory = next(iter(tensors.values())).file.parent
        raise UserError(f"{directory}: has files of more than one model; push them again with --shards")
    if sources and (source := sources.pop()):
        return source
    # Sorted by name, and by content rather than by file: the digest does not depend on how tensors are spread over files.
    digest = hashlib.sha256()
    for name, info in sorted(tensors.items()):
        digest.update(repr((name, info.dtype, info.shape)).encode())
        with info.file.open("rb") as file:
            size = min(SAMPLE_BYTES, info.n_bytes)
            for begin in (info.offset, info.offset + info.n_bytes - size):
                file.seek(begin)
                digest.update(file.read(size))
    return digest.hexdigest()
