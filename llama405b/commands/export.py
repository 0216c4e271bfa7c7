"""Export a checkpoint on this machine as a model that transformers, vLLM and others load.

Knows safetensors, manifests and DCP's metadata; not hosts.
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
    has_adapter,
    partial_of,
    settings_of,
    sha256_of,
    write_tensors,
)
from llama405b.checkpoint.store import MAX_EVENTS
from llama405b.contract import reader
from llama405b.contract.checkpoints import MANIFEST, MODEL_FILES, committed, step_of
from llama405b.contract.disk import disk_free_bytes, refused_call
from llama405b.contract.errors import (
    FAILED,
    GOOD,
    UNFIT,
    RunError,
    UserError,
    and_more,
    counted,
    given,
    reason_of,
    remedy_of,
    size_words,
)
from llama405b.contract.files import OF_DISKS, follow_users_umask, is_passed_over, read_records, write_json
from llama405b.contract.paths import EXPORT_RECORD, RunDir
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import RunEvent
from llama405b.data.hub import said_clearly
from llama405b.data.tokenizer import is_read_as_it_is
from llama405b.distributed.host_memory import free_bytes
from llama405b.settings import config
from llama405b.settings.schema import Config
from llama405b.spec import models
from llama405b.spec.models import FAMILIES, PEFT_CONFIG, PEFT_WEIGHTS, peft_config
from llama405b.spec.tensors import INDEX, SINGLE, is_pickled, read_hf_json

NEW_TOKENS = 40
SPARE = 1.2  # times the weights' bytes: memory to generate with


def try_model(directory: Path, prompt: str, n_bytes: int) -> int:
    """Print the model's greedy continuation of a prompt; return the exit code.

    Uses the chat template if the model has one.
    """
    if not (directory / "tokenizer.json").is_file():
        print(f"--try: {directory} has no tokenizer.json to read a prompt with; copy one there and try again")
        return FAILED
    device, room = _roomiest()
    if n_bytes * SPARE > room:
        print(
            f"--try: the model takes {n_bytes * SPARE / 1e9:.1f} GB, but this machine has {room / 1e9:.1f} GB; "
            f"give {directory} to an inference server instead"
        )
        return UNFIT
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device)
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    asked = tokenizer(prompt, return_tensors="pt").to(device)
    with torch.no_grad():
        said = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False)
    print(tokenizer.decode(said[0, asked["input_ids"].shape[1] :], skip_special_tokens=True), flush=True)
    return GOOD


def _roomiest() -> tuple[str, int]:
    """Return the device for a model, and the free bytes there."""
    if torch.cuda.is_available():
        return "cuda", torch.cuda.mem_get_info()[0]
    return "cpu", free_bytes()


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
FILE_BYTES = 5 * 10**9  # maximum size of an output file, unless one tensor is larger
CARD, MADE = "README.md", "Trained with llama405b"
VLLM_RANK = 16  # largest rank that vLLM accepts without --max-lora-rank
Shapes = dict[str, tuple[int, ...]]


class Weights(Protocol):
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

    def bytes_of(self, name: str) -> int:
        """Return the size of an output file's tensors."""
        return sum(math.prod(shape) for shape in self.files[name].values()) * DTYPES[self.dtype].itemsize

    @property
    def n_bytes(self) -> int:
        """Size of all tensors."""
        return sum(map(self.bytes_of, self.files))


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A complete output file; unchanged as long as size and mtime match."""

    bytes: int
    mtime: float
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The record of an export: the files that are complete so far."""

    source: str
    dtype: str
    files: Mapping[str, Written]


