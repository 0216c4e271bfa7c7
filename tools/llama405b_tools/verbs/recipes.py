"""Convert another program's recipe to a TOML settings file, and plan the run.

RECIPE is a file of axolotl, LLaMA-Factory, torchtune, Automodel, torchtitan, DeepSpeed or accelerate, arguments of transformers or TRL
(YAML, JSON or TOML), or a shell script with such a command. Each setting names its source key in a comment; keys that have no effect
or are not supported are listed below with the reason. Exit code: 0, or 1 if a key is unsupported or unknown.
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
LOADERS = (
    "json",
    "csv",
    "parquet",
    "text",
    "arrow",
)  # loader names that appear in place of a path; other keys name the files
PACKED = "batches of whole records: sequences are packed here, so a step of as many sequences has more records, and an epoch fewer steps"
DEFAULT = "default:"  # prefix of table rows that hold a program's own default for a setting
OF_MLP = TARGETS[4:]
JOINED = ("data.paths", "evaluation.paths", "tracking.to", "data.template_arguments")  # lists merged from several keys
STRONG = {"parallel.numerics": "fp8", "parallel.offload": "all"}  # these values win over any other key
WEAK = (0, "0", "auto", "none")  # these values lose against any other key
LISTS = ("lora_target_modules", "report_to", "train_file", "validation_file")  # flags that take several values
OTHER_TARGETS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
NOTHING: tuple[Any, ...] = (None, False, "", "none", "null", "false", 0, [], {})
# Recipe keys that no setting can express, with the advice to show.
OF_NO_SETTING = {
    "@template_text": "a chat template within the recipe: write it into a file, and name that in data.chat_template",
    "@completion_only False": 'training on prompts: write the records as {"text": …}, or use data.train_on',
    "@train_on_inputs True": 'training on the prompts of records that are no conversation: write them as {"text": …}',
}


@dataclasses.dataclass(slots=True)
class Imported:
    """A recipe converted to settings, with everything that could not be converted."""

    default: str  # source to name for settings that come from the program's defaults
    settings: dict[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)  # value and source key by setting
    idle: list[str] = dataclasses.field(default_factory=list)  # keys without effect here, with the reason
    refused: list[str] = dataclasses.field(default_factory=list)  # unsupported keys, with the alternative
    others: list[str] = dataclasses.field(default_factory=list)  # what works differently here
    unknown: list[str] = dataclasses.field(default_factory=list)
    parts: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # values that several keys combine to a setting, by @name

    def put(self, setting: str, value: Any, source: str) -> None:
        """Set a setting, or note that its value is invalid; lists from one key are merged."""
        try:
            value = config.convert(setting, _as_type(setting, value), source)
        except UserError as fault:
            self.refused.append(str(fault))
            return
        before, was = self.settings.get(setting, (None, ""))
        if was and isinstance(value, tuple) and (was == source or setting in JOINED):
            value = (*before, *(each for each in value if each not in before))
        elif was and before != value:
            if before == STRONG.get(setting) or value in WEAK:
                value, source, before, was = before, was, value, source
            self.idle.append(f"{was} = {json.dumps(before)}: {source} stands instead")
        self.settings[setting] = value, source

    def drop(self, setting: str, why: str) -> None:
        """Remove a setting and note why."""
        source = self.settings.pop(setting, ("", ""))[1]
        if source and source != self.default:
            self.idle.append(f"{source}: {why}")

    def number(self, name: str, default: float) -> Any:
        """Return the positive number of a setting or part, else the default."""
        value = self.parts.get(name, self.settings.get(name, (default, ""))[0])
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        return value if isinstance(value, int | float) and value > 0 else default


def flat(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values; keys of a list of tables end in brackets."""
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
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = reason_of(error) if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(
            f"{path}: cannot be read as a recipe ({why}); name a file in YAML, JSON or TOML, or a shell script"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no settings; name a file in YAML, JSON or TOML, or a shell script")
    return found


def of_line(text: str) -> dict[str, Any]:
    """Return the flags of a shell script's commands, ignoring all other words."""
    found = dict[str, Any]()
    variables = dict(re.findall(r"^(?:export )?(\w+)=(\S+)$", text, re.MULTILINE))
    text = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), text)
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    for at, word in enumerate(words):
        if not (match := re.fullmatch(r"--([\w.-]+)(?:=(.*))?", word, re.DOTALL)):
            continue
        name = match[1].replace("-", "_")
        after = list(itertools.takewhile(lambda each: not each.startswith("--"), words[at + 1 :]))
        if match[2] is None and len(after) > 1 and name in LISTS:
            found[name] = after
            continue
        value = match[2] if match[2] is not None else next(iter(after), "true")
        found[name] = value
        with contextlib.suppress(yaml.YAMLError):
            found[name] = yaml.safe_load(value) if value.strip() else value
    return found


