"""Stream a checkpoint's weights into the shards, one FSDP unit at a time.

``rank0``: rank 0 reads a unit from the memory-mapped files and sends each rank its part; it never holds more than one unit. ``local``:
each rank reads its own part and nothing crosses the network. Weights are sent in the files' dtype and converted on arrival. Random
weights, for a rehearsal, take the same paths from another source; with ``auto`` each rank makes its own.

Knows safetensors and point-to-point sends; not the optimizer or the data.
"""

import dataclasses
import itertools
import math
import mmap
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama405b.contract.errors import UserError, given, reason_of
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import Progress, Stage, allocate
from llama405b.distributed.ranks import Rank
from llama405b.model.llama import restore_buffers, tie_head, unwrapped
from llama405b.parallel.fsdp import unit_of
from llama405b.settings.schema import Adapter
from llama405b.spec import models
from llama405b.spec.models import UP, factors, is_factor, read_peft
from llama405b.spec.tensors import (
    DTYPE_BYTES,
    Box,
    Holdings,
    Layout,
    TensorInfo,
    elements,
    fingerprint_of,
    is_for,
    read_layouts,
    within,
)

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MEAN_ROWS = 4096  # summed at a time
BLOCK = 1 << 15  # elements of random weights per generator: few enough that torch uses a single thread
Unit = list[str]  # names of parameters
Spans = dict[
    str, tuple[Box, int, int]
]  # of one rank, by name: slice of the tensor, offset in the rank's piece, and size in bytes


def load(
    model: nn.Module,
    directory: Path,
    how: str,
    me: Rank,
    progress: Progress,
    *,
    offload: bool = False,
    random: models.Llama | None = None,
    holdings: Holdings | None = None,
    vocab: int = 0,
) -> str:
    """Fill the sharded meta model; returns what was done, for the log. ``random``: the shape to generate weights for.

    ``holdings``: of all ranks; None: that of a model without pipeline stages. ``vocab``: rows of the embedding, if it may have
    more rows than the file.

    Raises:
        UserError: The checkpoint is not complete, or ``local`` was requested and a rank cannot read it.
    """
    files: _Files
    holdings = holdings or Holdings(me.axes)
    if random:
        how = "rank0" if how == "rank0" else "local"
        files = _Random(random.tensors(), "BF16", random.initializer_range)
    else:
        how, files = _choose(directory, how, me, holdings)
        files = _Grown(files.layout, vocab) if vocab else files
    materialise(model, me, offload=offload)
    own = {name: parameter for name, parameter in _named(model) if not is_factor(name)}
    names = holdings.names if how == "rank0" else ()
    _fill(_Filler(files, me, holdings, own), names or own, how, progress)
    if how == "local":
        return f"each rank {files.own}"
    return f"rank 0 {files.came} and sent each rank its part"


def load_adapter(
    model: nn.Module,
    llama: models.Llama,
    adapter: Adapter,
    seed: int,
    me: Rank,
    holdings: Holdings,
    progress: Progress,
) -> str:
    """Fill the adapters of a materialized model from peft's files on rank 0, or randomly; return words for the log."""
    own = {name: parameter for name, parameter in _named(model) if is_factor(name)}
    shapes = factors(llama, adapter)
    if not adapter.path:
        _fill(_Filler(_RandomFactors(shapes, seed), me, holdings, own), own, "local", progress)
        return "random"
    layout = read_peft(Path(adapter.path), llama, adapter) if me.is_rank0 else {}
    known = collectives.broadcast_object({name: info.dtype for name, info in layout.items()}, dict[str, str])
    layout = layout or {name: TensorInfo(Path(), dtype, shapes[name]) for name, dtype in known.items()}
    _fill(_Filler(_Files(layout), me, holdings, own), shapes, "rank0", progress)
    return f"from {adapter.path}"