def main(args: argparse.Namespace) -> int:
    """Run the verb on this machine; return the exit code."""
    follow_users_umask()
    args.out = Path(args.out).expanduser()
    if args.push_to_hub:
        create(args.push_to_hub)
    found, dtype = open_weights(args.source, args.step)
    card = card_of(found, args.out.resolve().name, adapter=args.adapter)
    if isinstance(found, SavedWeights) and has_adapter(found):
        settings = settings_of(found)
        if args.adapter and args.try_:
            raise UserError("--try: an adapter alone generates nothing; leave out --adapter")
        if args.adapter:
            if args.verify:
                raise UserError("--verify: an adapter cannot be verified; leave out --adapter")
            return export_adapter(found, settings, card, args)
        small = find_model_files(found.path, args.source)
        found = MergedWeights(found, args.model or Path(settings.model.path), settings)
    elif args.adapter:
        raise UserError(f"--adapter: {found.path} holds full weights, not an adapter; leave it out")
    else:
        small = args.model or find_model_files(found.path, args.source)
    llama = shape_of(found, small)
    dtype = args.dtype or dtype
    export = Export(found.digest, dtype, dict(plan_files(llama.tensors(), dtype, one_file=args.one_file)))
    write(export, found, args.out)
    finish(export, small, card, args.out, llama.layers)
    if args.verify:
        verify(args.out)
    size = f"{counted(len(export.files), 'file')}, {export.n_bytes / 1e9:.2f} GB in {dtype}"
    print(f"exported {found.path} to {args.out}: {size}")
    print(f"serve it, for example: vllm serve {args.out}", flush=True)
    if args.push_to_hub:
        upload(args.out, args.push_to_hub)
    return try_model(args.out, args.try_, export.n_bytes) if args.try_ else 0


def export_adapter(found: SavedWeights, settings: Config, card: str, args: argparse.Namespace) -> int:
    """Write an adapter in peft's format, with its tokenizer and chat template; return the exit code."""
    out, dtype = args.out, args.dtype or "fp32"
    weights_of = PeftWeights(found)
    export = Export(weights_of.digest, dtype, {PEFT_WEIGHTS: weights_of.shapes})
    write(export, weights_of, out)
    here = args.model or Path(settings.model.path)
    base = str(here.resolve()) if here.is_dir() else str(here)  # absolute, so that loading works from any directory
    if not here.is_dir() and not here.is_absolute():
        print(
            f"warning: {base} does not exist here, so {out} names the base model by that path; correct it with --model",
            file=sys.stderr,
        )
    with writing(out):
        with contextlib.suppress(UserError):  # there are none
            write_small(find_model_files(found.path, args.source), out)
        write_card(card, out)
        (out / PEFT_CONFIG).write_text(
            f"{json.dumps(peft_config(settings.adapter, base), indent=2)}\n", encoding="utf-8"
        )
    print(f"exported the adapter of {found.path} to {out}: {export.n_bytes / 1e6:.1f} MB in {dtype}")
    more = f" --max-lora-rank {settings.adapter.rank}" if settings.adapter.rank > VLLM_RANK else ""
    served = f"{base} --enable-lora{more} --lora-modules adapter={out}"
    print(f"serve it, for example: vllm serve {served}", flush=True)
    if args.push_to_hub:
        upload(out, args.push_to_hub)
    return 0


def open_weights(source: str, step: int | None) -> tuple[Weights, str]:
    """Return the weights to export, and the dtype to use by default."""
    if is_pickled(Path(source)):
        pickled = PickledWeights(Path(source))
        return pickled, next((name for name, dtype in DTYPES.items() if dtype == pickled.dtype), "fp32")
    saved = SavedWeights(find_checkpoint(source, step))
    for warning in filter(None, (saved.warning, warning_of_manifest(saved.path, saved.digest))):
        print(warning, file=sys.stderr, flush=True)
    return saved, "bf16"


def warning_of_manifest(checkpoint: Path, digest: str) -> str:
    """Return a warning if a manifest differs from what its run recorded; '' if equal or not recorded."""
    events = read_records(RunEvent, RunDir(checkpoint.absolute().parents[1]).events("rank-0"), last=MAX_EVENTS)
    recorded = {event.digest for event in events if event.digest and Path(event.path).name == checkpoint.name}
    if not recorded or digest in recorded:
        return ""
    return f"warning: {checkpoint / MANIFEST} differs from what the run recorded when it saved; it was changed since"


