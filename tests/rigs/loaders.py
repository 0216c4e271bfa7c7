"""What others read of an export: each loader as a function, from the directory to what it found there."""

import dataclasses
import importlib.abc
import importlib.machinery
import json
import sys
from unittest import mock

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llama405b.data.demo_model import make_demo
from ranks_rig import run_program
from tiny_models import write_llama

FAMILIES = {
    "Llama": {"family": "llama"},
    "Llama, tied": {"family": "llama", "tied": True},
    "Mistral": {"family": "mistral", "sliding_window": None},
    "Qwen 2": {"family": "qwen2"},
    "Qwen 3": {"family": "qwen3", "head_dim": 8},
    "OLMo 2": {"family": "olmo2"},
    "Gemma 3": {"family": "gemma3_text", "tied": True},
    "Phi-3": {"family": "phi3"},
}
TEXT = "def f(x):\n    return x  # été 🙂"
TURNS = [{"role": "user", "content": "Hi, you"}]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
END, OTHER_END = 1, 300
GGUF_ARCH = {"mistral": "llama", "gemma3_text": "gemma3"}  # where llama.cpp's converter calls it otherwise
FLAGS = (
    "--preset", "demo", "--data.seq_len", 32, "--training.micro_batch_size", 1, "--training.global_batch_size", 1,
    "--training.max_steps", 1, "--checkpoint.every", 1, "--evaluation.every", 0, "--parallel.device", "cpu", "--optimizer.warmup", 0,
)  # fmt: skip


@dataclasses.dataclass
class Reading:
    """What a loader finds; None: it does not look for that."""

    architecture: str | None = None
    ids: list[int] | None = None  # of TEXT
    chat: str | None = None  # TURNS, by the template
    ends: set[int] | None = None  # at which it stops
    tensors: set[str] | None = None
    logits: torch.Tensor | None = None


def trained(family, place, *, adapter=True):
    """Train a model of a family for a step, whole and as an adapter, and export both; returns what all must read, and the exports."""
    model, data, template = place / "base", place / "data.jsonl", place / "own.jinja"
    make_demo(place / "demo", layers=1, hidden=32)
    write_llama(
        model,
        layers=2,
        vocab=64 + len(AutoTokenizer.from_pretrained(place / "demo")),
        dtype=torch.bfloat16,
        **FAMILIES[family],
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text((place / "demo" / name).read_text())
    described = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": "{{ 'the old one' }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, OTHER_END], "do_sample": True}))
    (model / "LICENSE").write_text("terms")
    template.write_text(TEMPLATE)
    data.write_text(
        "".join(json.dumps({"messages": [*TURNS, {"role": "assistant", "content": f"{n}"}]}) + "\n" for n in range(9))
    )
    settings = (*FLAGS, "--model.path", model, "--data.paths", data, "--data.chat_template", template)
    exported = {}
    kinds = {"whole": ()} | ({"adapter": ("--adapter.kind", "lora", "--parallel.numerics", "fp32")} if adapter else {})
    for name, more in kinds.items():
        run = place / name
        done = run_program("llama405b.train:run_and_exit", *settings, "--run-dir", run, *more, cwd=place)
        assert done.returncode == 0, done.stdout + done.stderr
        exported[name] = place / f"{name}-export"
        export(run, exported[name], *(["--adapter"] if more else ["--dtype", "bf16"]))
        if more:
            exported["merged"] = place / "merged"
            export(run, exported["merged"], "--dtype", "fp32")
    base = AutoModelForCausalLM.from_pretrained(model)
    right = Reading(
        type(base).__name__,
        AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"],
        "<|user|>Hi, you<|end_of_text|>\n",
        {END, OTHER_END},
        {*base.state_dict()} - ({"lm_head.weight"} if base.config.tie_word_embeddings else set()),
    )
    return right, exported


def export(run, out, *flags):
    """Export as the command line does."""
    from llama405b_tools.verbs import export as verb

    assert verb.main([str(run), str(out), *flags]) == 0


