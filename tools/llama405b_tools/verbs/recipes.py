"""Write the settings of another program's recipe as a TOML file of ours, and plan them.

RECIPE is a file of axolotl, LLaMA-Factory, torchtune, Automodel, torchtitan, DeepSpeed or accelerate, arguments of transformers or TRL
(YAML, JSON or TOML), or a shell script with such a line. Each setting stands beside the key that it is from; keys that have no effect
here, and what cannot be done, stand below with the reason. Exit code: 0, or 1 if something cannot be done, or a key is not known.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from llama405b.contract.errors import FAILED, GOOD, UserError, counted, reason_of
from llama405b.contract.files import write_atomic
from llama405b.settings import config
from llama405b.settings.command import OneLineParser
from llama405b.settings.foreign import PROGRAMS, Row, row_of, table
from llama405b.settings.schema import TARGETS, TYPES
from llama405b_tools.hosts.fleet import program_name
from llama405b_tools.verbs import predict

GPUS = 8
DEFAULT = "default:"  # before the setting that a program's own default is of
OF_MLP = TARGETS[4:]
OTHER_TARGETS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
NOTHING: tuple[Any, ...] = (None, False, "", "none", "null", "false", 0, [], {})


# Parts of recipes that no setting is made of, where they are there.
OF_NO_SETTING = {
    "@template_text": "a chat template within the recipe: write it into a file, and name that in data.chat_template",
    "@completion_only False": 'training on prompts: write the records as {"text": …}, or use data.train_on',
    "@train_on_inputs True": 'training on the prompts of records that are no conversation: write them as {"text": …}',
}


@dataclasses.dataclass(slots=True)
class Imported:
    """A recipe in our settings."""

    settings: dict[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)  # values, and what they are from
    idle: list[str] = dataclasses.field(default_factory=list)  # keys without effect, and why
    refused: list[str] = dataclasses.field(default_factory=list)  # what cannot be done, and what instead
    unknown: list[str] = dataclasses.field(default_factory=list)
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)  # of settings, by @name

    def put(self, setting: str, value: Any, source: str) -> None:
        """Note a setting, or that its value is none; several lists of one key are one."""
        try:
            value = config.convert(setting, _as_type(setting, value), source)
        except UserError as fault:
            self.refused.append(str(fault))
            return
        before = self.settings.get(setting)
        joins = before and isinstance(value, tuple) and before[1] == source
        self.settings[setting] = ((*before[0], *value) if before and joins else value, source)

    def drop(self, setting: str, why: str) -> None:
        """Leave out a setting."""
        if setting in self.settings:
            self.idle.append(f"{self.settings.pop(setting)[1]}: {why}")

    def number(self, name: str, default: float) -> Any:
        """Return a setting, or a part of one, that is a number."""
        value = self.parts.get(name, self.settings.get(name, (default, ""))[0])
        return value if isinstance(value, int | float) and value > 0 else default


def flat(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys with dots, and their values; those of a list of tables have brackets."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from flat(each, f"{before}.{key}" if before else str(key))
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for each in value:
            yield from flat(each, f"{before}[]")
    else:
        yield before, value


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe's file as a table.

    Raises:
        UserError: It cannot be read, or holds no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".sh", ".bash", ".txt"):
            return of_line(text)
        found = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = reason_of(error) if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(
            f"{path}: cannot be read as a recipe ({why}); name a file in YAML, JSON or TOML, or a shell script"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no settings; name a file in YAML, JSON or TOML, or a shell script")
    return found


def of_line(text: str) -> dict[str, Any]:
    """Return the flags of a shell script's commands; other words are programs, and files."""
    found = dict[str, Any]()
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    for word, after in itertools.zip_longest(words, words[1:], fillvalue="--"):
        if not (match := re.fullmatch(r"--([\w.-]+)(?:=(.*))?", word, re.DOTALL)):
            continue
        value = match[2] if match[2] is not None else "true" if after.startswith("--") else after
        found[match[1].replace("-", "_")] = yaml.safe_load(value) if value.strip() else value
    return found


