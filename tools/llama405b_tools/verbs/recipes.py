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

from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, UserError, pluralize, reason_of
from llama405b.contract.files import write_atomic
from llama405b.settings import config
from llama405b.settings.foreign import PROGRAM_TABLES, ForeignKey, find_recipe_key, foreign_keys
from llama405b.settings.parser import OneLineParser
from llama405b.settings.schema import ADAPTER_TARGETS, SETTING_TYPES
from llama405b_tools.hosts.fleet import program_name
from llama405b_tools.verbs import predict

DEFAULT_GPUS = 8
LOADERS = (
    "json",
    "csv",
    "parquet",
    "text",
    "arrow",
)  # loader names that appear in place of a path; other keys name the files
PACKING_NOTE = (
    "batches of whole records: sequences are packed here, so a step has more records, and an epoch fewer steps"
)
DEFAULT_PREFIX = "default:"  # prefix of table rows that hold a program's own default for a setting
MLP_TARGETS = ADAPTER_TARGETS[4:]
MERGED_LISTS = (
    "data.paths",
    "evaluation.paths",
    "tracking.to",
    "data.template_arguments",
)  # lists merged from several keys
OVERRIDING_VALUES = {"parallel.numerics": "fp8", "parallel.offload": "all"}  # these values win over any other key
OVERRIDABLE_VALUES = (0, "0", "auto", "none")  # these values lose against any other key
MULTI_VALUE_FLAGS = (
    "lora_target_modules",
    "report_to",
    "train_file",
    "validation_file",
)  # flags that take several values
OTHER_TARGETS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
EMPTY_VALUES: tuple[Any, ...] = (None, False, "", "none", "null", "false", 0, [], {})
# Recipe keys that no setting can express, with the advice to show.
UNSUPPORTED_PARTS = {
    "@template_text": "a chat template within the recipe: write it into a file, and name that in data.chat_template",
    "@completion_only False": 'training on prompts: write the records as {"text": …}, or use data.train_on',
    "@train_on_inputs True": 'training on the prompts of records that are no conversation: write them as {"text": …}',
}


@dataclasses.dataclass(slots=True)
class ImportedRecipe:
    """A recipe converted to settings, with everything that could not be converted."""

    default_source: str  # source to name for settings that come from the program's defaults
    settings: dict[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)  # value and source key by setting
    ineffective: list[str] = dataclasses.field(default_factory=list)  # keys without effect here, with the reason
    impossible: list[str] = dataclasses.field(default_factory=list)  # unsupported keys, with the alternative
    differences: list[str] = dataclasses.field(default_factory=list)  # what works differently here
    unknown: list[str] = dataclasses.field(default_factory=list)
    parts: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # values that several keys combine to a setting, by @name

    def set_value(self, setting: str, value: Any, source: str) -> None:
        """Set a setting, or note that its value is invalid; lists from one key are merged."""
        try:
            value = config.coerce(setting, _coerce_type(setting, value), source)
        except UserError as fault:
            self.impossible.append(str(fault))
            return
        old_value, old_source = self.settings.get(setting, (None, ""))
        if old_source and isinstance(value, tuple) and (old_source == source or setting in MERGED_LISTS):
            value = (*old_value, *(item for item in value if item not in old_value))
        elif old_source and old_value != value:
            if old_value == OVERRIDING_VALUES.get(setting) or value in OVERRIDABLE_VALUES:
                value, source, old_value, old_source = old_value, old_source, value, source
            self.ineffective.append(f"{old_source} = {json.dumps(old_value)}: {source} stands instead")
        self.settings[setting] = value, source

    def drop(self, setting: str, why: str) -> None:
        """Remove a setting and note why."""
        source = self.settings.pop(setting, ("", ""))[1]
        if source and source != self.default_source:
            self.ineffective.append(f"{source}: {why}")

    def positive_number(self, name: str, default: float) -> Any:
        """Return the positive number of a setting or part, else the default."""
        value = self.parts.get(name, self.settings.get(name, (default, ""))[0])
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        return value if isinstance(value, int | float) and value > 0 else default


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values; keys of a list of tables end in brackets."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for item in value:
            yield from flatten(item, f"{prefix}[]")
    else:
        yield prefix, value


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe's file as a table.

    Raises:
        UserError: It cannot be read, or holds no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".sh", ".bash", ".txt"):
            return parse_shell_script(text)
        recipe = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)  # JSON is YAML
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = reason_of(error) if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(
            f"{path}: cannot be read as a recipe ({why}); name a file in YAML, JSON or TOML, or a shell script"
        ) from None
    if not isinstance(recipe, dict):
        raise UserError(f"{path}: holds no settings; name a file in YAML, JSON or TOML, or a shell script")
    return recipe