def find_checkpoint(source: str, step: int | None) -> Path:
    """Return the requested checkpoint: the step, else the newest."""
    given = Path(source)
    if given.is_dir() and given.name.startswith("step-"):
        step_of(given)
        return given
    run = RunDir(given) if (given / "config.toml").is_file() else RunDir.here(source)
    if not run.config.is_file():
        raise UserError(f"{source}: neither a run in this directory nor a checkpoint; name one (runs are in ./runs)")
    where, _ = config.read_toml(run.config).get("checkpoint.dir", ("", ""))
    root = Path(str(where)) if where else run.checkpoints
    present = {step_of(path): path for path in committed(root)}
    if not present:
        raise UserError(f"{root}: has no checkpoint of run {run.name}; nothing to export")
    if step is not None and step not in present:
        raise UserError(f"--step: {root} has no step {step}; choose from {', '.join(map(str, present))}")
    return present[max(present) if step is None else step]


def find_model_files(path: Path, source: str) -> Path:
    """Return a directory with the model's configuration and tokenizer: in the checkpoint, or in the run."""
    runs = (Path(source), RunDir.here(source).path)
    candidates = [path, path / MODEL_FILES, *(found for run in runs for found in sorted((run / "model").glob("*")))]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise UserError(f"{path}: has no config.json next to its weights; name the model's directory with --model")


def shape_of(found: Weights, small: Path) -> models.Llama:
    """Return the model's shape, after a check that all tensors exist and fit."""
    layers = 1 + max((int(name.split(".")[2]) for name in found.shapes if name.startswith("model.layers.")), default=-1)
    llama = models.read_llama(small)
    if not 0 < layers <= llama.layers:
        raise UserError(
            f"{found.path}: has {counted(layers, 'layer')}, but {small / 'config.json'} says {llama.layers}; use --model"
        )
    llama = dataclasses.replace(llama, layers=layers)
    for name, shape in llama.tensors().items():
        there = found.shapes.get(name, ())
        if there != shape:
            raise UserError(
                f"{found.path}: {name} is {list(there)}, but {small / 'config.json'} requires {list(shape)}; name the right "
                "model's directory with --model"
            )
    _refuse_unused(found, llama, small)
    return llama