def program_of(recipe: Mapping[str, Any], path: Path) -> str:
    """Return the program whose own table knows most keys of a recipe.

    Raises:
        UserError: None knows any.
    """
    keys = {key for key, _ in flat(recipe)}
    if not any(row_of(key, name) for key in keys for name in PROGRAMS):
        raise UserError(f"{path}: no known program has the keys {', '.join(sorted(keys)[:4])}; name it with --from")
    return max(
        PROGRAMS,
        key=lambda name: (sum(row_of(key, name) is not None for key in keys), sum(key in table(name) for key in keys)),
    )


def convert(row: Row, value: Any) -> tuple[Any, str]:
    """Convert a value to its setting's; return it and the reason if unsupported (None, '': no effect)."""
    if isinstance(value, str):  # YAML reads 2e-5 as text
        with contextlib.suppress(ValueError):
            value = float(value) if re.fullmatch(r"[\d.]+e-?\d+", value, re.IGNORECASE) else value
    if "=" in row.how and isinstance(value, list) and value:
        every = [convert(row, each) for each in value]
        became = [each for each, _ in every if each]
        return became or None, next((why for _, why in every if why), "")
    if "=" in row.how:
        choices = dict(pair.partition("=")[::2] for pair in row.how.split(";"))
        text = "none" if value is None else json.dumps(value).strip('"')
        found = choices.get(text, choices.get(text.lower(), "" if value in NOTHING else "!"))
        return (None, row.why or f"{text} is not offered") if found == "!" else (found or None, "")
    if row.how == "auto" and value == "auto":
        return None, ""
    if isinstance(value, str) and "$" in value and row.setting:
        return None, "is a shell variable; replace it by its value"
    if row.how == "files" and value and not all("." in word or "/" in word for word in _words(value)):
        return None, row.why
    if row.setting in ("!", "~"):
        most = 1 if row.how == "one" else 0
        is_idle = value in NOTHING or (isinstance(value, int | float) and row.how and value <= most)
        return None, "" if is_idle else row.why
    if row.how == "one" and value is not None and value <= 1:
        return None, ""
    if row.how == "positive" and isinstance(value, int | float) and value <= 0:
        return None, ""
    return None if value in (None, "", "none", []) else READS.get(row.how, lambda it: it)(value), ""


def _model(value: str) -> str:
    """Return a model's directory; for a Hub name, where `llama405b download` puts it."""
    is_name = value.count("/") == 1 and not value.startswith((".", "/", "~")) and not Path(value).exists()
    return f"models/{value.partition('/')[2]}" if is_name else value


def _words(value: str | list[str]) -> list[str]:
    return [part.strip() for each in (value if isinstance(value, list) else [value]) for part in each.split(",")]


def _data(value: str | list[str]) -> list[str]:
    """Return files and Hub datasets as data.paths takes them."""
    is_file = re.compile(
        r".*\.(jsonl?|csv|tsv|parquet|arrow|txt|md|gz|zst)|[^/]*|[./~].*|hf:.*|.*/.*/.*|.*\*.*", re.DOTALL
    )
    words = [word for word in _words(value) if word not in LOADERS]
    return [word if is_file.fullmatch(word) or Path(word).exists() else f"hf://datasets/{word}" for word in words]


def _targets(value: str | list[str]) -> list[str]:
    names = _words(value)
    return list(TARGETS) if {"all", "all-linear"} & {*names} else [OTHER_TARGETS.get(name, name) for name in names]


