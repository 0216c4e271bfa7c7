"""The dense decoders that can be trained, and what their checkpoint directories hold. Knows nothing of torch.

All families have ``model.layers`` of attention (``self_attn``: q, k, v and o projections) and a gated MLP, with the names of a Llama's.
What else a family has is one ``Family``: nothing outside this module and ``model/`` names one.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from llama405b.contract.errors import UserError, and_more
from llama405b.formats.corpus import OWNER_NAME, check_template
from llama405b.spec.tensors import TensorInfo, read_hf_json, read_tensors


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A family of models, by what its layers have."""

    prefix: str  # of transformers' classes, such as LlamaForCausalLM
    # The matrices of each block, in the order of its modules; ``FUSED`` has those that hold several projections.
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    biases: Literal["asked", "qkv", "none"] = "asked"  # of attention; asked: of all projections if config.json says so
    query_norms: Literal["", "head", "all"] = ""  # of queries and keys: of each head, or of all heads together
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    ends_with_norm: bool = False  # a layer: norms follow attention and the MLP
    norm_start: float = 1.0  # the weight of a norm that is not trained yet
    multiplies_fp32: bool = False  # a norm's weight, before it rounds to BF16
    # Of attention: if config.json has it, or only if use_sliding_window is true.
    window: Literal["", "asked", "flag"] = ""
    activation_key: str = "hidden_act"  # in config.json
    # What transformers takes where config.json lacks a key, but for what all have.
    defaults: tuple[tuple[str, Any], ...] = ()
    # Whether the types of layers choose their rotary embedding; else they only say where attention has a window.
    has_layer_types: bool = False
    buffers: tuple[str, ...] = ()  # that no file holds, beside rotary frequencies; ``model.llama`` knows their values

    @property
    def architecture(self) -> str:
        """Transformers' class of the whole model."""
        return f"{self.prefix}ForCausalLM"

    def matrices(self, projections: Collection[str]) -> tuple[str, ...]:
        """Return the names of the matrices that hold any of these projections."""
        return tuple(
            name for name in (*self.attention, *self.mlp) if not {*split_projections([name])}.isdisjoint(projections)
        )


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # one below the other


def split_projections(matrices: Iterable[str]) -> tuple[str, ...]:
    """Return the projections that matrices hold."""
    return tuple(projection for name in matrices for projection in FUSED.get(name, (name,)))


FAMILIES = {  # by model_type
    "llama": Family("Llama"),
    "mistral": Family("Mistral", biases="none", window="asked", defaults=(("sliding_window", 4096),)),
    "qwen2": Family("Qwen2", biases="qkv", window="flag"),
    "qwen3": Family("Qwen3", query_norms="head", window="flag"),
    "olmo2": Family(
        "Olmo2",
        query_norms="all",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        ends_with_norm=True,
    ),
    "gemma3_text": Family(
        "Gemma3",
        query_norms="head",
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        ends_with_norm=True,
        norm_start=0.0,
        multiplies_fp32=True,
        window="asked",
        activation_key="hidden_activation",
        defaults=(
            ("head_dim", 256),
            ("max_position_embeddings", 131_072),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("sliding_window", 4096),
            ("tie_word_embeddings", True),
            ("vocab_size", 262_208),
        ),
        has_layer_types=True,
        buffers=("model.embed_tokens.embed_scale",),
    ),
    "phi3": Family(
        "Phi3",
        attention=("o_proj", "qkv_proj"),
        mlp=("gate_up_proj", "down_proj"),
        biases="none",
        window="asked",
    ),
}
LLAMA = FAMILIES["llama"]