def parse_shell_script(text: str) -> dict[str, Any]:
    """Return the flags of a shell script's commands, ignoring all other words."""
    flags = dict[str, Any]()
    variables = dict(re.findall(r"^(?:export )?(\w+)=(\S+)$", text, re.MULTILINE))
    text = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), text)
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    for i, word in enumerate(words):
        if not (match := re.fullmatch(r"--([\w.-]+)(?:=(.*))?", word, re.DOTALL)):
            continue
        name = match[1].replace("-", "_")
        flag_values = list(itertools.takewhile(lambda following: not following.startswith("--"), words[i + 1 :]))
        if match[2] is None and len(flag_values) > 1 and name in MULTI_VALUE_FLAGS:
            flags[name] = flag_values
            continue
        value = match[2] if match[2] is not None else next(iter(flag_values), "true")
        flags[name] = value
        with contextlib.suppress(yaml.YAMLError):
            flags[name] = yaml.safe_load(value) if value.strip() else value
    return flags


def detect_program(recipe: Mapping[str, Any], path: Path) -> str:
    """Return the program whose own table knows most keys of a recipe.

    Raises:
        UserError: None knows any.
    """
    keys = {key for key, _ in flatten(recipe)}
    if not any(find_recipe_key(key, name) for key in keys for name in PROGRAM_TABLES):
        raise UserError(f"{path}: no known program has the keys {', '.join(sorted(keys)[:4])}; name it with --from")
    return max(
        PROGRAM_TABLES,
        key=lambda name: (
            sum(find_recipe_key(key, name) is not None for key in keys),
            sum(key in foreign_keys(name) for key in keys),
        ),
    )


def convert_setting(row: ForeignKey, value: Any) -> tuple[Any, str]:
    """Convert a value to its setting's; return it and the reason if unsupported (None, '': no effect)."""
    if isinstance(value, str):  # YAML reads 2e-5 as text
        with contextlib.suppress(ValueError):
            value = float(value) if re.fullmatch(r"[\d.]+e-?\d+", value, re.IGNORECASE) else value
    if "=" in row.how and isinstance(value, list) and value:
        results = [convert_setting(row, item) for item in value]
        converted = [item for item, _ in results if item]
        return converted or None, next((why for _, why in results if why), "")
    if "=" in row.how:
        choices = dict(pair.partition("=")[::2] for pair in row.how.split(";"))
        text = "none" if value is None else json.dumps(value).strip('"')
        choice = choices.get(text, choices.get(text.lower(), "" if value in EMPTY_VALUES else "!"))
        return (None, row.why or f"{text} is not offered") if choice == "!" else (choice or None, "")
    if row.how == "auto" and value == "auto":
        return None, ""
    if isinstance(value, str) and "$" in value and row.setting:
        return None, "is a shell variable; replace it by its value"
    if row.how == "files" and value and not all("." in word or "/" in word for word in _split_list(value)):
        return None, row.why
    if row.setting in ("!", "~"):
        max_idle = 1 if row.how == "one" else 0
        is_idle = value in EMPTY_VALUES or (isinstance(value, int | float) and row.how and value <= max_idle)
        return None, "" if is_idle else row.why
    if row.how == "one" and value is not None and value <= 1:
        return None, ""
    if row.how == "positive" and isinstance(value, int | float) and value <= 0:
        return None, ""
    return None if value in (None, "", "none", []) else CONVERTERS.get(row.how, lambda raw: raw)(value), ""


def _model_directory(value: str) -> str:
    """Return a model's directory; for a Hub name, where `llama405b download` puts it."""
    is_name = value.count("/") == 1 and not value.startswith((".", "/", "~")) and not Path(value).exists()
    return f"models/{value.partition('/')[2]}" if is_name else value


def _split_list(value: str | list[str]) -> list[str]:
    return [part.strip() for item in (value if isinstance(value, list) else [value]) for part in item.split(",")]


