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

from llama405b.contract.errors import UserError, fmt_if, reason_of
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import (
    MIN_CACHED_SHARE,
    DeviceStager,
    OnByteProgress,
    allocate_blocks,
    drop_cached,
    total_bytes,
)
from llama405b.distributed.ranks import Rank
from llama405b.model.llama import restore_buffers, strip_wrappers, tie_head
from llama405b.parallel.fsdp import unit_name
from llama405b.settings.schema import Adapter
from llama405b.spec import models
from llama405b.spec.adapters import LORA_B, is_lora_name, lora_shapes, read_peft
from llama405b.spec.tensors import (
    DTYPE_BYTES,
    Layout,
    ShardLayout,
    TensorInfo,
    TensorSlice,
    compute_fingerprint,
    count_elements,
    is_shard_for,
    read_layouts,
    relative_slice,
)

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MEAN_ROWS = 4096  # summed at a time
BLOCK_ELEMENTS = 1 << 15  # elements of random weights per generator: few enough that torch uses a single thread
UnitNames = list[str]  # names of parameters
Spans = dict[
    str, tuple[TensorSlice, int, int]
]  # of one rank, by name: slice of the tensor, offset in the rank's piece, and size in bytes


def load(
    model: nn.Module,
    directory: Path,
    mode: str,
    rank: Rank,
    on_progress: OnByteProgress,
    *,
    offload: bool = False,
    random_shape: models.Llama | None = None,
    shard_layout: ShardLayout | None = None,
    vocab: int = 0,
) -> str:
    """Fill the sharded meta model; returns what was done, for the log. ``random_shape``: the shape to generate weights for.

    ``shard_layout``: of all ranks; None: that of a model without pipeline stages. ``vocab``: rows of the embedding, if it may have
    more rows than the file.

    Raises:
        UserError: The checkpoint is not complete, or ``local`` was requested and a rank cannot read it.
    """
    files: _MappedWeights
    shard_layout = shard_layout or ShardLayout(rank.axes)
    if random_shape:
        mode = "rank0" if mode == "rank0" else "local"
        start = random_shape.family.norm_start
        files = _RandomWeights(random_shape.tensors(), "BF16", random_shape.initializer_range, norm_start=start)
    else:
        mode, files = _agree_on_mode(directory, mode, rank, shard_layout)
        files = _ResizedFiles(files.layout, vocab) if vocab else files
    materialize(model, rank, offload=offload)
    parameters = {name: parameter for name, parameter in _named_parameters(model) if not is_lora_name(name)}
    names = shard_layout.names if mode == "rank0" else ()
    _fill(_Filler(files, rank, shard_layout, parameters), names or parameters, mode, on_progress)
    if mode == "local":
        return f"each rank {files.local_words}"
    return f"rank 0 {files.rank0_words} and sent each rank its part"


def load_adapter(
    model: nn.Module,
    llama: models.Llama,
    adapter: Adapter,
    seed: int,
    rank: Rank,
    shard_layout: ShardLayout,
    on_progress: OnByteProgress,
) -> str:
    """Fill the adapters of a materialized model from peft's files on rank 0, or randomly; return words for the log."""
    parameters = {name: parameter for name, parameter in _named_parameters(model) if is_lora_name(name)}
    shapes = lora_shapes(llama, adapter)
    if not adapter.path:
        _fill(_Filler(_RandomFactors(shapes, seed), rank, shard_layout, parameters), parameters, "local", on_progress)
        return "random"
    layout = read_peft(Path(adapter.path), llama, adapter) if rank.is_rank0 else {}
    dtypes = collectives.broadcast_object({name: info.dtype for name, info in layout.items()}, dict[str, str])
    layout = layout or {name: TensorInfo(Path(), dtype, shapes[name]) for name, dtype in dtypes.items()}
    _fill(_Filler(_MappedWeights(layout), rank, shard_layout, parameters), shapes, "rank0", on_progress)
    return f"from {adapter.path}"


