"""Export a checkpoint on this machine as a model that transformers, vLLM and others load.

Knows checkpoints and files of weights; not hosts.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from llama405b import __version__
from llama405b.checkpoint.export import (
    MergedWeights,
    PeftWeights,
    PickledWeights,
    SavedWeights,
    file_sha256,
    is_adapter_only,
    partial_file,
    saved_settings,
    write_tensors,
)
from llama405b.checkpoint.store import MAX_EVENTS
from llama405b.contract import reader
from llama405b.contract.checkpoints import MANIFEST, MODEL_FILES, list_committed, step_of
from llama405b.contract.disk import disk_free_bytes, unsupported_operation
from llama405b.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNFIT,
    RunError,
    UserError,
    and_more,
    fmt_if,
    format_size,
    pluralize,
    reason_of,
    remedy_of,
)
from llama405b.contract.files import SYSTEM_NAMES, is_hidden_or_system, read_records, restore_users_umask, write_json
from llama405b.contract.paths import EXPORT_RECORD, RunDir
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import RunEvent
from llama405b.data.hub import explain_hub_errors
from llama405b.data.tokenizer import auto_tokenizer_matches
from llama405b.distributed.host_memory import free_bytes
from llama405b.settings import config
from llama405b.settings.schema import Config
from llama405b.spec import models
from llama405b.spec.adapters import PEFT_CONFIG, PEFT_WEIGHTS, peft_config
from llama405b.spec.models import FAMILIES
from llama405b.spec.tensors import INDEX_FILE, SINGLE_FILE, is_pickled, read_hf_json

NEW_TOKENS = 40
MEMORY_FACTOR = 1.2  # times the weights' bytes: memory to generate with


def try_model(directory: Path, prompt: str, n_bytes: int) -> int:
    """Print the model's greedy continuation of a prompt; return the exit code.

    Uses the chat template if the model has one.
    """
    if not (directory / "tokenizer.json").is_file():
        print(f"--try: {directory} has no tokenizer.json to read a prompt with; copy one there and try again")
        return EXIT_FAILED
    device, free = _pick_device()
    if n_bytes * MEMORY_FACTOR > free:
        print(
            f"--try: the model takes {n_bytes * MEMORY_FACTOR / 1e9:.1f} GB, but this machine has {free / 1e9:.1f} GB; "
            f"give {directory} to an inference server instead"
        )
        return EXIT_UNFIT
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt").to(device)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True), flush=True)
    return EXIT_OK


def _pick_device() -> tuple[str, int]:
    """Return the device for a model, and the free bytes there."""
    if torch.cuda.is_available():
        return "cuda", torch.cuda.mem_get_info()[0]
    return "cpu", free_bytes()


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
FILE_BYTES = 5 * 10**9  # maximum size of an output file, unless one tensor is larger
CARD, CARD_SIGN = "README.md", "Trained with llama405b"
VLLM_RANK = 16  # largest rank that vLLM accepts without --max-lora-rank
Shapes = dict[str, tuple[int, ...]]


class ExportSource(Protocol):
    """A source of weights to export."""

    path: Path
    digest: str  # of the weights' identity
    shapes: Shapes  # of the tensors, by the model's names

    def read(self, name: str) -> Tensor:
        """Return a whole tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Export:
    """The plan of an export: which tensors go into which file."""

    source: str  # digest of what is exported
    dtype: str
    files: Mapping[str, Shapes]  # what each output file holds

    def file_bytes(self, name: str) -> int:
        """Return the size of an output file's tensors."""
        return sum(math.prod(shape) for shape in self.files[name].values()) * DTYPES[self.dtype].itemsize

    @property
    def n_bytes(self) -> int:
        """Size of all tensors."""
        return sum(map(self.file_bytes, self.files))


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenFile:
    """A complete output file; unchanged as long as size and mtime match."""

    bytes: int
    mtime: float
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class ExportRecord:
    """The record of an export: the files that are complete so far."""

    source: str
    dtype: str
    files: Mapping[str, WrittenFile]