def _fill(filler: "_Filler", names: Iterable[str], how: str, progress: Progress) -> None:
    """Fill parameters unit by unit; with ``rank0`` all ranks pass the same names, else each rank its own."""
    fill = filler.read_own
    if how == "rank0":
        fill = filler.send if filler.me.is_rank0 else filler.receive
    parts, layout = _units_of(names), filler.files.layout
    sizes = [sum(layout[name].n_bytes for name in unit) for unit in parts]
    for _, done in zip(fill(parts), itertools.accumulate(sizes), strict=True):
        progress(done, sum(sizes))


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield unwrapped(name), parameter


def _units_of(names: Iterable[str]) -> list[Unit]:
    """Group parameter names, given in the order of use, by unit."""
    found: dict[str, Unit] = {}
    for name in names:
        found.setdefault(unit_of(name), []).append(name)
    return list(found.values())


def materialise(model: nn.Module, me: Rank, *, offload: bool = False, pinning: Progress | None = None) -> None:
    """Allocate the meta tensors of a sharded model, tie its head, and compute its rotary buffers; weights stay undefined.

    ``pinning`` is called with the progress if FSDP will copy the offloaded weights, which are then pinned; None: do not pin.
    FSDP itself would pin each weight in a block of the next power of two.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    device = torch.device("cpu") if offload else me.device
    blocks: dict[int, Tensor] = {}
    if pinning:
        meta = {id(p): _local(p).nbytes for p in model.parameters() if p.is_meta}
        blocks = dict(zip(meta, allocate(list(meta.values()), me.device, pinning), strict=True))

    def filled(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        made = torch.empty_like(tensor, device=device)
        if isinstance(made, DTensor) and (block := blocks.get(id(tensor))) is not None:
            made._local_tensor = block.view(made.dtype).view(made._local_tensor.shape)
        return made

    model._apply(filled)
    tie_head(model)
    restore_buffers(model, model.config, me.device)


@torch.no_grad()
def refuse_not_finite(model: nn.Module, where: Path, adapters: Path | None = None) -> None:
    """Refuse weights that are NaN or infinite on any rank; ``where`` they, and adapters, come from. No copy of them is made.

    Raises:
        UserError: On every rank; it names the first such tensor.
    """
    names, finite = zip(*((name, _is_finite(_local(p))) for name, p in model.named_parameters()), strict=True)
    first_bad = [*torch.stack(finite).tolist(), False].index(False)
    [left] = collectives.all_reduce_max([len(names) - first_bad])
    if left:
        name = unwrapped(names[-left])
        where = adapters if adapters and is_factor(name) else where
        raise UserError(
            f"{where}: {name} has weights that are NaN or infinite; check its source, or use another checkpoint"
        )


class _Files:
    """The files of a checkpoint, each mapped once: full rows are views of the page cache and cost no memory."""

    came, own = "read the weights", "read its own part"

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.mapped: dict[Path, mmap.mmap] = {}

    def read(self, name: str, box: Box) -> Tensor:
        """Return a slice of a tensor, read-only, in the file's dtype."""
        info = self.layout[name]
        piece = info.piece_with(box)
        assert piece
        if info.file not in self.mapped:
            with info.file.open("rb") as file:
                self.mapped[info.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if not elements(box):
            return torch.empty([stop - start for start, stop in box], dtype=DTYPES[info.dtype])
        (start, stop), *others = within(piece.box, box)
        _, *widths = [last - first for first, last in piece.box]
        row = math.prod(widths)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the buffer is read-only
            flat = torch.frombuffer(
                self.mapped[info.file],
                dtype=DTYPES[info.dtype],
                count=(stop - start) * row,
                offset=piece.offset + start * row * DTYPES[info.dtype].itemsize,
            )
        return flat.view(stop - start, *widths)[(slice(None), *(slice(*each) for each in others))].contiguous()


class _Grown(_Files):
    """The files of a model whose vocabulary is enlarged: new rows of embedding and head are the mean of the rows in the files."""

    def __init__(self, layout: Layout, vocab: int) -> None:
        self.rows = {name: layout[name].shape[0] for name in (models.EMBEDDING, models.HEAD) if name in layout}
        grown = {name: dataclasses.replace(layout[name], shape=(vocab, *layout[name].shape[1:])) for name in self.rows}
        super().__init__(layout | grown)
        self.means = dict[str, Tensor]()

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor."""
        (start, stop), *others = box
        n_old = self.rows.get(name, stop)
        if stop <= n_old:
            return super().read(name, box)
        old = super().read(name, ((min(start, n_old), n_old), *others))
        new = self._mean(name)[None, *(slice(*each) for each in others)].expand(stop - max(start, n_old), -1)
        return torch.cat([old, new])

    def _mean(self, name: str) -> Tensor:
        """Return the mean of a tensor's rows in its dtype; FP64 sums over fixed blocks of rows give the same bits on all ranks."""
        if name not in self.means:
            info, n_old = self.layout[name], self.rows[name]
            total = torch.zeros(info.shape[1], dtype=torch.float64)
            for start in range(0, n_old, MEAN_ROWS):
                rows = super().read(name, ((start, min(start + MEAN_ROWS, n_old)), (0, info.shape[1])))
                total += rows.double().sum(0)
            self.means[name] = (total / n_old).to(DTYPES[info.dtype])
        return self.means[name]


class _Random(_Files):
    """Random weights instead of files; equal for any number of ranks, as each block of elements has its own generator.

    Matrices are N(0, ``initializer_range``), norms are 1 and biases 0, as transformers initializes a Llama.
    """

    came, own = "made random weights", "made its own random weights"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str, std: float, seed: str = "") -> None:
        super().__init__({name: TensorInfo(Path(), dtype, shape) for name, shape in shapes.items()})
        self.std, self.seed = std, seed
        self.threads = ThreadPoolExecutor(torch.get_num_threads(), "random")

    def constant(self, name: str) -> float | None:
        """Return the value of all elements of a tensor; None: they are random."""
        if len(self.layout[name].shape) > 1:
            return None
        return 0.0 if name.endswith(".bias") else 1.0

    def fill_(self, values: Tensor, _: str, generator: torch.Generator) -> Tensor:
        """Fill a block of a tensor with random values."""
        return values.normal_(0, self.std, generator=generator)

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor."""
        (start, stop), *others = box
        shape, dtype = self.layout[name].shape, DTYPES[self.layout[name].dtype]
        if (constant := self.constant(name)) is not None:
            return torch.full([last - first for first, last in box], constant, dtype=dtype)
        each = math.prod(shape[1:])
        begin, end = start * each, stop * each
        found = torch.empty(end - begin, dtype=dtype)

        def make(block: int) -> None:
            first = block * BLOCK
            last = min(first + BLOCK, shape[0] * each)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}{name} {block}".encode()))
            whole = self.fill_(torch.empty(last - first), name, generator)
            low, high = max(begin, first), min(end, last)
            found[low - begin : high - begin] = whole[low - first : high - first]

        list(self.threads.map(make, range(begin // BLOCK, -(-end // BLOCK))))
        return found.view(stop - start, *shape[1:])[(slice(None), *(slice(*each) for each in others))]


class _RandomFactors(_Random):
    """New adapters as peft initializes them: A is uniform up to 1 / sqrt(inputs), B is 0, so that they add nothing at first."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        super().__init__(shapes, "F32", 0.0, f"{seed} ")

    def constant(self, name: str) -> float | None:
        """Return 0 for B."""
        return 0.0 if name.endswith(UP) else None

    def fill_(self, values: Tensor, name: str, generator: torch.Generator) -> Tensor:
        """Fill a block of A as Kaiming-uniform initialization with a slope of sqrt(5) does."""
        bound = self.layout[name].shape[1] ** -0.5
        return values.uniform_(-bound, bound, generator=generator)


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """What one rank finds of the checkpoint's files."""

    error: str
    fingerprint: str
    whole: bool