CHAT_TEMPLATE = "chat_template.jinja"  # which transformers prefers to the one in tokenizer_config.json
GENERATION_CONFIG, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
SMALL_FILES = (  # what a rank needs if it does not have the directory
    "config.json",
    GENERATION_CONFIG,
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
)
NOTICE_NAME = re.compile(
    r"(LICEN[CS]E|COPYING|NOTICE|USE_POLICY)[\w.-]*", re.IGNORECASE
)  # what a licence wants passed on
MAX_NOTICE_BYTES = 1 << 20
DOWNLOAD_DIR = Path("models")  # in the working directory: where `llama405b download` writes
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED_TENSOR = "rotary_emb.inv_freq"  # old checkpoints hold it; transformers computes it, and so does the trainer
ROPE_REQUIRED_KEYS = {  # transformers' types of rotary embedding, and the numbers that each must be given
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
POSITIVE_KEYS = ("rope_theta", "original_max_position_embeddings", "attention_factor")  # where they are given
UNSUPPORTED_KEYS = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
CONVERT_TOKENIZER_COMMAND = (
    "python -c \"from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('{0}').save_pretrained('{0}')\""
)
VOCABULARY_MULTIPLE = 128  # of which an embedding that grows has a multiple, so that kernels and ranks divide it
MAX_NAMED_TOKENS = 4  # tokens in a message
SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
UNSUPPORTED_WEIGHTS = (  # what names of tensors tell, and what to do
    (
        r"\.(weight_scale(_inv)?|input_scale|weight_packed)$",
        "quantized weights (such as FP8)",
        "download the model in BF16",
    ),
    (r"\.(qweight|qzeros|g_idx)$", "quantized weights (GPTQ or AWQ)", "download the model in BF16"),
    (r"\.(absmax|quant_map|quant_state\.\S+)$", "quantized weights (bitsandbytes)", "download the model in BF16"),
    (
        r"\.base_layer\.|\.lora_[AB]\.",
        "an adapter that is not merged",
        "merge it (peft's merge_and_unload), or name the base model here and the adapter in --adapter.path",
    ),
)
COMPARE_CHUNK_BYTES = 16 << 20  # at a time
MAX_LAYERS = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Llama:
    """The shape of a Llama, or of a model of another family like it, from its config.json."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    max_positions: int
    initializer_range: float = 0.02
    family: Family = LLAMA
    window: int = 0  # tokens that attention sees, in some or all layers; 0: all before

    @property
    def is_fusible(self) -> bool:
        """Whether fused kernels can compute both its norms and its MLP."""
        return (self.family.norm_start, self.family.mlp, self.mlp_bias) == (LLAMA.norm_start, LLAMA.mlp, False)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's name in a checkpoint, and its shape (out features first)."""
        hidden = self.hidden
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        family, inner = self.family, self.intermediate
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": inner, "up_proj": inner}
        columns = {"o_proj": q, "down_proj": inner}
        all_projections = family.attention if self.attention_bias else ()
        biased = {*{"asked": all_projections, "qkv": ("q_proj", "k_proj", "v_proj"), "none": ()}[family.biases]}
        biased |= {*family.mlp} if self.mlp_bias else set()
        norm_sizes = {"head": (self.head_dim, self.head_dim), "all": (q, kv)}.get(self.family.query_norms, ())
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, hidden)}
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            for block, matrices in (("self_attn", family.attention), ("mlp", family.mlp)):
                for name in matrices:
                    outputs = sum(rows.get(projection, hidden) for projection in split_projections([name]))
                    shape = outputs, columns.get(name, hidden)
                    shapes[f"{layer}{block}.{name}.weight"] = shape
                    if name in biased:
                        shapes[f"{layer}{block}.{name}.bias"] = shape[:1]
            for name, size in zip(("q_norm", "k_norm"), norm_sizes, strict=False):
                shapes[f"{layer}self_attn.{name}.weight"] = (size,)
            for name in self.family.norms:
                shapes[f"{layer}{name}.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes[HEAD] = (self.vocab, hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return _parameters(self)

    def flops_per_token(self, seq_len: int) -> int:
        """Count the model FLOPs of training on one token: six per weight of a matrix product, and causal attention.

        Counted as in PaLM, appendix B (arXiv:2204.02311), but with only the half of the attention matrix that a causal
        mask leaves; recomputed activations do not count.
        """
        matrices = sum(math.prod(shape) for name, shape in self.tensors().items() if name.endswith("_proj.weight"))
        attention = self.layers * self.heads * self.head_dim * seq_len
        return 6 * (matrices + self.vocab * self.hidden + attention)


@functools.lru_cache(64)
def _parameters(llama: Llama) -> int:
    return sum(math.prod(shape) for shape in llama.tensors().values())


def read_llama(directory: Path, layers: int = 0) -> Llama:
    """Read a model's shape from its ``config.json``; ``layers``: keep only that many (0: all).

    Raises:
        UserError: The directory does not exist, or does not hold a Llama.
    """
    check_directory(directory)
    config = read_hf_json(directory / "config.json")
    llama = parse_llama(config, str(directory / "config.json"))
    if layers > llama.layers:
        raise UserError(f"--model.layers: {layers}, but {directory} has {llama.layers}; lower it, or omit it")
    return dataclasses.replace(llama, layers=layers or llama.layers)


def check_directory(directory: Path) -> None:
    """Refuse a model whose directory does not exist, and say how to get it."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; {download_hint(directory)}, or point --model.path at it")


def is_hub_name(directory: Path) -> bool:
    """Check whether a path looks like a Hub model name (OWNER/NAME), not like a downloaded model's."""
    return bool(OWNER_NAME.fullmatch(str(directory))) and directory.parent != DOWNLOAD_DIR


def download_hint(directory: Path) -> str:
    """Return how to get a model, as a clause of a message."""
    if is_hub_name(directory):
        return f"run `llama405b download {directory}`, which writes {DOWNLOAD_DIR / directory.name}"
    if directory.parent == DOWNLOAD_DIR:
        return f"run `llama405b download OWNER/{directory.name}`, which writes it"
    return "download the model into it"


def parse_llama(config: Mapping[str, Any], source: str) -> Llama:
    """Read the model's shape from a parsed ``config.json``.

    Raises:
        UserError: It does not describe a model of ``FAMILIES`` that can be trained.
    """
    family = _find_family(config, source)
    config = dict(family.defaults) | dict(config)
    if quantization := config.get("quantization_config"):
        shown = textwrap.shorten(str(quantization), 60, placeholder=" …")
        raise UserError(
            f"{source}: quantization_config is {shown}; only unquantized weights can be trained; download those"
        )
    _check_rope(config, source)
    if unsupported := [key for key in UNSUPPORTED_KEYS if config.get(key)]:
        raise UserError(
            f"{source}: {unsupported[0]} is {config[unsupported[0]]}, which is not supported; use another model"
        )

    def number(key: str, default: int | None = None, limit: int = 1 << 31) -> int:
        value = config.get(key)
        if value is None:
            value = default
        # bool is a subclass of int, so JSON true would pass as 1.
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < limit:
            raise UserError(f"{source}: {key} is {value!r}, not a positive whole number; download config.json again")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    kv_heads = number("num_key_value_heads", heads)
    if hidden % heads or heads % kv_heads:
        raise UserError(
            f"{source}: hidden_size {hidden}, {heads} attention heads and {kv_heads} key-value heads do not divide evenly; "
            "download config.json again"
        )
    return Llama(
        layers=number("num_hidden_layers", limit=MAX_LAYERS),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=number("head_dim", hidden // heads),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=family is LLAMA and bool(config.get("mlp_bias", False)),
        max_positions=number("max_position_embeddings", 2048),
        initializer_range=_find_initializer_range(config, source),
        family=family,
        window=_find_window(config, family),
    )


def _find_family(config: Mapping[str, Any], source: str) -> Family:
    """Return the family of a model."""
    family, architectures = FAMILIES.get(str(config.get("model_type"))), config.get("architectures")
    if family and family.architecture in (architectures or [family.architecture]):
        return family
    *first_names, last_name = (known_family.architecture for known_family in FAMILIES.values())
    raise UserError(
        f"{source}: model_type {config.get('model_type')!r}, architectures {architectures}; only "
        f"{', '.join(first_names)} and {last_name} can "
        "be trained (dense models)"
    )


def _find_window(config: Mapping[str, Any], family: Family) -> int:
    """Return how many tokens attention sees; 0: all."""
    if not family.window or (family.window == "flag" and not config.get("use_sliding_window")):
        return 0
    window = config.get("sliding_window")
    return window if isinstance(window, int) else 0


def _find_initializer_range(config: Mapping[str, Any], source: str) -> float:
    """Return the standard deviation of random weights."""
    value = config.get("initializer_range", 0.02)
    if not isinstance(value, int | float) or not 0 < value < 1:
        raise UserError(
            f"{source}: initializer_range is {value!r}, not a number between 0 and 1; download config.json again"
        )
    return float(value)


def _check_rope(config: Mapping[str, Any], source: str) -> None:
    """Refuse a rotary embedding that transformers does not know, that lacks a number, or whose numbers make NaN."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_layer_type = isinstance(rope, dict) and bool(rope) and all(isinstance(value, dict) for value in rope.values())
    parts = list(rope.values()) if by_layer_type else [rope]
    for part in parts:
        _check_rope_type(part, source)
    for key, value in itertools.chain(config.items(), *(part.items() for part in parts if isinstance(part, dict))):
        if key in POSITIVE_KEYS and value is not None and not _is_positive(value):
            raise UserError(f"{source}: {key} is {value!r}, not a number above 0; download config.json again")


def _check_rope_type(rope: Any, source: str) -> None:
    """Refuse a type that cannot be trained, or that lacks a number."""
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind == "longrope":
        raise UserError(
            f"{source}: rope type 'longrope' cannot be trained: its factors depend on the longest sequence of a batch (no Llama 3 "
            "uses it); use another model"
        )
    if not isinstance(kind, str) or kind not in ROPE_REQUIRED_KEYS:
        raise UserError(
            f"{source}: rope type {kind!r} is not one of {', '.join(ROPE_REQUIRED_KEYS)}; download config.json again"
        )
    if missing := [key for key in ROPE_REQUIRED_KEYS[kind] if not _is_positive(rope.get(key))]:
        raise UserError(f"{source}: rope type {kind!r} has no valid {', '.join(missing)}; download config.json again")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def check_checkpoint(
    directory: Path,
    seq_len: int,
    layers: int = 0,
    *,
    random: bool = False,
    needs_all: bool = False,
    resize: bool = False,
) -> Llama:
    """Check a checkpoint without torch: shape, tensors, sizes, tokenizer and sequence length.

    ``random``: its weights will not be read; ``needs_all``: a part of them is not enough; ``resize``: as ``model.resize_vocabulary``
    has it.

    Raises:
        UserError: Something would fail later, on every host, after minutes of loading.
    """
    llama = read_llama(directory, layers)
    check_seq_len(llama, seq_len)
    check_tokenizer(directory, llama, resize=resize)
    if random:
        return llama
    tensors = read_tensors(directory)
    is_partial = any(info.slices for info in tensors.values())
    if resize and is_partial:
        raise UserError(
            f"--model.resize_vocabulary: {directory} has only part of the weights, split for the old vocabulary; push all of them"
        )
    if needs_all and is_partial:
        raise UserError(
            f"--parallel.strategy: fsdp1 needs all weights, but {directory} has only part of them; use fsdp2, or push all of them"
        )
    _refuse_names(directory, tensors)
    for name, shape in llama.tensors().items():
        info = tensors.get(name)
        if not info and is_partial:  # another stage's
            continue
        if not info:
            raise UserError(f"{directory}: no file contains {name}, which config.json needs; download the weights")
        if info.shape != shape:
            raise UserError(
                f"{info.file}: {name} is {list(info.shape)}, but config.json requires "
                f"{list(shape)}; download both from the same model"
            )
        if info.dtype not in ("F32", "F16", "BF16"):
            raise UserError(
                f"{info.file}: {name} is {info.dtype}; only F32, F16 and BF16 can be trained; download the model in BF16"
            )
    _refuse_unused(read_llama(directory), tensors)
    return llama


def _refuse_names(directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse weights that are quantized, belong to adapters, or do not have transformers' names."""
    for name in tensors:
        for pattern, kind, remedy in UNSUPPORTED_WEIGHTS:
            if re.search(pattern, name):
                raise UserError(f"{tensors[name].file}: {name} belongs to {kind}; {remedy}")
    suffix = EMBEDDING.rpartition("embed_tokens")[2]
    actual = next((name for name in tensors if name.endswith(f"embed_tokens{suffix}")), EMBEDDING)
    if EMBEDDING not in tensors and actual != EMBEDDING:
        raise UserError(
            f"{directory}: its files call {EMBEDDING} {actual!r}, and other tensors likewise; save the model with transformers' "
            "save_pretrained, which writes the standard names"
        )


def _refuse_unused(llama: Llama, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors that the full model does not use, unless nothing is lost with them."""
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if llama.tied and head and embedding and not _has_equal_bytes(head, embedding):  # transformers would train both
        raise UserError(
            f"{head.file}: {HEAD} differs from {EMBEDDING}, but config.json ties them; set tie_word_embeddings to false "
            "there to train both, or delete the tensor"
        )
    used = {HEAD, *llama.tensors()}
    unused = sorted(name for name in tensors if name not in used and IGNORED_TENSOR not in name)
    if unused:
        raise UserError(
            f"{tensors[unused[0]].file}: contains {unused[0]}{and_more(unused)}, which config.json says the model does not "
            "have; correct config.json, and use --model.layers to train fewer layers"
        )


def _has_equal_bytes(tensor: TensorInfo, other: TensorInfo) -> bool:
    """Check whether two tensors are equal in every byte stored here."""
    slices = [[piece.box for piece in info.stored_slices] for info in (tensor, other)]
    if (tensor.dtype, tensor.shape, slices[0]) != (other.dtype, other.shape, slices[1]):
        return False
    with tensor.file.open("rb") as file, other.file.open("rb") as other_file:
        for piece, other_piece in zip(tensor.stored_slices, other.stored_slices, strict=True):
            file.seek(piece.offset)
            other_file.seek(other_piece.offset)
            n_bytes = tensor.slice_bytes(piece.box)
            sizes = [min(COMPARE_CHUNK_BYTES, n_bytes - begin) for begin in range(0, n_bytes, COMPARE_CHUNK_BYTES)]
            if not all(file.read(size) == other_file.read(size) for size in sizes):
                return False
    return True


def is_small_file(name: str) -> bool:
    """Check whether a file travels with the model: configuration, tokenizer, licence and notices."""
    return name in SMALL_FILES or bool(NOTICE_NAME.fullmatch(name))


def small_file_names(directory: Path) -> list[str]:
    """Return the names of the small files in a model's directory."""
    notices = sorted(path.name for path in directory.glob("*") if NOTICE_NAME.fullmatch(path.name))
    paths = [directory / name for name in (*SMALL_FILES, *notices)]
    return [
        path.name
        for path in paths
        if path.is_file() and (path.name in SMALL_FILES or path.stat().st_size <= MAX_NOTICE_BYTES)
    ]


def read_small_files(directory: Path, chat_template: str = "", *, resize: bool = False) -> dict[str, bytes]:
    """Return the contents of the files that a rank needs besides the weights, by name.

    ``chat_template``: a file to use instead of the tokenizer's own; ``resize``: config.json has as many embeddings as the tokenizer needs.

    Raises:
        UserError: The template cannot be read.
    """
    paths = {name: directory / name for name in small_file_names(directory)}
    if chat_template:
        paths[CHAT_TEMPLATE] = check_template(Path(chat_template))
    contents = {name: path.read_bytes() for name, path in paths.items()}
    if resize and "config.json" in paths:
        config = read_hf_json(paths["config.json"])
        config["vocab_size"] = grow_vocabulary(directory, read_llama(directory).vocab)
        contents["config.json"] = json.dumps(config, indent=2).encode()
    return contents


def parse_end_ids(value: Any) -> set[int]:
    """Parse an eos_token_id, which may be one token, several or none; other values are ignored."""
    return {token_id for token_id in (value if isinstance(value, list) else [value]) if type(token_id) is int}


def read_end_ids(directory: Path) -> set[int]:
    """Return the tokens at which transformers' generate and inference servers end a text."""
    names = [name for name in (GENERATION_CONFIG, "config.json") if (directory / name).is_file()]
    return parse_end_ids(read_hf_json(directory / names[0]).get("eos_token_id")) if names else set()


def has_chat_template(directory: Path) -> bool:
    """Check whether a tokenizer has a chat template, in any of the places where transformers looks."""
    if (directory / CHAT_TEMPLATE).is_file() or (directory / "chat_template.json").is_file():
        return True
    config = directory / TOKENIZER_CONFIG
    return config.is_file() and bool(read_hf_json(config).get("chat_template"))


def check_seq_len(llama: Llama, seq_len: int) -> None:
    """Refuse sequences longer than the model's position limit."""
    if seq_len > llama.max_positions:
        raise UserError(
            f"--data.seq_len: {seq_len} exceeds the model's limit of {llama.max_positions} positions; lower it"
        )
    if llama.window and seq_len > llama.window:
        raise UserError(
            f"--data.seq_len: {seq_len} exceeds the model's sliding window of {llama.window} tokens, "
            "and sliding-window attention is not supported; lower it"
        )


def check_tokenizer(directory: Path, llama: Llama, *, resize: bool = False) -> None:
    """Refuse a tokenizer that is missing, incomplete, or has ids beyond the embedding's rows, which ``resize`` would add."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        command = CONVERT_TOKENIZER_COMMAND.format(directory)
        conversion = f"; or make it from tokenizer.model: pip install sentencepiece protobuf, then {command}"
        hint = conversion if (directory / "tokenizer.model").is_file() else ""
        raise UserError(f"{path}: no such file; download tokenizer.json of the same model{hint}")
    if not (ids := read_token_ids(directory)):
        raise UserError(f"{path}: not a readable tokenizer; download it again")
    if not resize:
        check_token_ids(directory, ids, llama.vocab)


def check_token_ids(directory: Path, ids: Mapping[str, int], n_embeddings: int) -> None:
    """Refuse tokens without an embedding in the model; ``ids``: of all tokens, by name."""
    beyond = sorted((number, name) for name, number in ids.items() if number >= n_embeddings)
    if beyond:
        names = ", ".join(f"{name!r} ({number})" for number, name in beyond[:MAX_NAMED_TOKENS])
        raise UserError(
            f"{directory}: its tokenizer has {names}{and_more(beyond, MAX_NAMED_TOKENS)}, but the model has "
            f"{n_embeddings} embeddings; add some with "
            f"--model.resize_vocabulary true, or remove these tokens from tokenizer.json, {TOKENIZER_CONFIG} or added_tokens.json"
        )


def grow_vocabulary(directory: Path, vocab: int) -> int:
    """Return the embeddings of a model with ``vocab``: more, a multiple of ``VOCABULARY_MULTIPLE``, if its tokenizer needs them."""
    needed = max(read_token_ids(directory).values(), default=0) + 1
    return vocab if needed <= vocab else -(-needed // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def read_token_ids(directory: Path) -> dict[str, int]:
    """Return a tokenizer's token ids by name; {}: it is incomplete.

    Tokens that only its other files name are numbered as transformers does.
    """
    ids = _parse_token_ids(read_hf_json(directory / "tokenizer.json"))
    if not ids:
        return {}
    files = [directory / name for name in ("added_tokens.json", TOKENIZER_CONFIG, "special_tokens_map.json")]
    added_tokens, settings, special = (read_hf_json(path) if path.is_file() else {} for path in files)
    names = [
        *sorted(added_tokens, key=lambda name: str(added_tokens[name])),
        *map(_token_name, _as_mapping(settings.get("added_tokens_decoder")).values()),
    ]
    for name in (*names, *_special_names(settings), *_special_names(special)):
        ids.setdefault(name, max(ids.values()) + 1)  # whatever number a file says
    return ids


def _special_names(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tokens that tokenizer_config.json or special_tokens_map.json names."""
    for key, value in settings.items():
        if key in ("additional_special_tokens", "extra_special_tokens"):
            yield from map(_token_name, value.values() if isinstance(value, dict) else value or [])
        elif key in SPECIAL_TOKEN_KEYS and value:
            yield _token_name(value)


def _token_name(token: Any) -> str:
    return str(_as_mapping(token).get("content", token))


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _parse_token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the token ids of a parsed ``tokenizer.json``; none if it is incomplete."""
    try:
        model = tokenizer["model"]
        vocab = model["vocab"]
        if not vocab or (model.get("type") == "BPE" and "merges" not in model):
            return {}
        ids = dict(vocab) if isinstance(vocab, dict) else {token[0]: i for i, token in enumerate(vocab)}
        ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
        return {str(name): int(number) for name, number in ids.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