def _data_paths(value: str | list[str]) -> list[str]:
    """Return files and Hub datasets as data.paths takes them."""
    is_file = re.compile(
        r".*\.(jsonl?|csv|tsv|parquet|arrow|txt|md|gz|zst)|[^/]*|[./~].*|hf:.*|.*/.*/.*|.*\*.*", re.DOTALL
    )
    words = [word for word in _split_list(value) if word not in LOADERS]
    return [word if is_file.fullmatch(word) or Path(word).exists() else f"hf://datasets/{word}" for word in words]


def _adapter_targets(value: str | list[str]) -> list[str]:
    names = _split_list(value)
    return (
        list(ADAPTER_TARGETS) if {"all", "all-linear"} & {*names} else [OTHER_TARGETS.get(name, name) for name in names]
    )


def _fsdp_strategy(value: str | list[str] | bool) -> str:
    words = value if isinstance(value, list) else str(value).split()
    kinds = {"shard_grad_op": "zero2", "hybrid_shard": "hsdp", "no_shard": "ddp"}
    return next((kinds[word] for word in words if word in kinds), "fsdp2")


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "model": _model_directory, "data": _data_paths, "files": _data_paths, "two": lambda value: max(2, value), "targets":
    _adapter_targets, "fsdp": _fsdp_strategy, "list": lambda value: value if isinstance(value, list) else [value],
}  # fmt: skip


def import_recipe(recipe: Mapping[str, Any], program: str, gpus: int = 0, directory: Path = Path()) -> ImportedRecipe:
    """Return a recipe in our settings; ``directory``: where files lie that it names.

    ``gpus``: number of GPUs; 0: as the recipe says; -1: it is a file that another recipe includes.
    """
    result = ImportedRecipe(f"default of {program}")
    for key, value in flatten(recipe):
        row = find_recipe_key(key, program)
        if row is None:
            result.unknown.append(key)
        elif row.setting == "@file":
            _import_file(result, key, value, directory)
        else:
            _apply_row(result, row, key, value)
    if gpus < 0:
        return result
    for row in foreign_keys(program).values():
        if row.key.startswith(DEFAULT_PREFIX) and row.setting not in result.settings:
            value = json.loads(row.how)
            value = 2 * result.positive_number("adapter.rank", 1) if value == "2 * rank" else value
            result.set_value(row.setting, value, result.default_source)
    if program in ("trl", "axolotl", "llama-factory") and not result.parts.get("@packing"):
        result.differences.append(PACKING_NOTE)
    _derive_settings(result, gpus)
    try:
        config.resolve({"model.path": ("m", ""), "data.paths": (("d",), ""), **result.settings})
    except UserError as fault:  # settings that contradict each other
        result.impossible.append(str(fault))
    return result


def _apply_row(result: ImportedRecipe, row: ForeignKey, key: str, value: Any) -> None:
    """Convert one key and record the result."""
    try:
        converted, why = convert_setting(row, value)
    except (AttributeError, TypeError, ValueError, OverflowError):
        converted, why = None, "cannot be read; correct it"
    shown = json.dumps(value, default=str)
    if row.how == "argument" and converted is not None:
        converted = [f"{key}={shown}"]
    if why:
        (result.differences if row.setting == "~" else result.impossible).append(f"{key} = {shown}: {why}")
    elif converted is None or not row.setting:
        result.ineffective.append(
            f"{key}{f': {row.why}' if row.why and row.setting not in ('!', '~') else f' = {shown}'}"
        )
    elif row.setting.startswith("@"):
        result.parts[row.setting] = converted
        result.ineffective.append(f"{key} = {shown}: part of what stands above")
    else:
        if row.how == "fsdp" and "offload" in str(value):
            result.set_value("parallel.offload", "all", key)
        result.set_value(
            row.setting, converted, f"{key} {shown}" if row.setting == "model.path" and converted != value else key
        )


def _import_file(result: ImportedRecipe, key: str, value: Any, directory: Path) -> None:
    """Import a DeepSpeed file that the recipe names."""
    path = next((candidate for candidate in (directory / str(value), Path(str(value))) if candidate.is_file()), None)
    if path is None:
        result.impossible.append(f"{key} = {value}: no such file; copy it there, or import it separately")
        return
    nested = import_recipe(read_recipe(path), "deepspeed", -1)
    for name, (item, source) in nested.settings.items():
        result.set_value(name, item, f"{key}: {source}")
    result.parts |= nested.parts
    result.ineffective += [f"{key}: {line}" for line in nested.ineffective]
    result.impossible += [f"{key}: {line}" for line in nested.impossible]
    result.unknown += [f"{key}: {name}" for name in nested.unknown]