def program_of(recipe: Mapping[str, Any]) -> str:
    """Return the program whose own table knows the most keys of a recipe."""
    keys = {key for key, _ in flat(recipe)}
    return max(
        PROGRAMS,
        key=lambda name: (sum(row_of(key, name) is not None for key in keys), sum(key in table(name) for key in keys)),
    )


def convert(row: Row, value: Any) -> tuple[Any, str]:
    """Return a value as the setting takes it, and words for what cannot be; None and '': it has no effect."""
    if isinstance(value, str):  # 2e-5 is text to YAML
        with contextlib.suppress(ValueError):
            value = float(value) if re.fullmatch(r"[\d.]+e-?\d+", value, re.IGNORECASE) else value
    if "=" in row.how:
        choices = dict(pair.partition("=")[::2] for pair in row.how.split(";"))
        text = "none" if value is None else json.dumps(value).strip('"')
        found = choices.get(text, choices.get(text.lower(), "" if value in NOTHING else "!"))
        return (None, row.why or f"{text} is not offered") if found == "!" else (found or None, "")
    if row.how == "auto" and value == "auto":
        return None, ""
    if row.setting == "!":
        most = 1 if row.how == "one" else 0
        is_idle = value in NOTHING or (isinstance(value, int | float) and row.how and value <= most)
        return None, "" if is_idle else row.why
    if row.how == "one" and value is not None and value <= 1:
        return None, ""
    if row.how == "positive" and isinstance(value, int | float) and value <= 0:
        return None, ""
    return None if value in (None, "", "none", []) else READS.get(row.how, lambda it: it)(value), ""


def _model(value: str) -> str:
    """A model's directory: that of a name on the Hub is where download puts it."""
    is_name = value.count("/") == 1 and not value.startswith((".", "/", "~")) and not Path(value).exists()
    return f"models/{value.partition('/')[2]}" if is_name else value


def _words(value: str | list[str]) -> list[str]:
    return [part.strip() for each in (value if isinstance(value, list) else [value]) for part in each.split(",")]


def _data(value: str | list[str]) -> list[str]:
    """Files, or names of datasets on the Hub."""
    is_name = re.compile(r"[\w-][\w.-]*/[\w-]+")
    return [
        f"hf://datasets/{word}" if is_name.fullmatch(word) and not Path(word).exists() else word
        for word in _words(value)
    ]


def _targets(value: str | list[str]) -> list[str]:
    names = _words(value)
    return list(TARGETS) if {"all", "all-linear"} & {*names} else [OTHER_TARGETS.get(name, name) for name in names]


def _fsdp(value: str | list[str] | bool) -> str:
    words = value if isinstance(value, list) else str(value).split()
    kinds = {"shard_grad_op": "zero2", "hybrid_shard": "hsdp", "no_shard": "ddp"}
    return next((kinds[word] for word in words if word in kinds), "fsdp2")


READS: dict[str, Callable[[Any], Any]] = {
    "model": _model, "data": _data, "targets": _targets, "fsdp": _fsdp,
    "list": lambda value: value if isinstance(value, list) else [value],
}  # fmt: skip


def imported(recipe: Mapping[str, Any], program: str, gpus: int = 0, beside: Path = Path()) -> Imported:
    """Return a recipe in our settings; ``beside``: where files lie that it names.

    ``gpus``: of the run; 0: as it says itself; -1: it is a part of another recipe.
    """
    found = Imported()
    for key, value in flat(recipe):
        row = row_of(key, program)
        if row is None:
            found.unknown.append(key)
            continue
        became, why = convert(row, value)
        shown = json.dumps(value, default=str)
        if why:
            found.refused.append(f"{key} = {shown}: {why}")
        elif became is None or not row.setting:
            found.idle.append(f"{key}{f': {row.why}' if row.why and row.setting != '!' else f' = {shown}'}")
        elif row.setting == "@file":
            _with_file(found, key, value, beside)
        elif row.setting.startswith("@"):
            found.parts[row.setting] = became
            found.idle.append(f"{key} = {shown}: part of what stands above")
        else:
            found.put(row.setting, became, f"{key} {shown}" if row.setting == "model.path" and became != value else key)
    if gpus >= 0:
        _compose(found, gpus)
        for row in table(program).values():
            if row.key.startswith(DEFAULT) and row.setting not in found.settings:
                found.put(row.setting, json.loads(row.how), f"default of {program}")
    return found


