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
from typing import Any

from llama405b.contract.errors import UserError, and_more
from llama405b.settings.axes import SHARD, Axes

LAYER = re.compile(r"model\.layers\.(\d+)\.")
FIRST = "model.embed_tokens."


def stages_of(shapes: Mapping[str, Sequence[int]], n_stages: int) -> tuple[tuple[int, ...], ...]:
    """Divide a model's layers into stages; a stage may have none."""
    sizes: dict[int, int] = collections.defaultdict(int)
    first = last = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if found := LAYER.match(name):
            sizes[int(found[1])] += size
        elif name.startswith(FIRST):
            first += size
        else:
            last += size
    layer = max(1, max(sizes.values(), default=1))
    # In units of one layer. The head costs compute in the last stage; the embedding costs memory only, so it just breaks ties.
    time = [0.0] * n_stages
    time[-1] = last / layer
    parameters = list(time)
    parameters[0] += first / layer
    counts = [0] * n_stages
    for _ in sizes:
        stage = min(range(n_stages), key=lambda each: (time[each], parameters[each]))
        counts[stage] += 1
        time[stage] += 1
        parameters[stage] += 1
    layers = iter(sorted(sizes))
    return tuple(tuple(next(layers) for _ in range(count)) for count in counts)


def stage_of(name: str, stages: Sequence[Sequence[int]]) -> int:
    """Return the stage of a parameter."""
    if found := LAYER.match(name):
        return next(stage for stage, layers in enumerate(stages) if int(found[1]) in layers)
    return 0 if name.startswith(FIRST) else len(stages) - 1


Range = tuple[int, int]  # [start, stop)
Box = tuple[Range, ...]  # by dimension
# Which dimension of a module's weight tensor parallelism splits (arXiv 1909.08053, section 3): its outputs, or its inputs.
OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
INPUTS = ("o_proj", "down_proj")


def tp_dimension(name: str) -> int | None:
    """Return the dimension of a tensor that tensor parallelism splits; None: each rank has all of it."""
    module, _, kind = name.rpartition(".")
    module, _, factor = module.partition(".lora_")  # an adapter's A has the inputs of its matrix, and its B the outputs
    last = module.rpartition(".")[2]
    if last in OUTPUTS:
        return 0 if factor != "A" else None
    return 1 if last in INPUTS and kind == "weight" and factor != "B" else None


def chunk(size: int, rank: int, n_ranks: int) -> Range:
    """Return a rank's indices: torch.chunk's split, which DTensor's Shard uses."""
    each = -(-size // n_ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


@dataclasses.dataclass(frozen=True, slots=True)
class Holdings:
    """What the ranks of a mesh hold of a model."""

    axes: Axes
    stages: tuple[tuple[int, ...], ...] = ((),)  # the layers of each pipeline stage; one stage has all
    names: tuple[str, ...] = ()  # of a pipeline's parameters, in the order of use

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], axes: Axes, chunks: int = 1) -> "Holdings":
        """Return the layout of a model with these parameters; ``chunks``: stages of each rank of a pipeline."""
        return cls(axes, stages_of(shapes, axes.pp * chunks), tuple(shapes)) if axes.pp > 1 else cls(axes)

    def has(self, name: str, rank: int) -> bool:
        """Check whether a tensor is in one of a rank's stages."""
        if self.axes.pp == 1:
            return True
        return stage_of(name, self.stages) % self.axes.pp == self.axes.place(rank, ("pp",)).rank

    def box(self, name: str, shape: Sequence[int], rank: int) -> Box:
        """Return the slice of a tensor that a rank holds; empty for another stage's tensor."""
        box = list(whole_box(shape))
        if not box:
            return ()
        tp, shard = self.axes.place(rank, ("tp",)), self.axes.place(rank, SHARD)
        dimension = tp_dimension(name)
        if dimension is not None:
            box[dimension] = chunk(shape[dimension], tp.rank, tp.size)
        first, last = box[0]
        start, stop = chunk(last - first, shard.rank, shard.size)
        box[0] = (first + start, first + stop) if self.has(name, rank) else (0, 0)
        return tuple(box)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the slice of a whole tensor."""
    return tuple((0, size) for size in shape)


def elements(box: Box) -> int:
    """Return the number of elements of a slice."""
    return math.prod(stop - start for start, stop in box)


def contains(box: Box, other: Box) -> bool:
    """Check whether a slice contains all elements of another."""
    return not elements(other) or all(a <= c and d <= b for (a, b), (c, d) in zip(box, other, strict=True))


def within(box: Box, other: Box) -> Box:
    """Return a contained slice relative to the begin of its container."""
    return tuple((c - a, d - a) for (a, _), (c, d) in zip(box, other, strict=True))


def merged(boxes: Iterable[Box]) -> list[Box]:
    """Merge neighboring slices into as few as possible; at least one, which may be empty."""
    given = list(boxes)
    found = sorted({box for box in given if elements(box)}) or given[:1]
    for dimension in reversed(range(len(found[0]))):
        joined: list[Box] = []

        def others(box: Box, at: int = dimension) -> Box:
            return (*box[:at], *box[at + 1 :])

        for _, group in itertools.groupby(sorted(found, key=lambda box: (others(box), box[dimension])), others):
            for box in group:
                last = joined[-1] if joined else None
                if last and others(last) == others(box) and last[dimension][1] == box[dimension][0]:
                    both = (last[dimension][0], box[dimension][1])
                    joined[-1] = (*last[:dimension], both, *last[dimension + 1 :])
                else:
                    joined.append(box)
        found = sorted(joined)
    return found


def runs(shape: Sequence[int], box: Box) -> list[tuple[int, int]]:
    """Return a slice as contiguous runs (begin, length) of the whole tensor's elements, in order."""
    if not elements(box):
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
        (sum(at * sizes[dimension] for dimension, at in enumerate(place)) + start * sizes[inner - 1], length)
        for place in outer
    ]


