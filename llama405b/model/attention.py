"""Choose the attention implementation, give it the ends of documents, and check it before step 1.

For sdpa and eager, transformers builds a block mask where positions restart. For flash-attn it would do so only for one sequence at a
time, after inspecting positions in every layer (which synchronizes with the device), so the kernels get the ends of documents instead.

Shape suffixes: B sequences, H heads, S positions, T positions attended to, D size of a head, V vocabulary.
"""

import contextlib
import copy
import importlib.metadata
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from llama405b.contract.errors import UserError
from llama405b.data.batch import Batch
from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank
from llama405b.model.llama import compute_dtype, head_dim, set_layers
from llama405b.settings.schema import Config

VARLEN = "varlen"
SDPA = "sdpa"


class Kernel(NamedTuple):
    """An implementation for CUDA and BF16 that takes the ends of documents instead of a mask."""

    package: str  # that provides it; "": torch
    capabilities: range  # the major numbers of CUDA devices


KERNELS = {  # the fastest first
    "flash_attention_4": Kernel("flash-attn-4", range(9, 13)),
    "flash_attention_3": Kernel("flash-attn-3", range(8, 10)),
    "flash_attention_2": Kernel("flash-attn", range(8, 13)),
    VARLEN: Kernel("", range(8, 13)),
}
HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch >= 2.12


def attention_candidates(choice: str) -> tuple[str, ...]:
    """Return the implementations to try, in order; ``choice``: an implementation, or auto."""
    return (*KERNELS, SDPA) if choice == "auto" else (choice,)


def attention_unsupported_reason(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return why an implementation cannot be used here, or ""."""
    if name not in KERNELS:
        return ""
    package, capabilities = KERNELS[name]
    if device.type != "cuda":
        return "flash-attn and varlen need CUDA"
    if dtype is not torch.bfloat16:
        return "flash-attn and varlen compute in BF16 only"
    if package and not _is_installed(package):
        return f"{package} is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major in capabilities else f"{package or name} is not for GPUs of compute capability {major}.{minor}"


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def attend_varlen(
    _module: nn.Module,
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    _mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention with torch's varlen kernel, through transformers' interface; return (B, S, H, D).

    ``cu_seq_lens_q``: where documents end in the flattened batch, after a 0 (int32); ``max_length_q``: the longest.
    """
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query_BHSD, key_BHSD, value_BHSD))
    gqa: dict[str, bool] = {"enable_gqa": True} if HAS_GQA else {}
    if not HAS_GQA:
        group_size = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(group_size, 1), value.repeat_interleave(group_size, 1)
    ends, max_length = cu_seq_lens_q, max_length_q
    out = varlen_attn(query, key, value, ends, ends, max_length, max_length, scale=scaling, window_size=(-1, 0), **gqa)
    return out.unflatten(0, (len(query_BHSD), -1)), None


AttentionInterface.register(VARLEN, attend_varlen)
AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)  # it takes no mask


def model_inputs(
    batch: Batch, attention: str, *, is_split: bool = False, is_compiled: bool = False, isolated: bool = False
) -> dict[str, Any]:
    """Return the model's forward arguments for a batch; ``attention``: the implementation.

    ``is_split``: a rank holds a part of the sequence, from which transformers would derive wrong positions and a wrong mask.
    ``is_compiled``: decoder layers are; they get the same arguments for every batch, as other ones would need another graph.
    ``isolated``: documents that share a sequence are kept apart, of which a batch may have none.
    """
    inputs: dict[str, Any] = {"input_ids": batch.ids_BS}
    positions_BS = batch.positions_BS
    if positions_BS is None and (is_split or is_compiled or attention in KERNELS):
        positions_BS = torch.arange(batch.ids_BS.shape[1], device=batch.ids_BS.device).expand_as(batch.ids_BS)
    if positions_BS is not None:
        inputs["position_ids"] = positions_BS
    needs_mask = batch.positions_BS is not None or attention == "eager" or (is_compiled and isolated)
    if attention in KERNELS:
        ends, max_length = batch.document_ends.ends, batch.document_ends.max_length
        if is_compiled:
            mark_dynamic(ends, 0)
            max_length = batch.ids_BS.shape[1]  # a constant; no document is longer
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max_length, "max_length_k": max_length}
    elif (is_split or is_compiled) and positions_BS is not None and needs_mask:
        mask_B1ST = document_mask(positions_BS)
        inputs["attention_mask"] = mask_B1ST if attention == "sdpa" else _additive_mask(mask_B1ST)
    return inputs


def document_mask(positions_BS: Tensor) -> Tensor:
    """Return the causal mask within documents, (B, 1, S, T); a document begins at each position 0."""
    document_BS = (positions_BS == 0).cumsum(-1)
    same_BST = document_BS[:, :, None] == document_BS[:, None, :]
    return same_BST.tril()[:, None]


def _additive_mask(mask_B1ST: Tensor) -> Tensor:
    """Return the additive form of a mask, for eager attention."""
    return torch.zeros(mask_B1ST.shape, device=mask_B1ST.device).masked_fill(
        ~mask_B1ST, torch.finfo(torch.bfloat16).min
    )


def mask_bytes(attention: str, n_sequences: int, length: int) -> int:
    """Return the bytes of the document mask, (B, 1, S, S) at a byte each; 0 if the implementation needs none."""
    return 0 if attention in KERNELS else n_sequences * length * length


LARGE_MASK_GIB = 1.0
CHECK_LENGTHS = (48, 16, 64)  # of the documents in the check
CHECK_VOCAB = 256
KEY_HEADS, MAX_SHARING = 2, 8  # key heads, and query heads per key head
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # difference of logits, whose standard deviation is about 1
TINY_CONFIG = {
    "vocab_size": CHECK_VOCAB,
    "intermediate_size": 64,
    "tie_word_embeddings": False,
} | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