def main(args: argparse.Namespace) -> int:
    """Run the verb on this machine; return the exit code."""
    restore_users_umask()
    args.out = Path(args.out).expanduser()
    if args.push_to_hub:
        create_repo(args.push_to_hub)
    weights, dtype = open_weights(args.source, args.step)
    card = build_card(weights, args.out.resolve().name, adapter=args.adapter)
    if isinstance(weights, SavedWeights) and is_adapter_only(weights):
        settings = saved_settings(weights)
        if args.adapter and args.try_:
            raise UserError("--try: an adapter alone generates nothing; leave out --adapter")
        if args.adapter:
            if args.verify:
                raise UserError("--verify: an adapter cannot be verified; leave out --adapter")
            return export_adapter(weights, settings, card, args)
        model_files = find_model_files(weights.path, args.source)
        weights = MergedWeights(weights, args.model or Path(settings.model.path), settings)
    elif args.adapter:
        raise UserError(f"--adapter: {weights.path} holds full weights, not an adapter; leave it out")
    else:
        model_files = args.model or find_model_files(weights.path, args.source)
    llama = read_checked_shape(weights, model_files)
    dtype = args.dtype or dtype
    export = Export(weights.digest, dtype, dict(plan_files(llama.tensors(), dtype, one_file=args.one_file)))
    write_files(export, weights, args.out)
    write_model_files(export, model_files, card, args.out, llama.layers)
    if args.verify:
        verify_export(args.out)
    size = f"{pluralize(len(export.files), 'file')}, {export.n_bytes / 1e9:.2f} GB in {dtype}"
    print(f"exported {weights.path} to {args.out}: {size}")
    print(f"serve it, for example: vllm serve {args.out}", flush=True)
    if args.push_to_hub:
        upload_export(args.out, args.push_to_hub)
    return try_model(args.out, args.try_, export.n_bytes) if args.try_ else 0


def export_adapter(weights: SavedWeights, settings: Config, card: str, args: argparse.Namespace) -> int:
    """Write an adapter in peft's format, with its tokenizer and chat template; return the exit code."""
    out, dtype = args.out, args.dtype or "fp32"
    peft_weights = PeftWeights(weights)
    export = Export(peft_weights.digest, dtype, {PEFT_WEIGHTS: peft_weights.shapes})
    write_files(export, peft_weights, out)
    base_path = args.model or Path(settings.model.path)
    base = (
        str(base_path.resolve()) if base_path.is_dir() else str(base_path)
    )  # absolute, so that loading works from any directory
    if not base_path.is_dir() and not base_path.is_absolute():
        print(
            f"warning: {base} does not exist here, so {out} names the base model by that path; correct it with --model",
            file=sys.stderr,
        )
    with explain_write_errors(out):
        with contextlib.suppress(UserError):  # there are none
            copy_small_files(find_model_files(weights.path, args.source), out)
        write_card(card, out)
        (out / PEFT_CONFIG).write_text(
            f"{json.dumps(peft_config(settings.adapter, base, peft_weights.shapes), indent=2)}\n", encoding="utf-8"
        )
    print(f"exported the adapter of {weights.path} to {out}: {export.n_bytes / 1e6:.1f} MB in {dtype}")
    rank_option = f" --max-lora-rank {settings.adapter.rank}" if settings.adapter.rank > VLLM_RANK else ""
    model_arguments = f"{base} --enable-lora{rank_option} --lora-modules adapter={out}"
    print(f"serve it, for example: vllm serve {model_arguments}", flush=True)
    if args.push_to_hub:
        upload_export(out, args.push_to_hub)
    return 0


def open_weights(source: str, step: int | None) -> tuple[ExportSource, str]:
    """Return the weights to export, and the dtype to use by default."""
    if is_pickled(Path(source)):
        pickled = PickledWeights(Path(source))
        return pickled, next((name for name, dtype in DTYPES.items() if dtype == pickled.dtype), "fp32")
    saved = SavedWeights(find_checkpoint(source, step))
    for warning in filter(None, (saved.warning, manifest_warning(saved.path, saved.digest))):
        print(warning, file=sys.stderr, flush=True)
    return saved, "bf16"


def manifest_warning(checkpoint: Path, digest: str) -> str:
    """Return a warning if a manifest differs from what its run recorded; '' if equal or not recorded."""
    events = read_records(RunEvent, RunDir(checkpoint.absolute().parents[1]).events("rank-0"), last=MAX_EVENTS)
    recorded = {event.digest for event in events if event.digest and Path(event.path).name == checkpoint.name}
    if not recorded or digest in recorded:
        return ""
    return f"warning: {checkpoint / MANIFEST} differs from what the run recorded when it saved; it was changed since"