def _choose(directory: Path, how: str, me: Rank, holdings: Holdings) -> tuple[str, _Files]:
    """Agree with all ranks on the mode and the files' layout: as this rank sees it if it reads them, else as rank 0 does."""
    own, seen = _read(directory, me, holdings)
    how = _way(directory, how, collectives.all_gather_objects(seen))
    known = {name: TensorInfo(Path(), info.dtype, info.shape) for name, info in own.items() if me.is_rank0}
    sent = collectives.broadcast_object(known, Layout)
    if me.is_rank0 or how == "local":
        return how, _Files(own)
    return how, _Files(sent)


def _way(directory: Path, how: str, everyone: Sequence[_Seen]) -> str:
    """Choose rank0 or local from the reports of all ranks."""
    if everyone[0].error:
        raise UserError(everyone[0].error)
    lacking = [rank for rank, seen in enumerate(everyone) if seen.fingerprint != everyone[0].fingerprint]
    if how == "auto":
        how = "rank0" if lacking else "local"
    if how == "local" and lacking:
        raise UserError(
            f"--model.load: rank {lacking[0]} cannot read the same files in {directory}"
            f"{given(' ({})', everyone[lacking[0]].error)}; copy them there, or use rank0"
        )
    if how == "rank0" and not everyone[0].whole:
        who = given("rank {} does not have its part of the same model there, and ", next(iter(lacking), None))
        raise UserError(
            f"{directory}: {who}rank 0 cannot send the weights because it has only a part of them; push again with "
            "--shards, or push all weights"
        )
    return how


