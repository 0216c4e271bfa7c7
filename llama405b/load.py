"""Stream a checkpoint's weights into the shards, one FSDP unit at a time.

``rank0``: rank 0 reads a unit from the memory-mapped files and sends each rank its rows; it never holds more than
one unit. ``local``: each rank reads its own rows and nothing crosses the network. Knows safetensors and point-to-
point sends; not the optimizer or the data. Weights travel in the files' dtype and are converted on arrival. Random
weights, for a rehearsal, go the same way: only what stands in the files' place differs.
"""

import dataclasses
import mmap
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama405b import ranks
from llama405b.axes import SHARD, Place
from llama405b.contract import weights
from llama405b.contract.errors import UserError
from llama405b.model.llama import restore_buffers, tie_head
from llama405b.parallel.fsdp2 import units
from llama405b.ranks import Ranks

Progress = Callable[[int, int], None]  # bytes done, bytes in all
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Layout = dict[str, tuple[str, tuple[int, ...]]]  # tensor name -> (dtype in the file, shape)


def load(
    model: nn.Module,
    directory: Path,
    how: str,
    me: Ranks,
    progress: Progress,
    *,
    offload: bool = False,
    random: weights.Llama | None = None,
) -> str:
    """Fill the sharded meta model; returns what was done, for the log. ``random``: a shape to make weights up for.

    Raises:
        UserError: The checkpoint is not whole where it is read, or ``local`` was asked for and a rank cannot read it.
    """
    if random:
        how, layout = "rank0", {name: ("BF16", shape) for name, shape in random.tensors().items()}
    else:
        how, layout = _choose(directory, how, me)
    materialise(model, me, offload=offload)
    names = [name for _, parameters in units(model) for name in parameters]
    total, done = sum(_n_bytes(layout, name, layout[name][1][0]) for name in names), 0
    read = _receive if how == "rank0" else _read_own
    files = _Random(layout) if random else _Files(directory, me.leads or how == "local")
    scratch = _Scratch(me)
    for _, parameters in units(model):
        read(parameters, layout, files, scratch, me)
        done += sum(_n_bytes(layout, name, layout[name][1][0]) for name in parameters)
        progress(done, total)
    if how == "local":
        return "each rank read its own rows"
    return f"rank 0 {'made random' if random else 'read the'} weights and sent each rank its rows"


def materialise(model: nn.Module, me: Ranks, *, offload: bool = False) -> None:
    """Give the sharded meta model memory, its tied head and its rotary buffers; the weights are still undefined."""
    model.to_empty(device="cpu" if offload else me.device)
    tie_head(model)
    restore_buffers(model, model.config, me.device)


def rows_of(n_rows: int, rank: int, world: int) -> tuple[int, int]:
    """The rows ``[start, stop)`` of a rank: torch.chunk's split, which DTensor's Shard(0) uses."""
    each = -(-n_rows // world)
    return min(rank * each, n_rows), min((rank + 1) * each, n_rows)


class _Files:
    """The checkpoint's files, each mapped once: rows are views of the page cache, and cost no memory of ours."""

    def __init__(self, directory: Path, reads: bool) -> None:
        self.tensors = weights.read_tensors(directory) if reads else {}
        self.mapped: dict[Path, mmap.mmap] = {}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)`` of a tensor in the file's dtype, to be read only."""
        info = self.tensors[name]
        if info.file not in self.mapped:
            with info.file.open("rb") as file:
                self.mapped[info.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        each = info.n_bytes // info.shape[0]
        if start == stop:
            return torch.empty((0, *info.shape[1:]), dtype=DTYPES[info.dtype])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the buffer cannot be written to
            flat = torch.frombuffer(
                self.mapped[info.file],
                dtype=DTYPES[info.dtype],
                count=(stop - start) * each // DTYPES[info.dtype].itemsize,
                offset=info.offset + start * each,
            )
        return flat.view(stop - start, *info.shape[1:])


class _Random:
    """Made-up weights in the files' place: the same for the same name and rows. Norms are 1, the rest is N(0, 0.02)."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)`` of a tensor."""
        dtype, shape = self.layout[name]
        if len(shape) == 1:
            return torch.ones(stop - start, dtype=DTYPES[dtype])
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {start}".encode()))
        return torch.empty((stop - start, *shape[1:]), dtype=DTYPES[dtype]).normal_(0, 0.02, generator=generator)


def _choose(directory: Path, how: str, me: Ranks) -> tuple[str, Layout]:
    """Agree on how to load, and on what rank 0's files hold."""
    layout: Layout = {}
    error = ""
    try:
        layout = {name: (info.dtype, info.shape) for name, info in weights.read_tensors(directory).items()}
    except UserError as found:
        error = str(found)
    everyone = ranks.agreed(_Seen(error, _digest(layout)))
    if everyone[0].error:
        raise UserError(everyone[0].error)
    lacking = [rank for rank, seen in enumerate(everyone) if seen.digest != everyone[0].digest]
    if how == "local" and lacking:
        why = everyone[lacking[0]].error
        raise UserError(
            f"--model.load: rank {lacking[0]} cannot read the same files in {directory}{f' ({why})' if why else ''}; "
            "copy them there, or take rank0"
        )
    if how == "auto":
        how = "rank0" if lacking else "local"
    return how, dict(ranks.from_rank0(_Tensors(layout if me.leads else {})).layout)


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """What a rank sees of the checkpoint."""

    error: str
    digest: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensors:
    layout: Mapping[str, tuple[str, tuple[int, ...]]]


def _digest(layout: Layout) -> int:
    """A number that differs between ranks that see different tensors (``hash`` of a str differs by process)."""
    return zlib.crc32(repr(sorted(layout.items())).encode())


def _n_bytes(layout: Layout, name: str, n_rows: int) -> int:
    dtype, shape = layout[name]
    return n_rows * weights.TensorInfo(Path(), dtype, shape[1:]).n_bytes


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data


class _Scratch:
    """One buffer for what is sent or received, used again for every unit: malloc would keep a hole for each."""

    def __init__(self, me: Ranks) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8, device=me.device)

    def take(self, n_bytes: int) -> Tensor:
        """The first ``n_bytes`` of it."""
        if self.buffer.numel() < n_bytes:
            self.buffer = torch.empty(n_bytes, dtype=torch.uint8, device=self.buffer.device)
        return self.buffer[:n_bytes]