def find_checkpoint(source: str, step: int | None) -> Path:
    """Return the requested checkpoint: the step, else the newest."""
    source_path = Path(source)
    if source_path.is_dir() and source_path.name.startswith("step-"):
        step_of(source_path)
        return source_path
    run = RunDir(source_path) if (source_path / "config.toml").is_file() else RunDir.from_name(source)
    if not run.config.is_file():
        raise UserError(f"{source}: neither a run in this directory nor a checkpoint; name one (runs are in ./runs)")
    checkpoint_dir, _ = config.read_toml(run.config).get("checkpoint.dir", ("", ""))
    root = Path(str(checkpoint_dir)) if checkpoint_dir else run.checkpoints
    by_step = {step_of(path): path for path in list_committed(root)}
    if not by_step:
        raise UserError(f"{root}: has no checkpoint of run {run.name}; nothing to export")
    if step is not None and step not in by_step:
        raise UserError(f"--step: {root} has no step {step}; choose from {', '.join(map(str, by_step))}")
    return by_step[max(by_step) if step is None else step]


def find_model_files(path: Path, source: str) -> Path:
    """Return a directory with the model's configuration and tokenizer: in the checkpoint, or in the run."""
    runs = (Path(source), RunDir.from_name(source).path)
    candidates = [
        path,
        path / MODEL_FILES,
        *(directory for run in runs for directory in sorted((run / "model").glob("*"))),
    ]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise UserError(f"{path}: has no config.json next to its weights; name the model's directory with --model")


def read_checked_shape(weights: ExportSource, model_files: Path) -> models.Llama:
    """Return the model's shape, after a check that all tensors exist and fit."""
    layers = 1 + max(
        (int(name.split(".")[2]) for name in weights.shapes if name.startswith("model.layers.")), default=-1
    )
    llama = models.read_llama(model_files)
    if not 0 < layers <= llama.layers:
        raise UserError(
            f"{weights.path}: has {pluralize(layers, 'layer')}, but {model_files / 'config.json'} says {llama.layers}; use --model"
        )
    llama = dataclasses.replace(llama, layers=layers)
    for name, shape in llama.tensors().items():
        actual = weights.shapes.get(name, ())
        if actual != shape:
            raise UserError(
                f"{weights.path}: {name} is {list(actual)}, but {model_files / 'config.json'} requires {list(shape)}; name the right "
                "model's directory with --model"
            )
    _refuse_unused(weights, llama, model_files)
    return llama


def _refuse_unused(weights: ExportSource, llama: models.Llama, model_files: Path) -> None:
    """Refuse weights that the exported model would not use."""
    used = {models.HEAD, *llama.tensors()}
    unused = sorted(name for name in weights.shapes if name not in used and models.IGNORED_TENSOR not in name)
    if llama.tied and models.HEAD in weights.shapes:
        unused += [models.HEAD] * (not torch.equal(weights.read(models.HEAD), weights.read(models.EMBEDDING)))
    if unused:
        raise UserError(
            f"{weights.path}: has {unused[0]}{and_more(unused)}, but a model of {model_files / 'config.json'} has no such tensor; name the "
            "right model's directory with --model"
        )


def plan_files(shapes: Shapes, dtype: str, *, one_file: bool) -> Iterator[tuple[str, Shapes]]:
    """Yield each output file with its tensors, in the model's order."""
    groups: list[Shapes] = [{}]
    size = 0
    for name, shape in shapes.items():
        n_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        if groups[-1] and size + n_bytes > FILE_BYTES and not one_file:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size += n_bytes
    for number, group in enumerate(groups, 1):
        yield SINGLE_FILE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors", group


def write_files(export: Export, weights: ExportSource, out: Path) -> None:
    """Write the files that are missing."""
    finished = _find_finished(export, out)
    missing = [name for name in export.files if name not in finished]
    needed, free = sum(map(export.file_bytes, missing)), disk_free_bytes(str(out))
    if free is not None and needed > free:
        raise UserError(f"{out}: {format_size(free)} free, but {format_size(needed)} are needed; name another disk")
    start, n_written = time.monotonic(), 0
    for name in missing:
        try:
            write_json(
                out / EXPORT_RECORD, ExportRecord(export.source, export.dtype, finished)
            )  # first, so that a rerun knows the directory
            digest = write_tensors(out / name, export.files[name], DTYPES[export.dtype], weights.read)
            finished[name] = _stat_written(out / name, digest)
            write_json(out / EXPORT_RECORD, ExportRecord(export.source, export.dtype, finished))
        except OSError as error:
            raise RunError(
                f"{out / name}: cannot be written ({reason_of(error)}){remedy_of(error)}; run the same command to resume"
            ) from None
        n_written += export.file_bytes(name)
        rate = n_written / max(1e-6, time.monotonic() - start)
        print(
            f"{len(finished)}/{len(export.files)}  {name}: {n_written / 1e9:.2f} of {needed / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, "
            f"{(needed - n_written) / rate:.0f} s left",
            flush=True,
        )