def _with_file(found: Imported, key: str, value: Any, beside: Path) -> None:
    """Add what a file of DeepSpeed says."""
    path = next((each for each in (beside / str(value), Path(str(value))) if each.is_file()), None)
    if path is None:
        found.refused.append(f"{key} = {value}: that file is not here; put it there, or import it by itself")
        return
    more = imported(read_recipe(path), "deepspeed", -1)
    found.settings |= {name: (each, f"{key}: {source}") for name, (each, source) in more.settings.items()}
    found.parts |= more.parts
    found.idle += [f"{key}: {line}" for line in more.idle]
    found.refused += [f"{key}: {line}" for line in more.refused]
    found.unknown += [f"{key}: {name}" for name in more.unknown]


def _compose(found: Imported, gpus: int) -> None:
    """Make settings of their parts."""
    parts, settings = found.parts, found.settings
    micro, accumulation = int(found.number("training.micro_batch_size", 1)), int(found.number("@accumulation", 1))
    gpus = gpus or int(found.number("@gpus", GPUS))
    split = math.prod(int(found.number(f"parallel.{name}", 1)) for name in ("tp", "cp", "pp"))
    if "training.global_batch_size" not in settings and {"training.micro_batch_size", "@accumulation"} & {
        *settings,
        *parts,
    }:
        batch = max(1, gpus // split) * micro * accumulation
        found.put("training.global_batch_size", batch, f"{micro} x {accumulation} on {gpus} GPUs (--gpus)")
    if str(parts.get("@dtype")).endswith("float32") and "parallel.numerics" not in settings:
        found.put("parallel.numerics", "fp32", "the dtype")
    if "@beta1" in parts or "@beta2" in parts:
        found.put("optimizer.betas", [parts.get("@beta1", 0.9), parts.get("@beta2", 0.999)], "the betas")
    if share := found.number("@min_lr_rate", 0):
        found.put("optimizer.min_lr", share * found.number("optimizer.lr", 0), f"{share:g} of the rate")
    _compose_data(found)
    _compose_adapter(found)


def _compose_data(found: Imported) -> None:
    parts, settings = found.parts, found.settings
    if parts.get("@eval_strategy") in ("no", False) or parts.get("@validation") is False:
        found.drop("evaluation.every", "nothing is evaluated")
    elif "evaluation.every" not in settings and (
        parts.get("@eval_strategy") == "epoch"
        or {"evaluation.fraction", "evaluation.paths", "@evals_per_epoch"} & {*settings, *parts}
    ):
        found.put("evaluation.every", "epoch", "evaluations")
    for name in ("fraction", "paths", "micro_batch_size") if "evaluation.every" not in settings else ():
        found.drop(f"evaluation.{name}", "nothing is evaluated")
    for part, ours in (("@text_field", "text"), ("@messages_field", "messages")):
        if parts.get(part, ours) not in (ours, "conversations"):
            found.put("data.fields", [f"{ours}={parts[part]}"], "the field's name")
    if parts.get("@train_on_inputs"):
        found.put("data.train_on", ["assistant", "user", "system", "tool"], "training on inputs")
    if "@save_interval" in parts and settings.get("checkpoint.every", ("",))[0] != "0":
        found.put("checkpoint.every", parts["@save_interval"], "the interval")
    said = {*parts, *(f"{name} {value}" for name, value in parts.items())}
    found.refused += [why for name, why in OF_NO_SETTING.items() if name in said]
    if "@torchtune_data" in parts and "data.paths" not in settings:
        found.refused.append(
            f"the data of {parts['@torchtune_data']}: name files, or hf://datasets/OWNER/NAME, in data.paths"
        )


def _compose_adapter(found: Imported) -> None:
    parts, settings = found.parts, found.settings
    others = [name for name in settings if name.startswith("adapter.") and name != "adapter.kind"]
    if "adapter.kind" not in settings and others:
        found.put("adapter.kind", "lora", "its rank")
    if settings.get("adapter.kind", ("none",))[0] == "none":
        for name in ("adapter.kind", *others):
            found.drop(name, "there is no adapter")
        return
    if parts.get("@all_targets") and "adapter.targets" not in settings:
        found.put("adapter.targets", TARGETS, "all linear layers")
    if parts.get("@mlp_targets") and "adapter.targets" in settings:
        value, source = settings["adapter.targets"]
        settings["adapter.targets"] = tuple(dict.fromkeys([*value, *OF_MLP])), f"{source}, and the MLP's"
    found.drop("model.resize_vocabulary", "adapters train no embeddings")


def toml_of(found: Imported, recipe: Path, program: str) -> str:
    """Return the file: settings by section, each beside what it is from, and below what is not among them."""
    lines = [f"# {recipe.name}, a recipe of {program}, in the settings of llama405b (docs/import.md)"]
    for section, names in itertools.groupby(sorted(found.settings), lambda name: name.partition(".")[0]):
        lines += ["", f"[{section}]"]
        for name in names:
            value, source = found.settings[name]
            lines.append(f"{name.partition('.')[2]} = {json.dumps(value, ensure_ascii=False)}  # {source}")
    for title, told in (
        ("not possible", found.refused),
        ("not known", found.unknown),
        ("without effect here", found.idle),
    ):
        lines += ["", f"# {title}:", *(f"#   {' '.join(each.split())}" for each in told)] if told else []
    return "\n".join(lines) + "\n"


def _as_type(name: str, value: Any) -> Any:
    """A value as its setting's type, where a recipe has another: 1 for true, 3.0 for 3, a text for a list."""
    if TYPES[name] is int and isinstance(value, float | bool) and value == int(value):
        return int(value)
    if TYPES[name] is bool and isinstance(value, int):
        return bool(value)
    if TYPES[name] is float and isinstance(value, int):
        return float(value)
    return value.split(",") if TYPES[name] == tuple[str, ...] and isinstance(value, str) else value


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(prog="llama405b import", description=__doc__)
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="the recipe's file")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the settings there [print them]")
    parser.add_argument(
        "--from", dest="program", metavar="PROGRAM", choices=PROGRAMS, help="whose recipe it is [seen by its keys]"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=0,
        metavar="N",
        help=f"GPUs of the run, for its global batch [as it says, or {GPUS}]",
    )
    args = parser.parse_args(argv)
    if args.gpus < 0:
        raise UserError(f"--gpus: {args.gpus} is too small; use 1 or more")
    if args.output and args.output.exists():
        raise UserError(f"--output: {args.output} exists; name another file")
    recipe = read_recipe(args.recipe)
    program = args.program or program_of(recipe)
    found = imported(recipe, program, args.gpus, args.recipe.parent)
    text = toml_of(found, args.recipe, program)
    if args.output is None:
        print(text, end="")
        return FAILED if found.refused or found.unknown else GOOD
    try:
        write_atomic(args.output, text)
    except OSError as error:
        raise UserError(f"--output: {args.output} cannot be written ({reason_of(error)}); name another file") from None
    print(
        f"{args.output}: {counted(len(found.settings), 'setting')} of a recipe of {program}; {len(found.idle)} keys have no effect here"
    )
    for line in (
        *(f"not possible: {each}" for each in found.refused),
        *(f"not known: {each}" for each in found.unknown),
    ):
        print(line)
    print(f"train with it: {program_name()} launch HOSTS --config {args.output}")
    try:
        predict.main(["--config", str(args.output), "--gpus", str(args.gpus or found.parts.get("@gpus") or GPUS)])
    except UserError as error:  # its model is not here, or the settings do not go together
        print(f"no plan: {error}")
    return FAILED if found.refused or found.unknown else GOOD
