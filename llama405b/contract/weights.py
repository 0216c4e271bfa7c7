"""What a Hugging Face checkpoint directory holds, read with the standard library only.

Knows the safetensors layout (8 bytes little-endian header length, a JSON header, the tensors' bytes; see the
format description in the safetensors repository), the index file, and which tensors a Llama must have. Reads
headers, never tensors, so that an 812 GB checkpoint is checked in milliseconds. Knows nothing of torch or ranks.
"""

import dataclasses
import json
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import and_more

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SMALL_FILES = (  # what a rank needs if it does not have the directory
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNUSED_ANYWHERE = "rotary_emb.inv_freq"  # old checkpoints hold it; transformers computes it, and so does the trainer
ROPE_NEEDS = {  # transformers' types of rotary embedding, and the numbers that each must be given
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
COMPARED_BYTES = 16 << 20  # at a time
MAX_LAYERS = 10_000
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor is stored."""

    file: Path
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    offset: int = 0  # of its first byte in the file

    @property
    def n_bytes(self) -> int:
        """Size of the tensor in its file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Size of one row: one index of the first dimension."""
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class Llama:
    """The shape of a Llama, from its config.json."""

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

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's name in a checkpoint, and its shape (out features first)."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        wide, narrow = (self.intermediate, hidden), (hidden, self.intermediate)
        mlp = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, hidden)}
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            for block, matrices, bias in (("self_attn", attention, self.attention_bias), ("mlp", mlp, self.mlp_bias)):
                for name, shape in matrices.items():
                    shapes[f"{layer}{block}.{name}.weight"] = shape
                    if bias:
                        shapes[f"{layer}{block}.{name}.bias"] = shape[:1]
            shapes[f"{layer}input_layernorm.weight"] = (hidden,)
            shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes[HEAD] = (self.vocab, hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(math.prod(shape) for shape in self.tensors().values())

    def flops_per_token(self, seq_len: int) -> int:
        """Count the model FLOPs of training on one token: six per weight of a matrix product, and causal attention.

        Counted as in PaLM, appendix B (arXiv:2204.02311), but with only the half of the attention matrix that a causal
        mask leaves; recomputed activations do not count.
        """
        matrices = sum(math.prod(shape) for name, shape in self.tensors().items() if name.endswith("_proj.weight"))
        attention = self.layers * self.heads * self.head_dim * seq_len
        return 6 * (matrices + self.vocab * self.hidden + attention)


def read_llama(directory: Path, layers: int = 0) -> Llama:
    """Read the model's shape from ``config.json``; ``layers``: keep only that many (0: all).

    Raises:
        UserError: The directory does not exist, or does not hold a Llama.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; download the model into it, or point --model.path at it")
    config = read_hf_json(directory / "config.json")
    llama = parse_llama(config, str(directory / "config.json"))
    if layers > llama.layers:
        raise UserError(f"--model.layers: {layers}, but {directory} has {llama.layers}; lower it, or omit it")
    return dataclasses.replace(llama, layers=layers or llama.layers)


def parse_llama(config: Mapping[str, Any], where: str) -> Llama:
    """Read the model's shape from a parsed ``config.json``.

    Raises:
        UserError: It does not describe a LlamaForCausalLM that can be trained.
    """
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if config.get("model_type") != "llama" or "LlamaForCausalLM" not in architectures:
        raise UserError(
            f"{where}: model_type {config.get('model_type')!r}, architectures {architectures}; "
            "only a LlamaForCausalLM of model_type 'llama' can be trained"
        )

    if quantization := config.get("quantization_config"):
        shown = textwrap.shorten(str(quantization), 60, placeholder=" …")
        raise UserError(
            f"{where}: quantization_config is {shown}; only unquantized weights can be trained, download those"
        )
    _check_rope(config, where)

    def number(key: str, default: int | None = None, limit: int = 1 << 31) -> int:
        value = config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < limit:
            raise UserError(f"{where}: {key} is {value!r}, not a positive whole number; download config.json again")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    kv_heads = number("num_key_value_heads", heads)
    if hidden % heads or heads % kv_heads:
        raise UserError(
            f"{where}: hidden_size {hidden}, {heads} attention heads and {kv_heads} key-value heads do not divide evenly; "
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
        mlp_bias=bool(config.get("mlp_bias", False)),
        max_positions=number("max_position_embeddings", 2048),
        initializer_range=_initializer_range(config, where),
    )


def _initializer_range(config: Mapping[str, Any], where: str) -> float:
    """The standard deviation of random weights."""
    found = config.get("initializer_range", 0.02)
    if not isinstance(found, int | float) or not 0 < found < 1:
        raise UserError(
            f"{where}: initializer_range is {found!r}, not a number between 0 and 1; download config.json again"
        )
    return float(found)


def _check_rope(config: Mapping[str, Any], where: str) -> None:
    """Refuse a rotary embedding that transformers does not know, or that lacks a number."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if not isinstance(kind, str) or kind not in ROPE_NEEDS:
        raise UserError(
            f"{where}: rope type {kind!r} is not one of {', '.join(ROPE_NEEDS)}; download config.json again"
        )
    if lacking := [key for key in ROPE_NEEDS[kind] if not isinstance(rope.get(key), int | float | list)]:
        raise UserError(f"{where}: rope type {kind!r} has no valid {', '.join(lacking)}; download config.json again")


def read_tensors(directory: Path) -> dict[str, TensorInfo]:
    """List the checkpoint's tensors, checking that every safetensors file is complete.

    Raises:
        UserError: A file is missing, truncated or not safetensors, the index names a tensor that no file holds, two files
        hold one tensor, or there is a single file beside an index of others.
    """
    index = directory / INDEX
    if index.is_file():
        return _read_listed(index)
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    raise UserError(f"{directory}: has neither {INDEX} nor {SINGLE}; download the weights in safetensors format")


def _read_listed(index: Path) -> dict[str, TensorInfo]:
    weight_map = read_hf_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: has no weight_map; download the file again")
    files = [index.parent / name for name in sorted(set(map(str, weight_map.values())))]
    single = index.parent / SINGLE
    if single.is_file() and files != [single]:  # which transformers would read instead
        raise UserError(f"{single}: is beside {INDEX}, which lists other files; delete the one that is not the model's")
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]}: missing{and_more(missing)} of {len(files)} files in the index; download them")
    tensors: dict[str, TensorInfo] = {}
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


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read one safetensors file's header and check the file's size against it.

    Raises:
        UserError: The file is truncated, too long, or not a safetensors file.
    """
    actual = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
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


def _tensors_of(header: Mapping[str, Any], path: Path, begin: int) -> tuple[dict[str, TensorInfo], int]:
    """The tensors of a parsed header, and where their bytes end; the format allows no gaps.

    Raises:
        ValueError: Tensors overlap, leave a gap, or their size does not match shape and dtype.
        UserError: A dtype cannot be trained.
    """
    infos, end = {}, 0
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if entry["dtype"] not in DTYPE_BYTES:
            raise UserError(f"{path}: {name} is {entry['dtype']}; only F32, F16 and BF16 can be trained")
        infos[name] = TensorInfo(path, entry["dtype"], tuple(entry["shape"]), begin + start)
        if not all(type(n) is int for n in (start, stop, *entry["shape"])):
            raise ValueError
        if start != end or stop - start != infos[name].n_bytes:
            raise ValueError
        end = stop
    return infos, end


def check_checkpoint(directory: Path, seq_len: int, layers: int = 0, *, random: bool = False) -> Llama:
    """Check what can be checked of a checkpoint without torch: shape, tensors, sizes, tokenizer, sequence length.

    ``random``: its weights will not be read.

    Raises:
        UserError: Something would fail later, on every host, after minutes of loading.
    """
    llama = read_llama(directory, layers)
    check_seq_len(llama, seq_len)
    check_tokenizer(directory, llama)
    if random:
        return llama
    tensors = read_tensors(directory)
    for name, shape in llama.tensors().items():
        if not (info := tensors.get(name)):
            raise UserError(f"{directory}: no file contains {name}, which config.json needs; download the weights")
        if info.shape != shape:
            raise UserError(
                f"{info.file}: {name} is {list(info.shape)}, but config.json requires "
                f"{list(shape)}; download both from the same model"
            )
        if info.dtype not in ("F32", "F16", "BF16"):
            raise UserError(f"{info.file}: {name} is {info.dtype}; only F32, F16 and BF16 can be trained")
    _refuse_unused(read_llama(directory), tensors)
    return llama


def _refuse_unused(llama: Llama, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors that the whole model would not be given, unless nothing is lost with them."""
    head, embedding = tensors.get(HEAD), tensors[EMBEDDING]
    if llama.tied and head and not _is_same(head, embedding):  # transformers would train both
        raise UserError(
            f"{head.file}: {HEAD} differs from {EMBEDDING}, but config.json ties them; set tie_word_embeddings to false "
            "there to train both, or delete the tensor"
        )
    used = {HEAD, *llama.tensors()}
    unused = sorted(name for name in tensors if name not in used and UNUSED_ANYWHERE not in name)
    if unused:
        raise UserError(
            f"{tensors[unused[0]].file}: contains {unused[0]}{and_more(unused)}, which config.json says the model does not "
            "have; correct config.json, and use --model.layers to train fewer layers"
        )


def _is_same(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors are equal in every byte."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        pieces = range(0, one.n_bytes, COMPARED_BYTES)
        sizes = [min(COMPARED_BYTES, one.n_bytes - begin) for begin in pieces]
        return all(first.read(size) == second.read(size) for size in sizes)


def check_seq_len(llama: Llama, seq_len: int) -> None:
    """Refuse sequences longer than the model's position limit."""
    if seq_len > llama.max_positions:
        raise UserError(
            f"--data.seq_len: {seq_len} exceeds the model's limit of {llama.max_positions} positions; lower it"
        )


def check_tokenizer(directory: Path, llama: Llama) -> None:
    """Refuse a tokenizer that is missing, incomplete, or has ids beyond the embedding's rows."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; download tokenizer.json of the same model")
    tokenizer = read_hf_json(path)
    if not (ids := _token_ids(tokenizer)):
        raise UserError(f"{path}: not a readable tokenizer; download it again")
    if (directory / "tokenizer_config.json").is_file():
        read_hf_json(directory / "tokenizer_config.json")
    if max(ids) >= llama.vocab:
        raise UserError(
            f"{path}: its largest id is {max(ids)}, but the model has {llama.vocab} embeddings; "
            "use the model's own tokenizer"
        )


def _token_ids(tokenizer: Mapping[str, Any]) -> list[int]:
    """The ids of a parsed ``tokenizer.json``; none if it is incomplete."""
    try:
        model = tokenizer["model"]
        vocab = model["vocab"]
        if not vocab or (model.get("type") == "BPE" and "merges" not in model):
            return []
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        return [int(i) for i in (*ids, *(token["id"] for token in tokenizer.get("added_tokens", [])))]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


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