def _find_finished(export: Export, out: Path) -> dict[str, WrittenFile]:
    """Return the files that an earlier call finished; refuse a directory of something else."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if refused_action := unsupported_operation(str(out), saves=False, appends=False):
            raise UserError(f"{out}: an export there cannot {refused_action}; name another directory")
        for name in export.files:
            partial_file(out / name).unlink(missing_ok=True)  # from a killed call: its space is needed
        if not (out / EXPORT_RECORD).exists():
            if present := [path.name for path in out.iterdir() if not is_hidden_or_system(path.name)]:
                raise UserError(f"{out}: holds {present[0]}, which is not from an export; name another directory")
            return {}
        record = _read_record(out)
    except (OSError, MalformedError) as error:
        raise UserError(f"{out}: cannot be used ({reason_of(error)}); name another directory") from None
    if (record.source, record.dtype) != (export.source, export.dtype):
        raise UserError(f"{out}: holds an export of another checkpoint, or in another dtype; name another directory")
    if extra := sorted(record.files.keys() - export.files.keys()):
        raise UserError(
            f"{out}: holds {extra[0]}, from an export of the same model into other files; name another directory"
        )
    return {
        name: seal
        for name, seal in record.files.items()
        if (out / name).is_file() and seal == _stat_written(out / name, seal.sha256)
    }


def _read_record(out: Path) -> ExportRecord:
    return reader.loads(ExportRecord, (out / EXPORT_RECORD).read_text(encoding="utf-8"), str(out / EXPORT_RECORD))


def _stat_written(path: Path, digest: str) -> WrittenFile:
    stat = path.stat()
    return WrittenFile(stat.st_size, stat.st_mtime, digest)


def verify_export(out: Path) -> None:
    """Read the export back: check the files' hashes, and load the tokenizer as transformers does."""
    try:
        record = _read_record(out)
        damaged = [name for name, seal in record.files.items() if file_sha256(out / name) != seal.sha256]
    except (OSError, MalformedError) as error:
        raise RunError(f"{out}: cannot be read back ({reason_of(error)}); run the same command again") from None
    if damaged:
        raise RunError(
            f"{out / damaged[0]}: has changed since it was written; delete it and run the same command again"
        )
    tokenizer_note = "" if auto_tokenizer_matches(out) else "; AutoTokenizer reads its tokenizer differently, see above"
    print(f"read back {pluralize(len(record.files), 'file')} of {out}: as written{tokenizer_note}", flush=True)


def write_model_files(export: Export, model_files: Path, card: str, out: Path, layers: int) -> None:
    """Write the files next to the weights: the index last, as it makes the model complete."""
    model_config = read_hf_json(model_files / "config.json")
    dtype = str(DTYPES[export.dtype]).removeprefix("torch.")
    model_config |= {key: dtype for key in ("dtype", "torch_dtype") if key == "dtype" or key in model_config}
    model_config["num_hidden_layers"] = layers
    model_config |= {key: model_config[key][:layers] for key in ("layer_types",) if model_config.get(key)}
    model_config["architectures"] = [FAMILIES[model_config["model_type"]].architecture]
    model_config.pop("auto_map", None)  # refers to code that is not exported
    index = {
        "metadata": {"total_size": export.n_bytes},
        "weight_map": {name: file for file, shapes in export.files.items() for name in shapes},
    }
    with explain_write_errors(out):
        copy_small_files(model_files, out)
        write_card(card, out)
        (out / "config.json").write_text(json.dumps(model_config, indent=2) + "\n", encoding="utf-8")
        pin_tokenizer_class(out)
        if len(export.files) > 1:
            (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def pin_tokenizer_class(out: Path) -> None:
    """Make AutoTokenizer, which servers use, read tokenizer.json as the run did.

    Warns if the model's family forbids that.
    """
    file = out / models.TOKENIZER_CONFIG
    if auto_tokenizer_matches(out):
        return
    before = file.read_bytes() if file.is_file() else None
    after = (read_hf_json(file) if before else {}) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not auto_tokenizer_matches(out):
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)
        print(
            f"warning: {out}: AutoTokenizer, which transformers and vLLM use, gives other tokens than tokenizer.json, which the run was "
            "trained with; load it with PreTrainedTokenizerFast"
        )