def _fsdp(value: str | list[str] | bool) -> str:
    words = value if isinstance(value, list) else str(value).split()
    kinds = {"shard_grad_op": "zero2", "hybrid_shard": "hsdp", "no_shard": "ddp"}
    return next((kinds[word] for word in words if word in kinds), "fsdp2")


READS: dict[str, Callable[[Any], Any]] = {
    "model": _model, "data": _data, "files": _data, "two": lambda value: max(2, value), "targets": _targets, "fsdp": _fsdp,
    "list": lambda value: value if isinstance(value, list) else [value],
}  # fmt: skip


def imported(recipe: Mapping[str, Any], program: str, gpus: int = 0, beside: Path = Path()) -> Imported:
    """Return a recipe in our settings; ``beside``: where files lie that it names.

    ``gpus``: number of GPUs; 0: as the recipe says; -1: it is a file that another recipe includes.
    """
    found = Imported(f"default of {program}")
    for key, value in flat(recipe):
        row = row_of(key, program)
        if row is None:
            found.unknown.append(key)
        elif row.setting == "@file":
            _with_file(found, key, value, beside)
        else:
            _take(found, row, key, value)
    if gpus < 0:
        return found
    for row in table(program).values():
        if row.key.startswith(DEFAULT) and row.setting not in found.settings:
            value = json.loads(row.how)
            value = 2 * found.number("adapter.rank", 1) if value == "2 * rank" else value
            found.put(row.setting, value, found.default)
    if program in ("trl", "axolotl", "llama-factory") and not found.parts.get("@packing"):
        found.others.append(PACKED)
    _compose(found, gpus)
    try:
        config.resolve({"model.path": ("m", ""), "data.paths": (("d",), ""), **found.settings})
    except UserError as fault:  # settings that contradict each other
        found.refused.append(str(fault))
    return found


def _take(found: Imported, row: Row, key: str, value: Any) -> None:
    """Convert one key and record the result."""
    try:
        became, why = convert(row, value)
    except (AttributeError, TypeError, ValueError, OverflowError):
        became, why = None, "cannot be read; correct it"
    shown = json.dumps(value, default=str)
    if row.how == "argument" and became is not None:
        became = [f"{key}={shown}"]
    if why:
        (found.others if row.setting == "~" else found.refused).append(f"{key} = {shown}: {why}")
    elif became is None or not row.setting:
        found.idle.append(f"{key}{f': {row.why}' if row.why and row.setting not in ('!', '~') else f' = {shown}'}")
    elif row.setting.startswith("@"):
        found.parts[row.setting] = became
        found.idle.append(f"{key} = {shown}: part of what stands above")
    else:
        if row.how == "fsdp" and "offload" in str(value):
            found.put("parallel.offload", "all", key)
        found.put(row.setting, became, f"{key} {shown}" if row.setting == "model.path" and became != value else key)


def _with_file(found: Imported, key: str, value: Any, beside: Path) -> None:
    """Import a DeepSpeed file that the recipe names."""
    path = next((each for each in (beside / str(value), Path(str(value))) if each.is_file()), None)
    if path is None:
        found.refused.append(f"{key} = {value}: no such file; copy it there, or import it separately")
        return
    more = imported(read_recipe(path), "deepspeed", -1)
    for name, (each, source) in more.settings.items():
        found.put(name, each, f"{key}: {source}")
    found.parts |= more.parts
    found.idle += [f"{key}: {line}" for line in more.idle]
    found.refused += [f"{key}: {line}" for line in more.refused]
    found.unknown += [f"{key}: {name}" for name in more.unknown]