def _derive_settings(result: ImportedRecipe, gpus: int) -> None:
    """Set the settings that combine several keys."""
    parts, settings = result.parts, result.settings
    micro, accumulation = (
        int(result.positive_number("training.micro_batch_size", 1)),
        int(result.positive_number("@accumulation", 1)),
    )
    n_node_gpus = int(result.positive_number("@per_node", 0) * result.positive_number("@nodes", 1))
    gpus = parts["@gpus"] = gpus or int(result.positive_number("@gpus", n_node_gpus or DEFAULT_GPUS))
    split = math.prod(int(result.positive_number(f"parallel.{name}", 1)) for name in ("tp", "cp", "pp"))
    batch_keys = {"training.micro_batch_size", "@accumulation"}
    if "training.global_batch_size" not in settings and batch_keys & {*settings, *parts}:
        batch = max(1, gpus // split) * micro * accumulation
        result.set_value(
            "training.global_batch_size", batch, f"{micro} x {accumulation} on {pluralize(gpus, 'GPU')} (--gpus)"
        )
    if str(parts.get("@dtype")).endswith("float32") and "parallel.numerics" not in settings:
        result.set_value("parallel.numerics", "fp32", "the dtype")
    if steps_per_epoch := int(result.positive_number("@max_steps_per_epoch", 0)):
        result.set_value(
            "training.max_steps",
            steps_per_epoch * math.ceil(result.positive_number("training.epochs", 1)),
            f"{steps_per_epoch} in each epoch",
        )
    if "@beta1" in parts or "@beta2" in parts:
        betas = settings.get("optimizer.betas", ((0.9, 0.999), ""))[0]
        result.set_value("optimizer.betas", [parts.get("@beta1", betas[0]), parts.get("@beta2", betas[1])], "the betas")
    if min_lr_share := result.positive_number("@min_lr_rate", 0):
        result.set_value(
            "optimizer.min_lr",
            float(f"{min_lr_share * result.positive_number('optimizer.lr', 0):.12g}"),
            f"{min_lr_share:g} of the rate",
        )
    _derive_data_settings(result)
    _derive_adapter(result)


def _derive_data_settings(result: ImportedRecipe) -> None:
    parts, settings = result.parts, result.settings
    if parts.get("@eval_strategy") in ("no", False) or parts.get("@validation") is False:
        result.drop("evaluation.every", "nothing is evaluated")
    elif "evaluation.every" not in settings and (
        parts.get("@eval_strategy") == "epoch"
        or {"evaluation.fraction", "evaluation.paths", "@evals_per_epoch"} & {*settings, *parts}
    ):
        result.set_value("evaluation.every", "epoch", "evaluations")
    if not result.positive_number("evaluation.fraction", 0):
        settings.pop("evaluation.fraction", None)
    if not {"evaluation.fraction", "evaluation.paths"} & {*settings}:
        result.drop("evaluation.every", "there is no data to evaluate on: set evaluation.fraction or .paths")
    if any(name.startswith("tracking.") for name in settings) and "tracking.to" not in settings:
        result.set_value("tracking.to", ["wandb"], "its project")
    for name in ("fraction", "paths", "micro_batch_size") if "evaluation.every" not in settings else ():
        result.drop(f"evaluation.{name}", "nothing is evaluated")
    for part, field_name in (("@text_field", "text"), ("@messages_field", "messages")):
        if parts.get(part, field_name) not in (field_name, "conversations"):
            result.set_value("data.fields", [f"{field_name}={parts[part]}"], "the field's name")
    if parts.get("@train_on_inputs"):
        result.set_value("data.train_on", ["assistant", "user", "system", "tool"], "training on inputs")
    if "@save_interval" in parts and settings.get("checkpoint.every", ("",))[0] != "0":
        result.set_value("checkpoint.every", parts["@save_interval"], "the interval")
    part_names = {*parts, *(f"{name} {value}" for name, value in parts.items())}
    result.impossible += [why for name, why in UNSUPPORTED_PARTS.items() if name in part_names]
    if "@torchtune_data" in parts and "data.paths" not in settings:
        result.impossible.append(
            f"the data of {parts['@torchtune_data']}: name files, or hf://datasets/OWNER/NAME, in data.paths"
        )


def _derive_adapter(result: ImportedRecipe) -> None:
    parts, settings = result.parts, result.settings
    adapter_settings = [name for name in settings if name.startswith("adapter.") and name != "adapter.kind"]
    if "adapter.kind" not in settings and any(settings[name][1] != result.default_source for name in adapter_settings):
        result.set_value("adapter.kind", "lora", "its rank")
    if settings.get("adapter.kind", ("none",))[0] == "none":
        for name in ("adapter.kind", *adapter_settings):
            result.drop(name, "there is no adapter")
        return
    if parts.get("@all_targets") and "adapter.targets" not in settings:
        result.set_value("adapter.targets", ADAPTER_TARGETS, "all linear layers")
    if parts.get("@mlp_targets") and "adapter.targets" in settings:
        value, source = settings["adapter.targets"]
        settings["adapter.targets"] = tuple(dict.fromkeys([*value, *MLP_TARGETS])), f"{source}, and the MLP's"
    result.drop("model.resize_vocabulary", "adapters train no embeddings")


def format_toml(result: ImportedRecipe, recipe: Path, program: str) -> str:
    """Return the TOML file: settings by section with their source keys, then all other keys."""
    lines = [f"# {recipe.name}, a recipe of {program}, in the settings of llama405b (docs/import.md)"]
    for section, names in itertools.groupby(sorted(result.settings), lambda name: name.partition(".")[0]):
        lines += ["", f"[{section}]"]
        for name in names:
            value, source = result.settings[name]
            lines.append(f"{name.partition('.')[2]} = {json.dumps(value, ensure_ascii=False)}  # {source}")
    for title, entries in (
        ("not possible", result.impossible),
        ("otherwise here", result.differences),
        ("not known", result.unknown),
        ("without effect here", result.ineffective),
    ):
        lines += ["", f"# {title}:", *(f"#   {' '.join(entry.split())}" for entry in entries)] if entries else []
    return "\n".join(lines) + "\n"


def _coerce_type(name: str, value: Any) -> Any:
    """Return a value in its setting's type: 1 becomes true, 3.0 becomes 3, text becomes a list."""
    if SETTING_TYPES[name] is int and isinstance(value, float | bool) and math.isfinite(value) and value == int(value):
        return int(value)
    if SETTING_TYPES[name] is bool and isinstance(value, int):
        return bool(value)
    if SETTING_TYPES[name] is float and isinstance(value, int):
        return float(value)
    return value.split(",") if SETTING_TYPES[name] == tuple[str, ...] and isinstance(value, str) else value


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(prog="llama405b import", description=__doc__)
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="the recipe's file")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the settings to FILE [print them]")
    parser.add_argument(
        "--from",
        dest="program",
        metavar="PROGRAM",
        choices=PROGRAM_TABLES,
        help="program of the recipe [detected by its keys]",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=0,
        metavar="N",
        help=f"GPUs of the run, for its global batch [as it says, or {DEFAULT_GPUS}]",
    )
    args = parser.parse_args(argv)
    if args.gpus < 0:
        raise UserError(f"--gpus: {args.gpus} is too small; use 1 or more")
    if args.output and args.output.exists():
        raise UserError(f"--output: {args.output} exists; name another file")
    recipe = read_recipe(args.recipe)
    program = args.program or detect_program(recipe, args.recipe)
    result = import_recipe(recipe, program, args.gpus, args.recipe.parent)
    text = format_toml(result, args.recipe, program)
    if args.output is None:
        print(text, end="")
        return EXIT_FAILED if result.impossible or result.unknown else EXIT_OK
    try:
        write_atomic(args.output, text)
    except OSError as error:
        raise UserError(f"--output: {args.output} cannot be written ({reason_of(error)}); name another file") from None
    n_settings, n_ineffective = pluralize(len(result.settings), "setting"), pluralize(len(result.ineffective), "key")
    print(f"{args.output}: {n_settings} of a recipe of {program}; without effect here: {n_ineffective}")
    for line in (
        *(f"not possible: {entry}" for entry in result.impossible),
        *(f"not known: {entry}" for entry in result.unknown),
        *(f"otherwise here: {entry}" for entry in result.differences),
    ):
        print(line)
    print(f"train with it: {program_name()} launch HOSTS --config {args.output}")
    try:
        predict.main(["--config", str(args.output), "--gpus", str(result.parts["@gpus"])])
    except UserError as error:  # the model is not on this machine, or settings contradict each other
        print(f"no plan: {error}")
    return EXIT_FAILED if result.impossible or result.unknown else EXIT_OK
