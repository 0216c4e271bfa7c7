"""CUDA tensors of the stand-in live in host memory: each kernel runs on the CPU, on tensors that are the same bytes.

Every operator of ``aten`` that has a kernel for CUDA gets one here, below autograd, DTensor and modes, in all threads. Real, that
is left to torch's own CUDA code, are allocation, views, and copies that are one memcpy: those are calls of the stand-in's runtime.
Not real are the kernels' own numerics and speed, and random numbers: they are the CPU's.
"""

import ctypes
import itertools
import math
import os
import warnings
from pathlib import Path

import torch

from host_attention import ATTENTION

LIBRARY = str(Path(torch.__file__).parents[1] / "nvidia/cu13/lib/libcudart.so.13")
CHECK = os.environ.get("STANDIN_CHECK", "0") not in ("", "0")
KERNEL = 10  # the counter, in kinds.h
OWN = {  # torch's own CUDA code does these
    "empty", "empty_strided", "resize_", "resize_as_", "set_", "record_stream", "is_pinned", "_pin_memory", "_reshape_alias",
    "_local_scalar_dense", "copy_",
}  # fmt: skip
MOST_PIECES = 4096  # of a strided tensor, that are compared with what other streams use
_library = torch.library.Library("aten", "IMPL")
_storages: dict = {}
_generators: dict = {}
aten = torch.ops.aten


def install():
    """Replace torch's CUDA kernels."""
    runtime = ctypes.CDLL(LIBRARY)
    Kernel.begin, Kernel.use = runtime.standin_begin, runtime.standin_use
    runtime.standin_begin.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    runtime.standin_use.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds graphs on the host, which nothing stands in for
    warnings.filterwarnings("ignore", "Warning only once for all operators")  # that we do so
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, name = full_name.partition("::")
        if namespace == "aten":
            _replace(name)
    _library.impl("copy_", copy_, "CUDA", allow_override=True)
    for base, function in ATTENTION.items():
        _library.impl(base, Kernel(getattr(aten, base).default, function), "CUDA", allow_override=True)


def _replace(name):
    base, _, overload = name.partition(".")
    if base in OWN or base in ATTENTION:
        return
    op = getattr(getattr(aten, base), overload or "default")
    if not op.is_view:
        _library.impl(name, Kernel(op), "CUDA", allow_override=True)


class Kernel:
    """Runs an operator's CPU kernel in place of its CUDA kernel."""

    def __init__(self, op, function=None):
        self.op, self.function, self.name = op, function or op, str(op).encode()
        arguments = op._schema.arguments
        self.written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        self.written_names = [a.name for a, written in zip(arguments, self.written, strict=True) if written]
        self.of_tensors = [str(a.type) == "Tensor" for a in arguments]  # where torch hands over numbers, too
        returns = op._schema.returns
        self.gives_back = bool(returns) and returns[0].alias_info is not None  # what it was given
        self.one = len(returns) == 1

    def __call__(self, *args, **kwargs):
        device = next((t.device for t in _tensors((args, kwargs)) if t.is_cuda), None)
        if kwargs.get("device") is not None:
            device = device or torch.device(kwargs["device"])
            kwargs = {**kwargs, "device": "cpu", "pin_memory": False}
        stream = self._begin(device, args, kwargs) if CHECK and device is not None else None
        host_args, host_kwargs = [on_host(a) for a in args], {key: on_host(value) for key, value in kwargs.items()}
        for place, (value, is_tensor) in enumerate(zip(host_args, self.of_tensors, strict=False)):
            if is_tensor and type(value) is int:  # bitwise operators take no number; others would take one of any type
                host_args[place] = torch.tensor(value)
        made = self.function(*host_args, **host_kwargs)
        given = [pair for *pair, written in zip(args, host_args, self.written, strict=False) if written]
        given += [(kwargs[name], host_kwargs[name]) for name in self.written_names if name in kwargs]
        for into, of in given:
            if isinstance(into, torch.Tensor) and into.shape != of.shape:  # out= of another size
                alias(into.resize_(of.shape)).copy_(of)
        if self.gives_back:
            return given[0][0] if self.one else tuple(into for into, _ in given)
        made = on_device(made, device)
        if stream is not None:
            self._used(stream, made, True)
        return made

    def _begin(self, device, args, kwargs):
        """Tell the runtime what is about to be read and written, on which stream; returns that."""
        stream = torch._C._cuda_getCurrentRawStream(
            torch.cuda.current_device() if device.index is None else device.index
        )
        self.begin(stream, KERNEL, 0)
        for value, written in zip(args, self.written, strict=False):
            self._used(stream, value, written)
        for key, value in kwargs.items():
            self._used(stream, value, key in self.written_names)
        return stream

    def _used(self, stream, value, written):
        for t in _tensors(value):
            if t.is_cuda and t.numel():
                for begin, size in pieces(t):
                    self.use(stream, begin, size, written, self.name)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def on_host(value):
    """Return CPU tensors of the same bytes for all CUDA tensors in a value."""
    if isinstance(value, torch.Tensor):
        return alias(value) if value.is_cuda else value
    if isinstance(value, (tuple, list)):
        return type(value)(map(on_host, value))
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        if value not in _generators:
            _generators[value] = torch.Generator().manual_seed(value.initial_seed())
        return _generators[value]
    return value


def alias(t):
    """Return a CPU tensor of the same bytes."""
    storage = t.untyped_storage()
    key = storage.data_ptr(), storage.nbytes()
    if not key[1]:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)
    if key not in _storages:
        if len(_storages) > 10_000:
            _storages.clear()
        _storages[key] = torch.frombuffer(
            (ctypes.c_char * key[1]).from_address(key[0]), dtype=torch.uint8
        ).untyped_storage()
    return torch.empty(0, dtype=t.dtype).set_(_storages[key], t.storage_offset(), t.size(), t.stride())


def on_device(value, device):
    """Copy what a CPU kernel made to new CUDA tensors."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda or device is None:
            return value
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        if value.numel():
            alias(made).copy_(value)
        return made
    if isinstance(value, (tuple, list)):
        return type(value)(on_device(each, device) for each in value)
    return value


def pieces(t):
    """Return the address and size of the contiguous pieces of a tensor; nothing of one that is in too many."""
    size = t.element_size()
    if t.is_contiguous():
        return [(t.data_ptr(), t.numel() * size)]
    dims = sorted((stride, n) for n, stride in zip(t.size(), t.stride(), strict=True) if n > 1 and stride)
    run = 1
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    if math.prod(n for _, n in dims) > MOST_PIECES:
        return []
    starts = itertools.product(*[range(0, stride * n, stride) for stride, n in dims])
    return [(t.data_ptr() + sum(start) * size, run * size) for start in starts]


def copy_(to, of, non_blocking=False):
    """Torch's own code does what crosses the bus, in temporaries and memcpys of its choice; between CUDA tensors a plain memcpy."""
    plain = to.dtype == of.dtype and to.shape == of.shape and to.is_contiguous() and of.is_contiguous()
    if to.is_cuda != of.is_cuda or (plain and to.is_cuda):
        return aten.copy_.default.redispatch(_torchs_own, to, of, non_blocking)
    return _strided_copy(to, of, non_blocking)


_torchs_own = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # one function for all devices
_strided_copy = Kernel(aten.copy_.default)