PART_NAME = re.compile(r"ranks-(\d{1,6})-(\d{1,6})-of-(\d{1,6})")
# in a header's metadata: by entry, its tensor's name and shape, and which box of that it is
PIECES = "llama405b.pieces"
WHOLE = "llama405b.whole"  # in a header's metadata: the fingerprint of the checkpoint


def is_for(name: str, rank: int, world: int) -> bool:
    """Check whether a shard directory is for a rank; with another number of ranks it may be outdated."""
    found = PART_NAME.fullmatch(name)
    return found is not None and int(found[3]) == world and int(found[1]) <= rank <= int(found[2])


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What the ranks from ``first`` to ``last`` of a mesh own."""

    first: int
    last: int
    axes: Axes
    chunks: int = 1  # pipeline stages of each rank

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"ranks-{self.first}-{self.last}-of-{self.axes.world}"

    def boxes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Box]]:
        """Return the merged slices of each tensor that these ranks own; tensors of other stages are left out."""
        holdings, ranks = Holdings.of(shapes, self.axes, self.chunks), range(self.first, self.last + 1)
        return {
            name: merged(holdings.box(name, shape, rank) for rank in ranks)
            for name, shape in shapes.items()
            if any(holdings.has(name, rank) for rank in ranks)
        }


DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"  # of older models
BY_LAYER = "model.layers.0.pt"  # of models with a file for each module
SAMPLE_BYTES = 4096  # of each end of each tensor: training changes every tensor, or some rows, as those of added tokens
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a tensor, stored contiguously in a file."""

    box: Box
    offset: int  # in the file, of its first byte


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor, or slices of it, is stored."""

    file: Path
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]  # of the whole tensor
    offset: int = 0  # in the file, of the first byte of a whole tensor
    pieces: tuple[Piece, ...] = ()  # that the file has of it; none: it has all of it
    whole: str = ""  # fingerprint of the checkpoint that the pieces are of

    @property
    def n_bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def stored(self) -> tuple[Piece, ...]:
        """The stored slices; a whole tensor is one."""
        return self.pieces or (Piece(whole_box(self.shape), self.offset),)

    @property
    def held_bytes(self) -> int:
        """Size of what the file holds."""
        return sum(self.bytes_of(piece.box) for piece in self.stored)

    def bytes_of(self, box: Box) -> int:
        """Return the bytes of a slice."""
        return elements(box) * DTYPE_BYTES[self.dtype]

    def piece_with(self, box: Box) -> Piece | None:
        """Return the stored slice that contains a slice; None if none does."""
        return next((piece for piece in self.stored if contains(piece.box, box)), None)


Layout = dict[str, TensorInfo]  # by name


def read_tensors(directory: Path) -> Layout:
    """List a checkpoint's tensors (of host shards the first's), and check that all files are complete.

    Raises:
        UserError: A file is missing, truncated or not safetensors, the index names a tensor that no file holds, two files
        hold one tensor, or there is a single file beside an index of others.
    """
    return next(read_layouts(directory))


def read_layouts(directory: Path, suits: Callable[[str], bool] = lambda _: True) -> Iterator[Layout]:
    """Yield the tensors of a full checkpoint once, or of each wanted host shard, newest first.

    Raises:
        UserError: As ``read_tensors``.
    """
    if (directory / INDEX).is_file():
        yield _read_listed(directory / INDEX)
        return
    if (directory / SINGLE).is_file():
        yield read_header(directory / SINGLE)
        return
    parts = [path / INDEX for path in sorted(directory.glob("ranks-*")) if PART_NAME.fullmatch(path.name)]
    parts = [index for index in parts if index.is_file()]  # else it was not pushed to its end
    parts.sort(key=lambda index: index.parent.stat().st_mtime, reverse=True)  # renaming what arrived changes that
    if not parts and is_pickled(directory):
        kind = ".pt" if (directory / BY_LAYER).is_file() else ".bin"
        raise UserError(f"{directory}: has {kind} files; convert them with `llama405b export {directory} OUT`")
    if not parts:
        raise UserError(f"{directory}: has neither {INDEX} nor {SINGLE}; download the weights in safetensors format")
    for index in parts:
        if suits(index.parent.name):
            yield _read_listed(index)


def is_pickled(directory: Path) -> bool:
    """Check whether a directory has only pickled weights: an older model's, or a file for each layer."""
    has = [(directory / name).is_file() for name in (PICKLED, PICKLED_INDEX, BY_LAYER, SINGLE, INDEX)]
    return any(has[:3]) and not any(has[3:])


