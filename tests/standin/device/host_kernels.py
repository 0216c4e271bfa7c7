"""CUDA tensors of the stand-in live in host memory: each kernel runs on the CPU, on tensors that are the same bytes.

Every operator of ``aten`` that has a kernel for CUDA gets one here, below autograd, DTensor and modes, in all threads. Left to
torch's own CUDA code are allocation, views, and copies that are one memcpy: those are calls of the (stand-in) runtime.
"""

import ctypes
import itertools
import math
import os
import warnings

import torch

LIBRARY = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia/cu13/lib/libcudart.so.13")
CHECK = os.environ.get("STANDIN_CHECK", "0") not in ("", "0")
KERNEL = 10  # the counter, in cudart.cpp
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
        base, _, overload = name.partition(".")
        if namespace != "aten" or base in OWN or base in ATTENTION:
            continue
        op = getattr(getattr(aten, base), overload or "default")
        if not op.is_view:
            _library.impl(name, Kernel(op), "CUDA", allow_override=True)
    _library.impl("copy_", copy_, "CUDA", allow_override=True)
    for base, function in ATTENTION.items():
        _library.impl(base, Kernel(getattr(aten, base).default, function), "CUDA", allow_override=True)


class Kernel:
    """Runs an operator's CPU kernel in place of its CUDA kernel."""

    def __init__(self, op, function=None):
        self.op, self.function, self.name = op, function or op, str(op).encode()
        arguments = op._schema.arguments
        self.written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        self.written_names = [a.name for a, written in zip(arguments, self.written) if written]
        returns = op._schema.returns
        self.gives_back = bool(returns) and returns[0].alias_info is not None  # what it was given
        self.one = len(returns) == 1

    def __call__(self, *args, **kwargs):
        device = stream = None
        for t in _tensors((args, kwargs)):
            if t.is_cuda:
                device = t.device
                break
        asked = kwargs.get("device")
        if asked is not None:
            device = device or torch.device(asked)
            kwargs = {**kwargs, "device": "cpu", "pin_memory": False}
        if CHECK and device is not None:
            stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)
            self.begin(stream, KERNEL, 0)
            for value, written in zip(args, self.written):
                self._used(stream, value, written)
            for key, value in kwargs.items():
                self._used(stream, value, key in self.written_names)
        host_args, host_kwargs = [on_host(a) for a in args], {key: on_host(value) for key, value in kwargs.items()}
        found = self.function(*host_args, **host_kwargs)
        given = [(a, h) for a, h, written in zip(args, host_args, self.written) if written]
        given += [(kwargs[name], host_kwargs[name]) for name in self.written_names if name in kwargs]
        for into, made in given:
            if isinstance(into, torch.Tensor) and into.shape != made.shape:  # out= of another size
                alias(into.resize_(made.shape)).copy_(made)
        if self.gives_back:
            return given[0][0] if self.one else tuple(into for into, _ in given)
        found = on_device(found, device)
        if stream is not None:
            self._used(stream, found, True)
        return found

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
        _storages[key] = torch.frombuffer((ctypes.c_char * key[1]).from_address(key[0]), dtype=torch.uint8).untyped_storage()
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
    dims = sorted((stride, n) for n, stride in zip(t.size(), t.stride()) if n > 1 and stride)
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


# --- attention: torch chooses among CUDA's fused kernels, each of which is the CPU's one here
def _attend(q, k, v, mask, dropout_p, is_causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)


def _attend_backward(grad, q, k, v, out, lse, mask, dropout_p, is_causal, scale):
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, out, lse, dropout_p, is_causal, attn_mask=mask, scale=scale)


def _unused():
    return torch.zeros((), dtype=torch.int64)


def _flash(q, k, v, dropout_p=0.0, is_causal=False, _debug=False, *, scale=None):
    found = _attend(q, k, v, None, dropout_p, is_causal, scale)
    return *found, _unused(), _unused(), q.size(2), k.size(2), _unused(), _unused(), _unused()


def _flash_backward(grad, q, k, v, out, lse, _q, _k, _mq, _mk, dropout_p, is_causal, _seed, _offset, *, scale=None):
    return _attend_backward(grad, q, k, v, out, lse, None, dropout_p, is_causal, scale)


def _cudnn(q, k, v, mask, _lse, dropout_p=0.0, is_causal=False, _debug=False, *, scale=None):
    found = _attend(q, k, v, mask, dropout_p, is_causal, scale)
    return *found, _unused(), _unused(), q.size(2), k.size(2), _unused(), _unused(), _unused()


def _cudnn_backward(
    grad, q, k, v, out, lse, _seed, _offset, mask, _q, _k, _mq, _mk, dropout_p, is_causal, *, scale=None
):
    return _attend_backward(grad, q, k, v, out, lse, mask, dropout_p, is_causal, scale)


def _efficient(q, k, v, mask, _lse, dropout_p=0.0, is_causal=False, *, scale=None):
    return *_attend(q, k, v, mask, dropout_p, is_causal, scale), _unused(), _unused()


def _efficient_backward(grad, q, k, v, mask, out, lse, _seed, _offset, dropout_p, _wanted, is_causal=False, *, scale=None):
    return *_attend_backward(grad, q, k, v, out, lse, mask, dropout_p, is_causal, scale), None


def _documents(ends, causal, left, right):
    """Where the documents of a packed sequence begin and end, and whether attention is causal: ``varlen_attn``."""
    if left not in (None, -1) or right not in (None, -1, 0):
        raise NotImplementedError("the stand-in has no window of attention")
    return list(itertools.pairwise(ends.tolist())), causal or right == 0


def _packed(*tensors):
    return [t.transpose(0, 1).unsqueeze(0) for t in tensors]  # one document: THD -> BHTD


def _varlen(
    q, k, v, ends, _k, _mq, _mk, dropout_p, causal, _debug, *, scale=None, window_size_left=None, window_size_right=None, **_
):
    documents, causal = _documents(ends, causal, window_size_left, window_size_right)
    out, lse = torch.empty_like(q), torch.empty(q.size(1), q.size(0))
    for a, b in documents:
        of_one, lse_of_one = _attend(*_packed(q[a:b], k[a:b], v[a:b]), None, dropout_p, causal, scale)
        out[a:b], lse[:, a:b] = of_one[0].transpose(0, 1), lse_of_one[0]
    return out, lse, _unused(), _unused(), _unused()


def _varlen_backward(
    grad, q, k, v, out, lse, ends, _k, _mq, _mk, dropout_p, causal, _r, _u, *, scale=None, window_size_left=None, window_size_right=None
):
    documents, causal = _documents(ends, causal, window_size_left, window_size_right)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for a, b in documents:
        parts = _packed(*(t[a:b] for t in (grad, q, k, v, out)))
        for into, of in zip(grads, _attend_backward(*parts, lse[None, :, a:b], None, dropout_p, causal, scale)):
            into[a:b] = of[0].transpose(0, 1)
    return grads


ATTENTION = {
    "_flash_attention_forward": _varlen,
    "_flash_attention_backward": _varlen_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