def transformers(directory, _):
    """As AutoTokenizer, AutoModelForCausalLM and generate read it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ends = GenerationConfig.from_pretrained(directory).eos_token_id
    return Reading(
        type(model).__name__, *_tokenizer(AutoTokenizer.from_pretrained(directory)), {*ends}, logits=_logits(model)
    )


def safetensors(directory, _):
    """The files alone, by their names, into a model made from config.json."""
    state = {
        name: tensor.float() for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    model.load_state_dict(state, strict=not model.config.tie_word_embeddings)
    model.tie_weights()
    return Reading(
        json.loads((directory / "config.json").read_text())["architectures"][0], tensors={*state}, logits=_logits(model)
    )


def gguf(directory, packages):
    """As llama.cpp's converter does: its vocabulary, and its names of tensors."""
    sys.path.append(str(packages))
    import gguf

    vocabulary = gguf.SpecialVocab(directory)
    described = json.loads((directory / "config.json").read_text())
    arch = gguf.MODEL_ARCH[GGUF_ARCH.get(described["model_type"], described["model_type"]).upper()]
    names = gguf.get_tensor_name_map(arch, described["num_hidden_layers"])
    state = {name for file in directory.glob("*.safetensors") for name in load_file(file)}
    known = {name for name in state if names.get_name(name, try_suffixes=(".weight", ".bias"))}
    template = vocabulary.chat_template
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = tokenizer.apply_chat_template(TURNS, chat_template=template, tokenize=False)
    assert vocabulary.special_token_ids["eos"] == END
    return Reading(chat=chat, tensors=known)


def peft(directory, packages):
    """An adapter, beside its base, from another directory."""
    sys.path.append(str(packages))
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return Reading(None, *_tokenizer(AutoTokenizer.from_pretrained(directory)), logits=_logits(model))


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that sglang imports, and that its readers of files have no use for."""

    def find_spec(self, name, _path=None, _target=None):
        if name.partition(".")[0] in {"torchvision", "sgl_kernel", "flashinfer", "IPython", "triton"}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__version__ = spec, [], "0"
        return module

    def exec_module(self, module):
        pass


def vllm(directory, packages):
    """Its readers of configuration and tokenizer."""
    sys.path.append(str(packages))
    from vllm.tokenizers import get_tokenizer
    from vllm.transformers_utils.config import get_config, try_get_generation_config

    [architecture] = get_config(directory, trust_remote_code=False).architectures
    ends = try_get_generation_config(str(directory), trust_remote_code=False).eos_token_id
    return Reading(architecture, *_tokenizer(get_tokenizer(str(directory))), {*ends})


def sglang(directory, packages):
    """Its readers of configuration and tokenizer."""
    sys.path.append(str(packages))
    sys.meta_path.append(Absent())
    from sglang.srt.utils.hf_transformers_utils import get_config, get_generation_config, get_tokenizer

    [architecture] = get_config(str(directory), trust_remote_code=False).architectures
    ends = get_generation_config(str(directory), trust_remote_code=False).eos_token_id
    return Reading(architecture, *_tokenizer(get_tokenizer(str(directory))), {*ends})


def compared(right, found):
    """What a loader looked for, and what it found otherwise."""
    names, wrong = [], []
    for field in dataclasses.fields(Reading):
        ours, theirs = getattr(right, field.name), getattr(found, field.name)
        if theirs is None:
            continue
        names.append(field.name)
        same = torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4) if field.name == "logits" else ours == theirs
        if not same:
            wrong.append(f"{field.name}: {theirs}, not {ours}")
    return names, wrong


def read(_, name, directory, packages):
    """Be a process in which a loader reads."""
    return globals()[name](directory, packages)


def _tokenizer(tokenizer):
    return tokenizer(TEXT)["input_ids"], tokenizer.apply_chat_template(TURNS, tokenize=False)


def _logits(model):
    with torch.no_grad():
        return model.float().eval()(input_ids=torch.arange(2, 30)[None]).logits