def _read(directory: Path, me: Rank, holdings: Holdings) -> tuple[Layout, _Seen]:
    """Return the files' layout (of pushed parts the newest that has this rank's) and a report; on failure an empty layout."""
    try:
        for layout in read_layouts(directory, lambda name: is_for(name, me.rank, me.world)):
            parts = {name: info for name, info in layout.items() if info.pieces}
            if all(info.piece_with(holdings.box(name, info.shape, me.rank)) for name, info in parts.items()):
                return layout, _Seen("", fingerprint_of(layout), not parts)
    except UserError as error:
        return {}, _Seen(str(error), "", whole=True)
    except OSError as error:
        return {}, _Seen(f"{directory}: {reason_of(error)}", "", whole=True)
    why = f"{directory}: has only parts of other ranks; push again with --shards, for {me.axes}"
    return {}, _Seen(why, "", whole=True)


def _is_finite(shard: Tensor) -> Tensor:
    """Return whether all elements are finite, as a tensor on their device, so that the host does not wait."""
    if not shard.numel():
        return torch.ones((), dtype=torch.bool, device=shard.device)
    # Minimum or maximum is NaN or infinite if any element is; isfinite() on all elements would allocate a mask.
    return torch.stack(torch.aminmax(shard)).isfinite().all()


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data