def _fill(filler: "_Filler", names: Iterable[str], mode: str, on_progress: OnByteProgress) -> None:
    """Fill parameters unit by unit; with ``rank0`` all ranks pass the same names, else each rank its own."""
    fill = filler.read_local
    if mode == "rank0":
        fill = filler.send if filler.rank.is_rank0 else filler.receive
    filler.files.reads_alone = mode == "rank0"
    if mode == "local" and filler.rank.axes.dp_replicate > 1:  # a replica reads the same rows
        filler.files.drops_cache = False
    units, layout = _group_by_unit(names), filler.files.layout
    sizes = [sum(layout[name].n_bytes for name in unit) for unit in units]
    for _, done_bytes in zip(fill(units), itertools.accumulate(sizes), strict=True):
        on_progress(done_bytes, sum(sizes))
        filler.files.drop_read()


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield strip_wrappers(name), parameter


def _group_by_unit(names: Iterable[str]) -> list[UnitNames]:
    """Group parameter names, given in the order of use, by unit."""
    units: dict[str, UnitNames] = {}
    for name in names:
        units.setdefault(unit_name(name), []).append(name)
    return list(units.values())


def materialize(
    model: nn.Module, rank: Rank, *, offload: bool = False, on_pin_progress: OnByteProgress | None = None
) -> None:
    """Allocate the meta tensors of a sharded model, tie its head, and compute its rotary buffers; weights stay undefined.

    ``on_pin_progress`` is called with the progress if FSDP will copy the offloaded weights, which are then pinned; None: do not pin.
    FSDP itself would pin each weight in a block of the next power of two.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    device = torch.device("cpu") if offload else rank.device
    blocks: dict[int, Tensor] = {}
    if on_pin_progress:
        meta = {id(p): _local_data(p).nbytes for p in model.parameters() if p.is_meta}
        blocks = dict(zip(meta, allocate_blocks(list(meta.values()), rank.device, on_pin_progress), strict=True))

    def allocate_meta(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        allocated = torch.empty_like(tensor, device=device)
        if isinstance(allocated, DTensor) and (block := blocks.get(id(tensor))) is not None:
            allocated._local_tensor = block.view(allocated.dtype).view(allocated._local_tensor.shape)
        return allocated

    model._apply(allocate_meta)
    tie_head(model)
    restore_buffers(model, model.config, rank.device)


@torch.no_grad()
def check_weights_finite(model: nn.Module, source: Path, adapters: Path | None = None) -> None:
    """Refuse weights that are NaN or infinite on any rank; ``source`` they, and adapters, come from. No copy of them is made.

    Raises:
        UserError: On every rank; it names the first such tensor.
    """
    names, finite = zip(*((name, _is_finite(_local_data(p))) for name, p in model.named_parameters()), strict=True)
    first_bad = [*torch.stack(finite).tolist(), False].index(False)
    [n_left] = collectives.all_reduce_max([len(names) - first_bad])
    if n_left:
        name = strip_wrappers(names[-n_left])
        source = adapters if adapters and is_lora_name(name) else source
        raise UserError(
            f"{source}: {name} has weights that are NaN or infinite; check its source, or use another checkpoint"
        )


class _MappedWeights:
    """The files of a checkpoint, each mapped once: full rows are views of the page cache and cost no memory."""

    rank0_words, local_words = "read the weights", "read its own part"

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.mapped: dict[Path, mmap.mmap] = {}
        self.drops_cache = sum(info.stored_bytes for info in layout.values()) > MIN_CACHED_SHARE * total_bytes()
        self.reads_alone = True  # no other process of this host reads these files
        self.ranges: set[tuple[Path, int, int]] = set()  # of files, that were read since the last call of ``drop_read``

    def read(self, name: str, box: TensorSlice) -> Tensor:
        """Return a slice of a tensor, read-only, in the file's dtype."""
        info = self.layout[name]
        piece = info.find_slice(box)
        assert piece
        if info.file not in self.mapped:
            with info.file.open("rb") as file:
                self.mapped[info.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if not count_elements(box):
            return torch.empty([stop - start for start, stop in box], dtype=DTYPES[info.dtype])
        (start, stop), *columns = relative_slice(piece.box, box)
        _, *widths = [last - first for first, last in piece.box]
        row = math.prod(widths)
        n_elements, begin = (stop - start) * row, piece.offset + start * row * DTYPE_BYTES[info.dtype]
        if self.drops_cache and (self.reads_alone or columns == [(0, width) for width in widths]):
            self.ranges.add((info.file, begin, n_elements * DTYPE_BYTES[info.dtype]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the buffer is read-only
            flat = torch.frombuffer(self.mapped[info.file], dtype=DTYPES[info.dtype], count=n_elements, offset=begin)
        return flat.view(stop - start, *widths)[(slice(None), *(slice(*span) for span in columns))].contiguous()

    def drop_read(self) -> None:
        """Let go of what was read since the last call in the page cache, if the checkpoint would fill much of it."""
        for file, begin, n_bytes in self.ranges:
            drop_cached(self.mapped[file], file, begin, n_bytes)
        self.ranges.clear()


class _ResizedFiles(_MappedWeights):
    """The files of a model whose vocabulary is enlarged: new rows of embedding and head are the mean of the rows in the files."""

    def __init__(self, layout: Layout, vocab: int) -> None:
        self.rows = {name: layout[name].shape[0] for name in (models.EMBEDDING, models.HEAD) if name in layout}
        resized = {
            name: dataclasses.replace(layout[name], shape=(vocab, *layout[name].shape[1:])) for name in self.rows
        }
        super().__init__(layout | resized)
        self.means = dict[str, Tensor]()

    def read(self, name: str, box: TensorSlice) -> Tensor:
        """Return a box of a tensor."""
        (start, stop), *columns = box
        n_old = self.rows.get(name, stop)
        if stop <= n_old:
            return super().read(name, box)
        old = super().read(name, ((min(start, n_old), n_old), *columns))
        new = self._mean(name)[None, *(slice(*span) for span in columns)].expand(stop - max(start, n_old), -1)
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


class _RandomWeights(_MappedWeights):
    """Random weights instead of files; equal for any number of ranks, as each block of elements has its own generator.

    Matrices are N(0, ``initializer_range``), norms are 1 (or what leaves their input as it is) and biases 0, as transformers
    initializes them.
    """

    rank0_words, local_words = "made random weights", "made its own random weights"

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: str, std: float, seed: str = "", norm_start: float = 1.0
    ) -> None:
        super().__init__({name: TensorInfo(Path(), dtype, shape) for name, shape in shapes.items()})
        self.std, self.seed, self.norm_start = std, seed, norm_start
        self.threads = ThreadPoolExecutor(torch.get_num_threads(), "random")

    def constant(self, name: str) -> float | None:
        """Return the value of all elements of a tensor; None: they are random."""
        if len(self.layout[name].shape) > 1:
            return None
        return 0.0 if name.endswith(".bias") else self.norm_start

    def fill_(self, values: Tensor, _: str, generator: torch.Generator) -> Tensor:
        """Fill a block of a tensor with random values."""
        return values.normal_(0, self.std, generator=generator)

    def read(self, name: str, box: TensorSlice) -> Tensor:
        """Return a box of a tensor."""
        (start, stop), *columns = box
        shape, dtype = self.layout[name].shape, DTYPES[self.layout[name].dtype]
        if (constant := self.constant(name)) is not None:
            return torch.full([last - first for first, last in box], constant, dtype=dtype)
        row_size = math.prod(shape[1:])
        begin, end = start * row_size, stop * row_size
        flat = torch.empty(end - begin, dtype=dtype)

        def fill_block(block: int) -> None:
            first = block * BLOCK_ELEMENTS
            last = min(first + BLOCK_ELEMENTS, shape[0] * row_size)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}{name} {block}".encode()))
            values = self.fill_(torch.empty(last - first), name, generator)
            low, high = max(begin, first), min(end, last)
            flat[low - begin : high - begin] = values[low - first : high - first]

        list(self.threads.map(fill_block, range(begin // BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS))))
        return flat.view(stop - start, *shape[1:])[(slice(None), *(slice(*span) for span in columns))]


class _RandomFactors(_RandomWeights):
    """New adapters as peft initializes them: A is uniform up to 1 / sqrt(inputs), B is 0, so that they add nothing at first."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        super().__init__(shapes, "F32", 0.0, f"{seed} ")

    def constant(self, name: str) -> float | None:
        """Return 0 for B."""
        return 0.0 if name.endswith(LORA_B) else None

    def fill_(self, values: Tensor, name: str, generator: torch.Generator) -> Tensor:
        """Fill a block of A as Kaiming-uniform initialization with a slope of sqrt(5) does."""
        bound = self.layout[name].shape[1] ** -0.5
        return values.uniform_(-bound, bound, generator=generator)


@dataclasses.dataclass(frozen=True, slots=True)
class _FileReport:
    """What one rank finds of the checkpoint's files."""

    error: str
    fingerprint: str
    has_all: bool


def _agree_on_mode(directory: Path, mode: str, rank: Rank, shard_layout: ShardLayout) -> tuple[str, _MappedWeights]:
    """Agree with all ranks on the mode and the files' layout: as this rank sees it if it reads them, else as rank 0 does."""
    layout, report = _read_layout(directory, rank, shard_layout)
    mode = _choose_mode(directory, mode, collectives.all_gather_objects(report))
    layout_without_files = {
        name: TensorInfo(Path(), info.dtype, info.shape) for name, info in layout.items() if rank.is_rank0
    }
    rank0_layout = collectives.broadcast_object(layout_without_files, Layout)
    if rank.is_rank0 or mode == "local":
        return mode, _MappedWeights(layout)
    return mode, _MappedWeights(rank0_layout)


def _choose_mode(directory: Path, mode: str, reports: Sequence[_FileReport]) -> str:
    """Choose rank0 or local from the reports of all ranks."""
    if reports[0].error:
        raise UserError(reports[0].error)
    ranks_without_files = [rank for rank, report in enumerate(reports) if report.fingerprint != reports[0].fingerprint]
    if mode == "auto":
        mode = "rank0" if ranks_without_files else "local"
    if mode == "local" and ranks_without_files:
        raise UserError(
            f"--model.load: rank {ranks_without_files[0]} cannot read the same files in {directory}"
            f"{fmt_if(' ({})', reports[ranks_without_files[0]].error)}; copy them there, or use rank0"
        )
    if mode == "rank0" and not reports[0].has_all:
        who = fmt_if(
            "rank {} does not have its part of the same model there, and ", next(iter(ranks_without_files), None)
        )
        raise UserError(
            f"{directory}: {who}rank 0 cannot send the weights because it has only a part of them; push again with "
            "--shards, or push all weights"
        )
    return mode


def _read_layout(directory: Path, rank: Rank, shard_layout: ShardLayout) -> tuple[Layout, _FileReport]:
    """Return the files' layout (of pushed parts the newest that has this rank's) and a report; on failure an empty layout."""
    try:
        for layout in read_layouts(directory, lambda name: is_shard_for(name, rank.index, rank.world_size)):
            parts = {name: info for name, info in layout.items() if info.slices}
            if all(
                info.find_slice(shard_layout.slice_of(name, info.shape, rank.index)) for name, info in parts.items()
            ):
                return layout, _FileReport("", compute_fingerprint(layout), not parts)
    except UserError as error:
        return {}, _FileReport(str(error), "", has_all=True)
    except OSError as error:
        return {}, _FileReport(f"{directory}: {reason_of(error)}", "", has_all=True)
    reason = f"{directory}: has only parts of other ranks; push again with --shards, for {rank.axes}"
    return {}, _FileReport(reason, "", has_all=True)


def _is_finite(shard: Tensor) -> Tensor:
    """Return whether all elements are finite, as a tensor on their device, so that the host does not wait."""
    if not shard.numel():
        return torch.ones((), dtype=torch.bool, device=shard.device)
    # Minimum or maximum is NaN or infinite if any element is; isfinite() on all elements would allocate a mask.
    return torch.stack(torch.aminmax(shard)).isfinite().all()


def _local_data(parameter: nn.Parameter) -> Tensor:
    return parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data


class _Filler:
    """Fills a rank's shards unit by unit; two units are in flight, so that one is sent while another is read."""

    def __init__(
        self, files: _MappedWeights, rank: Rank, shard_layout: ShardLayout, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """``parameters``: the parameters of this rank."""
        self.files = files
        self.rank = rank
        self.shard_layout = shard_layout
        self.parameters = parameters
        self.stage = DeviceStager(rank.device)
        # Two alternating buffers for all sends or receives: a new allocation for each unit would fragment memory.
        self.buffers = [torch.empty(0, dtype=torch.uint8, device=rank.device) for _ in range(2)]

    def read_local(self, units: Sequence[UnitNames]) -> Iterator[None]:
        """Read this rank's slices of each unit from the files."""
        for unit in units:
            self._read_unit(unit)
            yield

    @torch.no_grad()
    def _read_unit(self, unit: UnitNames) -> None:
        for name in unit:
            if name not in self.parameters:
                continue
            tensor, shard = self.files.read(name, self._box(name, self.rank.index)), _local_data(self.parameters[name])
            if shard.is_cuda:
                device_bytes = torch.empty(tensor.nbytes, dtype=torch.uint8, device=shard.device)
                self.stage.copy_to_device(device_bytes, [(0, tensor)])
                tensor = device_bytes.view(tensor.dtype).view(tensor.shape)
            shard.copy_(tensor)

    def receive(self, units: Sequence[UnitNames]) -> Iterator[None]:
        """Receive this rank's piece of each unit from rank 0, and copy it to the shards while the next piece arrives."""
        pending: list[tuple[Spans, Tensor, dist.Work | None]] = []
        for number in range(len(units) + 1):
            if number < len(units):
                spans, n_bytes = self._spans(units[number], self.rank.index)
                piece = self._buffer(number, n_bytes)
                pending.append((spans, piece, dist.irecv(piece, 0) if n_bytes else None))
            if number:
                self._unpack(*pending.pop(0))
                yield

    @torch.no_grad()
    def _unpack(self, spans: Spans, piece: Tensor, work: dist.Work | None) -> None:
        if work:
            work.wait()
        for name, (_, begin, size) in spans.items():
            if size:
                shard = _local_data(self.parameters[name])
                shard.copy_(piece[begin : begin + size].view(DTYPES[self.files.layout[name].dtype]).view(shard.shape))

    def send(self, units: Sequence[UnitNames]) -> Iterator[None]:
        """Send every other rank its piece of each unit, and read rank 0's own slices meanwhile."""
        pending_sends: list[list[dist.Work]] = [[], []]
        for number, unit in enumerate(units):
            for work in pending_sends[number % 2]:  # frees the buffer
                work.wait()
            pieces = self._pack(number, unit)
            pending_sends[number % 2] = [
                work for rank, piece in enumerate(pieces, 1) if piece.numel() and (work := dist.isend(piece, rank))
            ]
            self._read_unit(unit)
            yield
        for work in itertools.chain(*pending_sends):
            work.wait()  # gloo does not keep the buffers of unfinished sends alive; for NCCL, torch does

    def _pack(self, number: int, unit: UnitNames) -> Sequence[Tensor]:
        """Read every other rank's slices of a unit into one buffer; return each rank's piece of it."""
        spans_by_rank = [self._spans(unit, rank) for rank in range(1, self.rank.world_size)]
        buffer = self._buffer(number, sum(n_bytes for _, n_bytes in spans_by_rank))
        begins = itertools.accumulate((n_bytes for _, n_bytes in spans_by_rank), initial=0)
        sources = [
            (begin + offset, self.files.read(name, box))
            for begin, (spans, _) in zip(begins, spans_by_rank, strict=False)
            for name, (box, offset, _) in spans.items()
        ]
        self.stage.copy_to_device(buffer, sources)
        return buffer.split([n_bytes for _, n_bytes in spans_by_rank])

    def _buffer(self, number: int, n_bytes: int) -> Tensor:
        slot = number % 2
        if self.buffers[slot].numel() < n_bytes:
            self.buffers[slot] = torch.empty(n_bytes, dtype=torch.uint8, device=self.rank.device)
        return self.buffers[slot][:n_bytes]

    def _box(self, name: str, rank: int) -> TensorSlice:
        return self.shard_layout.slice_of(name, self.files.layout[name].shape, rank)

    def _spans(self, unit: UnitNames, rank: int) -> tuple[Spans, int]:
        """Return the spans of a rank in its piece of a unit, and the size of the piece in bytes.

        Wider dtypes come first so that each tensor is aligned to its element size; pieces are aligned to 16 bytes.
        """
        begin = 0
        spans = {}
        layout = self.files.layout
        for name in sorted(unit, key=lambda name: -DTYPE_BYTES[layout[name].dtype]):
            box = self._box(name, rank)
            size = layout[name].slice_bytes(box)
            spans[name] = box, begin, size
            begin += size
        return spans, -(-begin // 16) * 16