Unit = dict[str, nn.Parameter]


@torch.no_grad()
def _read_own(unit: Unit, layout: Layout, files: _Files | _Random, _scratch: _Scratch, me: Ranks) -> None:
    for name, parameter in unit.items():
        _local(parameter).copy_(files.rows(name, *rows_of(layout[name][1][0], me.shard.rank, me.shard.size)))


@torch.no_grad()
def _receive(unit: Unit, layout: Layout, files: _Files | _Random, scratch: _Scratch, me: Ranks) -> None:
    """Rank 0 sends every other rank its rows of this unit in one piece; each copies them into its shards."""
    if me.leads:
        _send(unit, layout, files, scratch, me)
        return
    spans, n_bytes = _spans(unit, layout, me.shard)
    buffer = scratch.take(n_bytes)
    if n_bytes:
        dist.recv(buffer, 0)
    for name, (_, begin, size) in spans.items():
        if size:
            shard = _local(unit[name])
            shard.copy_(buffer[begin : begin + size].view(DTYPES[layout[name][0]]).view(shard.shape))


def _send(unit: Unit, layout: Layout, files: _Files | _Random, scratch: _Scratch, me: Ranks) -> None:
    """Pack every rank's rows, send them all at once, and take rank 0's own meanwhile."""
    packed = [_spans(unit, layout, me.axes.place(rank, SHARD)) for rank in range(1, me.world)]
    pieces = scratch.take(sum(n_bytes for _, n_bytes in packed)).split([n_bytes for _, n_bytes in packed])
    sends = []
    for rank, ((spans, n_bytes), piece) in enumerate(zip(packed, pieces, strict=True), 1):
        for name, ((start, stop), begin, size) in spans.items():
            if size:
                piece[begin : begin + size].copy_(files.rows(name, start, stop).flatten().view(torch.uint8))
        if n_bytes:
            sends.append(dist.isend(piece, rank))
    _read_own(unit, layout, files, scratch, me)
    for send in sends:
        send.wait()


def _spans(unit: Unit, layout: Layout, shard: Place) -> tuple[dict[str, tuple[tuple[int, int], int, int]], int]:
    """For each tensor a rank's rows and where they stand in its piece (begin, size); and the piece's size, in bytes.

    Wider dtypes come first, so that each tensor begins at a multiple of its element size; so does each piece, at 16.
    """
    begin, spans = 0, {}
    for name in sorted(unit, key=lambda name: -weights.DTYPE_BYTES[layout[name][0]]):
        rows = rows_of(layout[name][1][0], shard.rank, shard.size)
        size = _n_bytes(layout, name, rows[1] - rows[0])
        spans[name] = (rows, begin, size)
        begin += size
    return spans, -(-begin // 16) * 16
