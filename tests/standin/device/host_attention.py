"""Attention: torch chooses among CUDA's fused kernels, each of which is the CPU's one here, on tensors that are the same bytes.

Queries, keys and values are BHSD; in ``varlen``, which has packed documents, THD. Not real: the numerics of CUDA's kernels,
dropout's random numbers, and windows of attention, which are refused.
"""

import itertools

import torch

aten = torch.ops.aten


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


def _efficient_backward(
    grad, q, k, v, mask, out, lse, _seed, _offset, dropout_p, _wanted, is_causal=False, *, scale=None
):
    return *_attend_backward(grad, q, k, v, out, lse, mask, dropout_p, is_causal, scale), None


def _documents(ends, causal, left, right):
    """Where the documents of a packed sequence begin and end, and whether attention is causal: ``varlen_attn``."""
    if left not in (None, -1) or right not in (None, -1, 0):
        raise NotImplementedError("the stand-in has no window of attention")
    return list(itertools.pairwise(ends.tolist())), causal or right == 0


def _packed(*tensors):
    return [t.transpose(0, 1).unsqueeze(0) for t in tensors]  # one document: THD -> BHTD


def _varlen(
    q,
    k,
    v,
    ends,
    _k,
    _mq,
    _mk,
    dropout_p,
    causal,
    _debug,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **_,
):
    documents, causal = _documents(ends, causal, window_size_left, window_size_right)
    out, lse = torch.empty_like(q), torch.empty(q.size(1), q.size(0))
    for a, b in documents:
        of_one, lse_of_one = _attend(*_packed(q[a:b], k[a:b], v[a:b]), None, dropout_p, causal, scale)
        out[a:b], lse[:, a:b] = of_one[0].transpose(0, 1), lse_of_one[0]
    return out, lse, _unused(), _unused(), _unused()


def _varlen_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    ends,
    _k,
    _mq,
    _mk,
    dropout_p,
    causal,
    _r,
    _u,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    documents, causal = _documents(ends, causal, window_size_left, window_size_right)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for a, b in documents:
        parts = _packed(*(t[a:b] for t in (grad, q, k, v, out)))
        found = _attend_backward(*parts, lse[None, :, a:b], None, dropout_p, causal, scale)
        for into, of in zip(grads, found, strict=False):
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