def copy_small_files(model_files: Path, out: Path) -> None:
    """Copy tokenizer, notices and chat template.

    The template also goes into tokenizer_config.json, the only place where some readers look.
    """
    for name in models.small_file_names(model_files):
        if name != "config.json":
            shutil.copyfile(model_files / name, out / name)
    file, template = out / models.TOKENIZER_CONFIG, model_files / models.CHAT_TEMPLATE
    if not template.is_file():
        (out / models.CHAT_TEMPLATE).unlink(missing_ok=True)  # from an earlier call
    if file.is_file():
        before = read_hf_json(file)
        after = {key: value for key, value in before.items() if key != "auto_map"}
        if template.is_file() and "chat_template" in after:
            after["chat_template"] = template.read_text(encoding="utf-8")
        if after != before:
            file.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_card(weights: ExportSource, name: str, *, adapter: bool) -> str:
    """Return the text of a model card: what was trained, and for how long."""
    lines = ["---", f"library_name: {'peft' if adapter else 'transformers'}", "---", "", f"# {name}", ""]
    summary = f"{CARD_SIGN} {__version__}"
    if isinstance(weights, SavedWeights):
        with contextlib.suppress(UserError):  # the checkpoint has no settings
            summary += fmt_if(", from {}", Path(saved_settings(weights).model.path).name)
        manifest = weights.manifest
        sequences_note = fmt_if(", after {:,} sequences", manifest.sequences or 0)
        loss = "" if manifest.evaluation_loss is None else f", evaluation loss {manifest.evaluation_loss:.4f}"
        summary += f": step {manifest.step:,}{fmt_if(' of run {}', manifest.run)}{sequences_note}{loss}"
    return "\n".join(
        [
            *lines,
            f"{summary}.",
            "",
            "The base model's licence and notices, included here, apply to this model, too.",
            "",
        ]
    )


def write_card(card: str, out: Path) -> None:
    """Write a model card unless the directory has one of the user's."""
    if not (out / CARD).exists() or is_generated_card(out / CARD):
        (out / CARD).write_text(card, encoding="utf-8")


def is_generated_card(card: Path) -> bool:
    """Whether a model card is one that ``build_card`` made, in this or another export, without large changes since."""
    text = card.read_text(encoding="utf-8", errors="replace")
    return text.startswith("---\nlibrary_name: ") and f"\n{CARD_SIGN} " in text


@contextlib.contextmanager
def explain_write_errors(out: Path) -> Iterator[None]:
    """Turn a write error into a message that says how to resume."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{out}: cannot be written ({reason_of(error)}){remedy_of(error)}; run the same command to resume"
        ) from None


def create_repo(repo: str) -> None:
    """Create a private repository if there is none, so that missing access is found before hours of work."""
    if repo.count("/") != 1:
        raise UserError(f"--push-to-hub: {repo!r} is not a model name; write owner/name")
    with explain_hub_errors(repo, Path()):
        HfApi().create_repo(repo, private=True, exist_ok=True)


def upload_export(directory: Path, repo: str) -> None:
    """Upload all but hidden files and a disk's own.

    Keeps a model card that the user wrote on the Hub. Files that are already there are not sent again.
    """
    print(f"uploading {directory} to {repo}", flush=True)
    ignored = [".*", *SYSTEM_NAMES, *(f"{name}/*" for name in SYSTEM_NAMES)]
    with explain_hub_errors(repo, directory):
        if is_generated_card(directory / CARD) and HfApi().file_exists(repo, CARD):
            remote_card = Path(HfApi().hf_hub_download(repo, CARD))
            ignored += [CARD] * (not is_generated_card(remote_card))
        HfApi().upload_folder(
            repo_id=repo, folder_path=directory, ignore_patterns=ignored, commit_message="Export by llama405b"
        )
    print(f"uploaded to {repo}", flush=True)