class AttentionChoice(NamedTuple):
    """The chosen attention implementation and log lines about it."""

    name: str
    reason: str
    log_lines: list[str]


def choose_attention(config: Config, hf_config: PreTrainedConfig, rank: Rank) -> AttentionChoice:
    """Choose the first implementation that runs and matches sdpa on every rank.

    Raises:
        UserError: On every rank, if the configured one is unsupported or differs from sdpa on any rank.
    """
    dtype = compute_dtype(config.parallel.numerics)
    isolated = config.data.packing == "isolated"

    def try_attention(name: str) -> tuple[float, str]:
        if reason := attention_unsupported_reason(name, rank.device, dtype):
            return 0.0, reason
        try:
            return check_attention(hf_config, name, rank.device, dtype, isolated=isolated), ""
        except AttentionCheckError as error:
            return 0.0, str(error)

    *preferred, fallback = attention_candidates(config.model.attention)
    reasons = dict[str, None]()
    for name in preferred:
        difference, reason = try_attention(name)
        if not (failures := list(filter(None, collectives.all_gather_objects(reason)))):
            return AttentionChoice(
                name, "; ".join([*reasons, "the first that runs here"]), _check_lines(config, name, difference)
            )
        reasons[failures[0]] = None
    with collectives.raise_on_all_ranks():
        difference, reason = try_attention(fallback)
        if reason:
            raise UserError(f"--model.attention: {reason}; use sdpa")
    return AttentionChoice(fallback, "; ".join(reasons) or "as configured", _check_lines(config, fallback, difference))


def _check_lines(config: Config, name: str, difference: float) -> list[str]:
    isolated = config.data.packing == "isolated"
    finding = "packed documents are kept apart" if isolated else "it matches sdpa"
    lines = [f"attention verified on this device: {finding} (logits within {difference:.1g})"]
    mask_gib = mask_bytes(name, config.training.micro_batch_size, config.data.seq_len) / 2**30
    if isolated and mask_gib >= LARGE_MASK_GIB:
        lines.append(
            f"where documents share a sequence, {name} needs a mask of {mask_gib:.1f} GiB; flash-attn and varlen need none"
        )
    return lines


class AttentionCheckError(Exception):
    """Attention fails, or its results differ from sdpa's."""


def check_attention(
    config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype, *, isolated: bool
) -> float:
    """Compare packed documents in one small layer with the same documents computed alone by sdpa.

    The layer has heads of the model's size. ``isolated``: documents that share a sequence do not attend to each other; otherwise the
    reference is one text.

    Returns the largest difference of the logits.
    """
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(0, CHECK_VOCAB, (1, sum(CHECK_LENGTHS)), generator=generator).to(device)
    positions_BS = torch.cat([torch.arange(length) for length in CHECK_LENGTHS])[None].to(device)
    # fork_rng: the check must not advance the run's random numbers.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_tiny_config(config)).to(device, dtype).eval()
        # Gives logits a standard deviation of about 1, which the tolerances assume.
        torch.nn.init.normal_(model.lm_head.weight, std=model.config.hidden_size**-0.5)
        parts = ids_BS.split(CHECK_LENGTHS, 1) if isolated else [ids_BS]
        expected_BSV, expected_gradient = _logits_and_gradients(model, [Batch(part, part) for part in parts])
        if not (expected_BSV.isfinite().all() and expected_gradient.isfinite().all()):
            raise UserError(
                "config.json: one small layer of this model computes NaN with any attention; check rope_scaling and "
                "rms_norm_eps there, or download it again"
            )
        with _kernel_errors(attention, device):
            model.set_attn_implementation(attention)
            packed_BSV, gradient = _logits_and_gradients(
                model, [Batch(ids_BS, ids_BS, positions_BS if isolated else None)]
            )
    difference = float((packed_BSV - expected_BSV).abs().max())
    gradient_error = float((gradient - expected_gradient).norm() / expected_gradient.norm())
    if difference <= TOLERANCE[dtype] and gradient_error <= TOLERANCE[dtype]:
        return difference
    fault = "packed documents attend to each other" if isolated else "its results differ from sdpa's"
    details = f"logits differ by {difference:.2g}, gradients by {100 * gradient_error:.2g}%"
    raise AttentionCheckError(f"with {attention} on {device.type} {fault} ({details})")


def _tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a one-layer model with heads of the same size."""
    tiny, n_shared = copy.deepcopy(config), min(MAX_SHARING, config.num_attention_heads // config.num_key_value_heads)
    heads = {"num_key_value_heads": KEY_HEADS, "num_attention_heads": KEY_HEADS * n_shared}
    tiny.update(TINY_CONFIG | heads | {"hidden_size": head_dim(config) * KEY_HEADS * n_shared})
    set_layers(tiny, 1)._attn_implementation = "sdpa"
    return tiny


def _logits_and_gradients(model: PreTrainedModel, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Return the concatenated logits of batches, and the flat gradient of attention's weights."""
    logits_BSV: Tensor = torch.cat([
        model(**model_inputs(batch, model.config._attn_implementation), use_cache=False).logits.float() for batch in batches
    ], 1)  # fmt: skip
    weights = list(model.model.layers[0].self_attn.parameters())
    gradients = torch.autograd.grad(logits_BSV.square().sum(), weights)
    return logits_BSV.detach(), torch.cat([gradient.flatten().float() for gradient in gradients])


@contextlib.contextmanager
def _kernel_errors(attention: str, device: torch.device) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  (kernels raise what they like)
        reason = " ".join(str(error).split())[:200]
        raise AttentionCheckError(f"{attention} fails on {device.type} ({reason})") from None