def _compose(found: Imported, gpus: int) -> None:
    """Set the settings that combine several keys."""
    parts, settings = found.parts, found.settings
    micro, accumulation = int(found.number("training.micro_batch_size", 1)), int(found.number("@accumulation", 1))
    per_node = int(found.number("@per_node", 0) * found.number("@nodes", 1))
    gpus = parts["@gpus"] = gpus or int(found.number("@gpus", per_node or GPUS))
    split = math.prod(int(found.number(f"parallel.{name}", 1)) for name in ("tp", "cp", "pp"))
    of_batch = {"training.micro_batch_size", "@accumulation"}
    if "training.global_batch_size" not in settings and of_batch & {*settings, *parts}:
        batch = max(1, gpus // split) * micro * accumulation
        found.put("training.global_batch_size", batch, f"{micro} x {accumulation} on {counted(gpus, 'GPU')} (--gpus)")
    if str(parts.get("@dtype")).endswith("float32") and "parallel.numerics" not in settings:
        found.put("parallel.numerics", "fp32", "the dtype")
    if each := int(found.number("@max_steps_per_epoch", 0)):
        found.put("training.max_steps", each * math.ceil(found.number("training.epochs", 1)), f"{each} in each epoch")
    if "@beta1" in parts or "@beta2" in parts:
        before = settings.get("optimizer.betas", ((0.9, 0.999), ""))[0]
        found.put("optimizer.betas", [parts.get("@beta1", before[0]), parts.get("@beta2", before[1])], "the betas")
    if share := found.number("@min_lr_rate", 0):
        found.put(
            "optimizer.min_lr", float(f"{share * found.number('optimizer.lr', 0):.12g}"), f"{share:g} of the rate"
        )
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
    if not found.number("evaluation.fraction", 0):
        settings.pop("evaluation.fraction", None)
    if not {"evaluation.fraction", "evaluation.paths"} & {*settings}:
        found.drop("evaluation.every", "there is no data to evaluate on: set evaluation.fraction or .paths")
    if any(name.startswith("tracking.") for name in settings) and "tracking.to" not in settings:
        found.put("tracking.to", ["wandb"], "its project")
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
    if "adapter.kind" not in settings and any(settings[name][1] != found.default for name in others):
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
    """Return the TOML file: settings by section with their source keys, then all other keys."""
    lines = [f"# {recipe.name}, a recipe of {program}, in the settings of llama405b (docs/import.md)"]
    for section, names in itertools.groupby(sorted(found.settings), lambda name: name.partition(".")[0]):
        lines += ["", f"[{section}]"]
        for name in names:
            value, source = found.settings[name]
            lines.append(f"{name.partition('.')[2]} = {json.dumps(value, ensure_ascii=False)}  # {source}")
    for title, told in (
        ("not possible", found.refused),
        ("otherwise here", found.others),
        ("not known", found.unknown),
        ("without effect here", found.idle),
    ):
        lines += ["", f"# {title}:", *(f"#   {' '.join(each.split())}" for each in told)] if told else []
    return "\n".join(lines) + "\n"


def _as_type(name: str, value: Any) -> Any:
    """Return a value in its setting's type: 1 becomes true, 3.0 becomes 3, text becomes a list."""
    if TYPES[name] is int and isinstance(value, float | bool) and math.isfinite(value) and value == int(value):
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
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the settings to FILE [print them]")
    parser.add_argument(
        "--from",
        dest="program",
        metavar="PROGRAM",
        choices=PROGRAMS,
        help="program of the recipe [detected by its keys]",
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
    program = args.program or program_of(recipe, args.recipe)
    found = imported(recipe, program, args.gpus, args.recipe.parent)
    text = toml_of(found, args.recipe, program)
    if args.output is None:
        print(text, end="")
        return FAILED if found.refused or found.unknown else GOOD
    try:
        write_atomic(args.output, text)
    except OSError as error:
        raise UserError(f"--output: {args.output} cannot be written ({reason_of(error)}); name another file") from None
    made, idle = counted(len(found.settings), "setting"), counted(len(found.idle), "key")
    print(f"{args.output}: {made} of a recipe of {program}; without effect here: {idle}")
    for line in (
        *(f"not possible: {each}" for each in found.refused),
        *(f"not known: {each}" for each in found.unknown),
        *(f"otherwise here: {each}" for each in found.others),
    ):
        print(line)
    print(f"train with it: {program_name()} launch HOSTS --config {args.output}")
    try:
        predict.main(["--config", str(args.output), "--gpus", str(found.parts["@gpus"])])
    except UserError as error:  # the model is not on this machine, or settings contradict each other
        print(f"no plan: {error}")
    return FAILED if found.refused or found.unknown else GOOD