class _Filler:
    """Fills a rank's shards unit by unit; two units are in flight, so that one is sent while another is read."""

    def __init__(self, files: _Files, me: Rank, holdings: Holdings, own: Mapping[str, nn.Parameter]) -> None:
        """``own``: the parameters of this rank."""
        self.files = files
        self.me = me
        self.holdings = holdings
        self.own = own
        self.stage = Stage(me.device)
        # Two alternating buffers for all sends or receives: a new allocation for each unit would fragment memory.
        self.buffers = [torch.empty(0, dtype=torch.uint8, device=me.device) for _ in range(2)]

    def read_own(self, parts: Sequence[Unit]) -> Iterator[None]:
        """Read this rank's slices of each unit from the files."""
        for unit in parts:
            self._read(unit)
            yield

    @torch.no_grad()
    def _read(self, unit: Unit) -> None:
        for name in unit:
            if name not in self.own:
                continue
            own, shard = self.files.read(name, self._box(name, self.me.rank)), _local(self.own[name])
            if shard.is_cuda:
                came = torch.empty(own.nbytes, dtype=torch.uint8, device=shard.device)
                self.stage.bring(came, [(0, own)])
                own = came.view(own.dtype).view(own.shape)
            shard.copy_(own)

    def receive(self, parts: Sequence[Unit]) -> Iterator[None]:
        """Receive this rank's piece of each unit from rank 0, and copy it to the shards while the next piece arrives."""
        coming: list[tuple[Spans, Tensor, dist.Work | None]] = []
        for number in range(len(parts) + 1):
            if number < len(parts):
                spans, n_bytes = self._spans(parts[number], self.me.rank)
                piece = self._buffer(number, n_bytes)
                coming.append((spans, piece, dist.irecv(piece, 0) if n_bytes else None))
            if number:
                self._unpack(*coming.pop(0))
                yield

    @torch.no_grad()
    def _unpack(self, spans: Spans, piece: Tensor, came: dist.Work | None) -> None:
        if came:
            came.wait()
        for name, (_, begin, size) in spans.items():
            if size:
                shard = _local(self.own[name])
                shard.copy_(piece[begin : begin + size].view(DTYPES[self.files.layout[name].dtype]).view(shard.shape))

    def send(self, parts: Sequence[Unit]) -> Iterator[None]:
        """Send every other rank its piece of each unit, and read rank 0's own slices meanwhile."""
        sending: list[list[dist.Work]] = [[], []]
        for number, unit in enumerate(parts):
            for work in sending[number % 2]:  # frees the buffer
                work.wait()
            pieces = self._pack(number, unit)
            sending[number % 2] = [
                work for rank, piece in enumerate(pieces, 1) if piece.numel() and (work := dist.isend(piece, rank))
            ]
            self._read(unit)
            yield
        for work in itertools.chain(*sending):
            work.wait()  # gloo does not keep the buffers of unfinished sends alive; for NCCL, torch does

    def _pack(self, number: int, unit: Unit) -> Sequence[Tensor]:
        """Read every other rank's slices of a unit into one buffer; return each rank's piece of it."""
        packed = [self._spans(unit, rank) for rank in range(1, self.me.world)]
        everything = self._buffer(number, sum(n_bytes for _, n_bytes in packed))
        begins = itertools.accumulate((n_bytes for _, n_bytes in packed), initial=0)
        sources = [
            (begin + offset, self.files.read(name, box))
            for begin, (spans, _) in zip(begins, packed, strict=False)
            for name, (box, offset, _) in spans.items()
        ]
        self.stage.bring(everything, sources)
        return everything.split([n_bytes for _, n_bytes in packed])

    def _buffer(self, number: int, n_bytes: int) -> Tensor:
        slot = number % 2
        if self.buffers[slot].numel() < n_bytes:
            self.buffers[slot] = torch.empty(n_bytes, dtype=torch.uint8, device=self.me.device)
        return self.buffers[slot][:n_bytes]

    def _box(self, name: str, rank: int) -> Box:
        return self.holdings.box(name, self.files.layout[name].shape, rank)

    def _spans(self, unit: Unit, rank: int) -> tuple[Spans, int]:
        """Return the spans of a rank in its piece of a unit, and the size of the piece in bytes.

        Wider dtypes come first so that each tensor is aligned to its element size; pieces are aligned to 16 bytes.
        """
        begin = 0
        spans = {}
        layout = self.files.layout
        for name in sorted(unit, key=lambda name: -DTYPE_BYTES[layout[name].dtype]):
            box = self._box(name, rank)
            size = layout[name].bytes_of(box)
            spans[name] = box, begin, size
            begin += size
        return spans, -(-begin // 16) * 16
