"""Settings under earlier names. A user who types one is told the new name; in files that this program wrote they are translated."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from llama405b.contract.errors import UserError
from llama405b.contract.reader import Json
from llama405b.settings.choices import UNIT_CLASSES

# Earlier names of settings, and of their values after the present name of the setting.
RENAMED = {
    "data.learn": "data.train_on", "training.on_spike": "training.on_loss_spike", "training.spike": "training.loss_spike_factor",
    "checkpoint.place": "checkpoint.storage", "checkpoint.storage node": "local",
    "parallel.fsdp": "parallel.strategy", "parallel.offload states": "optimizer", "parallel.offload full": "all",
    "parallel.loss": "model.loss", "model.loss logits": "full", "model.loss parts": "chunked",
}  # fmt: skip
WRAP = "parallel.wrap"  # the FSDP units as a list of classes: still read, as it is how FSDP recipes say it


def fsdp_units(names: Json) -> dict[str, Json]:
    """Return the settings that ``parallel.wrap`` stands for.

    Raises:
        UserError: There are none for these classes.
    """
    classes = {name for name in names if isinstance(name, str)} if isinstance(names, Sequence) else set[str]()
    for unit, unit_classes in UNIT_CLASSES.items():
        if classes - {"Embedding"} == {*unit_classes}:
            return {"parallel.fsdp_unit": unit, "parallel.fsdp_embedding": "Embedding" in classes}
    raise UserError(
        f"{WRAP} is {names!r}; use LlamaDecoderLayer or LlamaAttention,LlamaMLP, with Embedding or without, or set "
        "parallel.fsdp_unit and parallel.fsdp_embedding"
    )


def translate_setting(key: str, value: Json) -> dict[str, Json]:
    """Return a setting of any version under its present name; a ``parallel.wrap`` is two settings.

    Raises:
        UserError: As ``fsdp_units``.
    """
    if key == WRAP:
        return fsdp_units(value)
    key = RENAMED.get(key, key)
    return {key: RENAMED.get(f"{key} {value}", value)}


def translate_flags(words: Iterable[str]) -> Iterator[str]:
    """Yield a trainer's arguments with present names; what cannot be translated stays, and the trainer refuses it."""
    for word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals or not re.fullmatch(r"\w+\.\w+", key):
            yield word
            continue
        try:
            pairs = translate_setting(key, json.loads(text) if key == WRAP else text)
        except (UserError, ValueError):
            yield word
            continue
        for name, value in pairs.items():
            yield f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