def _refuse_unused(found: Weights, llama: models.Llama, small: Path) -> None:
    """Refuse weights that the exported model would not use."""
    used = {models.HEAD, *llama.tensors()}
    unused = sorted(name for name in found.shapes if name not in used and models.UNUSED_ANYWHERE not in name)
    if llama.tied and models.HEAD in found.shapes:
        unused += [models.HEAD] * (not torch.equal(found.read(models.HEAD), found.read(models.EMBEDDING)))
    if unused:
        raise UserError(
            f"{found.path}: has {unused[0]}{and_more(unused)}, but a model of {small / 'config.json'} has no such tensor; name the "
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
        yield SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors", group


def write(export: Export, found: Weights, out: Path) -> None:
    """Write the files that are missing."""
    done = _begin(export, out)
    lacking = [name for name in export.files if name not in done]
    need, free = sum(map(export.bytes_of, lacking)), disk_free_bytes(str(out))
    if free is not None and need > free:
        raise UserError(f"{out}: {size_words(free)} free, but {size_words(need)} are needed; name another disk")
    began, written = time.monotonic(), 0
    for name in lacking:
        try:
            write_json(
                out / EXPORT_RECORD, Record(export.source, export.dtype, done)
            )  # first, so that a rerun knows the directory
            digest = write_tensors(out / name, export.files[name], DTYPES[export.dtype], found.read)
            done[name] = _written(out / name, digest)
            write_json(out / EXPORT_RECORD, Record(export.source, export.dtype, done))
        except OSError as error:
            raise RunError(
                f"{out / name}: cannot be written ({reason_of(error)}){remedy_of(error)}; run the same command to resume"
            ) from None
        written += export.bytes_of(name)
        rate = written / max(1e-6, time.monotonic() - began)
        print(
            f"{len(done)}/{len(export.files)}  {name}: {written / 1e9:.2f} of {need / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, "
            f"{(need - written) / rate:.0f} s left",
            flush=True,
        )


def _begin(export: Export, out: Path) -> dict[str, Written]:
    """Return the files that an earlier call finished; refuse a directory of something else."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if refused := refused_call(str(out), saves=False, appends=False):
            raise UserError(f"{out}: an export there cannot {refused}; name another directory")
        for name in export.files:
            partial_of(out / name).unlink(missing_ok=True)  # from a killed call: its space is needed
        if not (out / EXPORT_RECORD).exists():
            if present := [path.name for path in out.iterdir() if not is_passed_over(path.name)]:
                raise UserError(f"{out}: holds {present[0]}, which is not from an export; name another directory")
            return {}
        record = _record(out)
    except (OSError, MalformedError) as error:
        raise UserError(f"{out}: cannot be used ({reason_of(error)}); name another directory") from None
    if (record.source, record.dtype) != (export.source, export.dtype):
        raise UserError(f"{out}: holds an export of another checkpoint, or in another dtype; name another directory")
    if others := sorted(record.files.keys() - export.files.keys()):
        raise UserError(
            f"{out}: holds {others[0]}, from an export of the same model into other files; name another directory"
        )
    return {
        name: seal
        for name, seal in record.files.items()
        if (out / name).is_file() and seal == _written(out / name, seal.sha256)
    }


def _record(out: Path) -> Record:
    return reader.loads(Record, (out / EXPORT_RECORD).read_text(encoding="utf-8"), str(out / EXPORT_RECORD))


def _written(path: Path, digest: str) -> Written:
    found = path.stat()
    return Written(found.st_size, found.st_mtime, digest)


def verify(out: Path) -> None:
    """Read the export back: check the files' hashes, and load the tokenizer as transformers does."""
    try:
        record = _record(out)
        damaged = [name for name, seal in record.files.items() if sha256_of(out / name) != seal.sha256]
    except (OSError, MalformedError) as error:
        raise RunError(f"{out}: cannot be read back ({reason_of(error)}); run the same command again") from None
    if damaged:
        raise RunError(
            f"{out / damaged[0]}: has changed since it was written; delete it and run the same command again"
        )
    tokens = "" if is_read_as_it_is(out) else "; AutoTokenizer reads its tokenizer differently, see above"
    print(f"read back {counted(len(record.files), 'file')} of {out}: as written{tokens}", flush=True)


def finish(export: Export, small: Path, card: str, out: Path, layers: int) -> None:
    """Write the files next to the weights: the index last, as it makes the model complete."""
    described = read_hf_json(small / "config.json")
    dtype = str(DTYPES[export.dtype]).removeprefix("torch.")
    described |= {key: dtype for key in ("dtype", "torch_dtype") if key == "dtype" or key in described}
    described["num_hidden_layers"] = layers
    described |= {key: described[key][:layers] for key in ("layer_types",) if described.get(key)}
    described["architectures"] = [FAMILIES[described["model_type"]].architecture]
    described.pop("auto_map", None)  # refers to code that is not exported
    index = {
        "metadata": {"total_size": export.n_bytes},
        "weight_map": {name: file for file, shapes in export.files.items() for name in shapes},
    }
    with writing(out):
        write_small(small, out)
        write_card(card, out)
        (out / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        agree_on_tokens(out)
        if len(export.files) > 1:
            (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def agree_on_tokens(out: Path) -> None:
    """Make AutoTokenizer, which servers use, read tokenizer.json as the run did.

    Warns if the model's family forbids that.
    """
    file = out / models.TOKENIZER_CONFIG
    if is_read_as_it_is(out):
        return
    before = file.read_bytes() if file.is_file() else None
    after = (read_hf_json(file) if before else {}) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not is_read_as_it_is(out):
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)
        print(
            f"warning: {out}: AutoTokenizer, which transformers and vLLM use, gives other tokens than tokenizer.json, which the run was "
            "trained with; load it with PreTrainedTokenizerFast"
        )


def write_small(small: Path, out: Path) -> None:
    """Copy tokenizer, notices and chat template.

    The template also goes into tokenizer_config.json, the only place where some readers look.
    """
    for name in models.small_names(small):
        if name != "config.json":
            shutil.copyfile(small / name, out / name)
    file, template = out / models.TOKENIZER_CONFIG, small / models.CHAT_TEMPLATE
    if not template.is_file():
        (out / models.CHAT_TEMPLATE).unlink(missing_ok=True)  # from an earlier call
    if file.is_file():
        before = read_hf_json(file)
        after = {key: value for key, value in before.items() if key != "auto_map"}
        if template.is_file() and "chat_template" in after:
            after["chat_template"] = template.read_text(encoding="utf-8")
        if after != before:
            file.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def card_of(found: Weights, name: str, *, adapter: bool) -> str:
    """Return the text of a model card: what was trained, and for how long."""
    lines = ["---", f"library_name: {'peft' if adapter else 'transformers'}", "---", "", f"# {name}", ""]
    made = f"{MADE} {__version__}"
    if isinstance(found, SavedWeights):
        with contextlib.suppress(UserError):  # the checkpoint has no settings
            made += given(", from {}", Path(settings_of(found).model.path).name)
        reached = found.manifest
        read = given(", after {:,} sequences", reached.sequences or 0)
        loss = "" if reached.evaluation_loss is None else f", evaluation loss {reached.evaluation_loss:.4f}"
        made += f": step {reached.step:,}{given(' of run {}', reached.run)}{read}{loss}"
    return "\n".join(
        [*lines, f"{made}.", "", "The base model's licence and notices, included here, apply to this model, too.", ""]
    )


def write_card(card: str, out: Path) -> None:
    """Write a model card unless the directory has one of the user's."""
    if not (out / CARD).exists() or is_ours(out / CARD):
        (out / CARD).write_text(card, encoding="utf-8")


def is_ours(card: Path) -> bool:
    """Whether a model card is one that ``card_of`` made, in this or another export, without large changes since."""
    text = card.read_text(encoding="utf-8", errors="replace")
    return text.startswith("---\nlibrary_name: ") and f"\n{MADE} " in text


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn a write error into a message that says how to resume."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{out}: cannot be written ({reason_of(error)}){remedy_of(error)}; run the same command to resume"
        ) from None


def create(repo: str) -> None:
    """Create a private repository if there is none, so that missing access is found before hours of work."""
    if repo.count("/") != 1:
        raise UserError(f"--push-to-hub: {repo!r} is not a model name; write owner/name")
    with said_clearly(repo, Path()):
        HfApi().create_repo(repo, private=True, exist_ok=True)


def upload(directory: Path, repo: str) -> None:
    """Upload all but hidden files and a disk's own.

    Keeps a model card that the user wrote on the Hub. Files that are already there are not sent again.
    """
    print(f"uploading {directory} to {repo}", flush=True)
    left_out = [".*", *OF_DISKS, *(f"{name}/*" for name in OF_DISKS)]
    with said_clearly(repo, directory):
        if is_ours(directory / CARD) and HfApi().file_exists(repo, CARD):
            theirs = Path(HfApi().hf_hub_download(repo, CARD))
            left_out += [CARD] * (not is_ours(theirs))
        HfApi().upload_folder(
            repo_id=repo, folder_path=directory, ignore_patterns=left_out, commit_message="Export by llama405b"
        )
    print(f"uploaded to {repo}", flush=True)