def _read_listed(index: Path) -> Layout:
    weight_map = read_weight_map(index)
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    single = index.parent / SINGLE
    if single.is_file() and files != [single]:  # which transformers would read instead
        raise UserError(
            f"{single}: is next to {INDEX}, which lists other files; delete the one that is not the model's"
        )
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]}: missing{and_more(missing)} of {len(files)} files in the index; download them")
    tensors: Layout = {}
    for file in files:
        header = read_header(file)
        if twice := sorted(tensors.keys() & header.keys()):
            other = tensors[twice[0]].file.name
            raise UserError(f"{file}: contains {twice[0]}{and_more(twice)}, as {other} does; download both again")
        tensors |= header
    for name, said in weight_map.items():
        if name not in tensors or tensors[name].file.name != said:
            raise UserError(f"{index}: lists {name} in {said}, which does not contain it; download both again")
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
            infos, end = _tensors_of(header, path, 8 + length)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise UserError(f"{path}: its safetensors header cannot be read; download it again") from None
    if actual != 8 + length + end:
        raise UserError(f"{path}: {actual} bytes, but its header says {8 + length + end}; download it again")
    return infos


def _tensors_of(header: Mapping[str, Any], path: Path, begin: int) -> tuple[Layout, int]:
    """Return the tensors of a parsed header, and where their bytes end; the format allows no gaps."""
    infos: Layout = {}
    end = 0
    about = header.get("__metadata__", {})
    cut, whole = json.loads(about.get(PIECES, "{}")), str(about.get(WHOLE, ""))
    if whole and not cut:
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
        held = TensorInfo(path, entry["dtype"], tuple(entry["shape"]), begin + start)
        if start != end or stop - start != held.n_bytes:
            raise ValueError
        if name in cut:
            name, held = _piece_of(held, cut[name], whole)
            held = dataclasses.replace(held, pieces=(*(infos[name].pieces if name in infos else ()), *held.pieces))
        infos[name] = held
        end = stop
    return infos, end


def _piece_of(held: TensorInfo, of: Sequence[Any], whole: str) -> tuple[str, TensorInfo]:
    """Return the name of the tensor of which an entry is a piece, and the piece; ``of``: that name, its shape, the box."""
    name, shape, ranges = of
    box = tuple((start, stop) for start, stop in ranges)
    fits = all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True))
    if not fits or held.shape != tuple(stop - start for start, stop in box):
        raise ValueError
    return name, dataclasses.replace(held, shape=tuple(shape), pieces=(Piece(box, held.offset),), whole=whole)


def part_file(header: Layout, boxes: Mapping[str, Sequence[Box]], whole: str) -> tuple[bytes, list[tuple[int, int]]]:
    """Cut a part out of a safetensors file: what comes before the tensors, and the ranges of the file (offset, bytes).

    ``boxes``: what the part has of each tensor, see ``Part.boxes``. ``whole``: the fingerprint of the checkpoint.
    """
    entries: dict[str, object] = {}
    pieces: dict[str, tuple[str, tuple[int, ...], Box]] = {}
    ranges: list[tuple[int, int]] = []
    begin = 0
    for name, info in sorted(header.items(), key=lambda item: item[1].offset):
        for number, box in enumerate(boxes.get(name, ())):
            entry = f"{name}#{number}" if number else name
            size, each = info.bytes_of(box), DTYPE_BYTES[info.dtype]
            shape = tuple(stop - start for start, stop in box)
            entries[entry] = {"dtype": info.dtype, "shape": shape, "data_offsets": (begin, begin + size)}
            pieces[entry] = name, info.shape, box
            ranges += [(info.offset + at * each, length * each) for at, length in runs(info.shape, box)]
            begin += size
    return header_bytes(entries, {PIECES: json.dumps(pieces), WHOLE: whole}), ranges


def header_bytes(entries: Mapping[str, object], about: Mapping[str, str] | None = None) -> bytes:
    """Return what a safetensors file begins with; ``about``: its metadata."""
    text = json.dumps({"__metadata__": {"format": "pt", **(about or {})}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
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


def fingerprint_of(tensors: Layout) -> str:
    """Return what tells a checkpoint from others, however its tensors are spread over files; a part says that of its whole.

    It is the SHA-256 of each tensor's name, dtype, shape, and first and last ``SAMPLE_BYTES``.

    Raises:
        UserError: The files of a part are from more than one checkpoint.
        OSError: A file cannot be read.
    """
    said = {info.whole for info in tensors.values()}
    if len(said) > 1:
        directory = next(iter(tensors.values())).file.parent
        raise UserError(f"{directory}: has files of more than one model; push them again with --shards")
    if said and (whole := said.pop()):
        return whole
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
