"""Write llama405b/predict/blocks.toml: what torch allocates in a step, in order, from its allocator's own history. No GPU is needed.

    .venv/bin/python scripts/blocks.py

On the stand-in for CUDA, see reserved.py. Runs a few layers of a shape in which every size is one product of the model's dimensions and
no other, so that a block's bytes tell what it is. With blocks of any other size, or layers that are not alike, it fails.
"""

import dataclasses
import itertools
import pickle
import re
import sys
import tempfile
import textwrap
from pathlib import Path

from reserved import ARCHITECTURES, ROOT, Setting, measure

TABLE = ROOT / "llama405b/predict/blocks.toml"
LAYERS, T, WORLD = 5, 3328, 8
DIMENSIONS = {"h": 4608, "f": 11264, "q": 3072, "k": 1024, "a": 96, "V": 50176}
HEAD = 32  # a head's size, so small that rotary blocks are not large: ROTARY stands for them
SHAPE = {
    "hidden_size": DIMENSIONS["h"],
    "intermediate_size": DIMENSIONS["f"],
    "num_attention_heads": DIMENSIONS["a"],
    "num_key_value_heads": DIMENSIONS["k"] // HEAD,
    "head_dim": HEAD,
    "vocab_size": DIMENSIONS["V"],
    "num_hidden_layers": LAYERS,
}
RANK = 2  # of adapters, whose blocks are not large then: reserved.py counts the rest
LARGE = 1 << 20  # bytes; up to this, blocks are in another pool
ROUND = 512
# Cosines and sines of positions, as the same history has them where they are large; freed in the first layer's backward.
ROTARY = "2Sd 4Sd 4Sd 4Sd -4 4Sd 4Sd -6 2Sd 2Sd -2 -3 -5 -7 input:1 rotary:8 rotary:9"
UNITS = {
    "hq hk hk hq hf hf hf": "layer",
    "hq hk hk hq": "attention",
    "hf hf hf": "mlp",
    "hV": "table",
}  # by their weights
ABOUT = """\
# What torch allocates in a step on the stream that computes, in order: blocks of more than 1 MiB, from its allocator's own history with
# torch 2.13 and transformers 5.17 (scripts/blocks.py writes this file). A section is a list of
#   2Th            a block of 2 * T * h bytes. T: tokens of a micro-batch; S: of a sequence; h: hidden size; f: intermediate size;
#                  a: heads; d: the size of one; q: of all; k: of all key-value heads; V: vocabulary. sum: room for a sum over tokens
#   -3 -f3 -input  free the section's third block; that of the same layer's forward; or the last one that was kept as input
#   input:33       keep the section's 33rd block, as the input of the next layer; flow: as the gradient, in the backward;
#                  shared: as the head's gradient, to which the embedding adds its own; rotary: as cosines and sines
#   workspace:own  cuBLAS's own memory, once
#   gather:layer   FSDP2's: gather a unit (regather: in the backward), drop its weights, reduce its gradients from
#                  a buffer, which scatter makes the rank's own of; table: the embedding's
# _operators, _none: of layers that compute less again (model.activation_checkpointing).
# [whole]: decoder layers are units. The others say what differs. [halves]: attention and MLP are units; [root]: the embedding is none;
# [tied]: the embedding is the head; [fused]: model.fused; [lora]: all matrices are frozen, and have adapters; [lora_tied]: both.
"""


@dataclasses.dataclass(frozen=True)
class Event:
    """What happened to a block."""

    kind: str  # weight, reduced, scattered, or other
    begins: bool
    number: int  # of the block
    name: str  # its size, as in the table


def main():
    apart = sections("layer")
    halves = sections("sublayer", last="mlp")
    root, tied = sections("layer", embedding=False), sections("layer", tied=True)
    assert (halves["embedding"], halves["head"], halves["end"]) == (apart["embedding"], apart["head"], apart["end"])
    for kind in ("operators", "none"):
        apart |= of_kind(kind, apart, "layer")
        halves |= of_kind(kind, apart, "sublayer", last="mlp")
    lora, lora_tied = (sections("layer", tied=tied, lora=RANK) for tied in (False, True))
    fused, fused_tied = (sections("layer", tied=tied, fused=True) for tied in (False, True))
    fused_halves = sections("sublayer", last="mlp", fused=True)
    for kind in ("operators", "none"):
        fused |= of_kind(kind, fused, "layer", fused=True)
        fused_halves |= of_kind(kind, fused, "sublayer", last="mlp", fused=True)
        lora |= of_kind(kind, lora, "layer", lora=RANK)
    assert (fused["embedding"], fused["end"], fused_tied["end"]) == (apart["embedding"], apart["end"], tied["end"])
    tables = {
        "whole": apart,
        "halves": {name: words for name, words in halves.items() if "ward" in name},
        "root": {name: root[name] for name in ("embedding", "end")},
        "tied": {name: tied[name] for name in ("embedding", "head", "end")},
        "fused": {name: words for name, words in fused.items() if "ward" in name or name == "head"},
        "fused_halves": {name: words for name, words in fused_halves.items() if "ward" in name},
        "fused_tied": {"head": fused_tied["head"]},
        "lora": lora,
        "lora_tied": {name: lora_tied[name] for name in ("embedding", "head", "end")},
    }
    parts = [ABOUT]
    for table, found in tables.items():
        parts.append(f"\n[{table}]\n")
        for name, words in found.items():
            text = textwrap.fill(" ".join(words), 138, break_on_hyphens=False)
            parts.append(f'{name} = """\n{text}"""\n')
    TABLE.write_text("".join(parts), encoding="ascii")
    return 0


def of_kind(kind, usual, unit, **more):
    """Return what layers do that compute less again; all else must be as ``usual``, but for inputs, which reserved.py frees."""
    found = sections(unit, kind=kind, **more)
    for name in ("embedding", "head", "end"):
        here, there = ([word for word in words if word != "-input"] for words in (found[name], usual[name]))
        assert here == there, f"{name} of {kind} is another"
    return {f"{name}_{kind}": found[name] for name in ("forward", "backward")}


def sections(unit, *, embedding=True, last="layer", tied=False, kind="full", lora=0, fused=False):
    """Run a step, and return its sections; ``last``: the unit that ends a layer's forward."""
    more = {"unit": unit, "embedding": embedding, "recompute": kind, "lora": lora, "fused": fused}
    setting = Setting("llama3.1-8b", WORLD, "all", seq_len=T, **more)
    config = ARCHITECTURES[setting.model] | SHAPE | {"tie_word_embeddings": tied}
    with tempfile.TemporaryDirectory() as scratch:
        history = Path(scratch) / "history"
        measure(setting, config, history)
        events = list(computing(pickle.loads(history.read_bytes())))
    after = {"none": 3 - fused}.get(kind, 4) if last == "mlp" else 0  # its output follows, and what is freed
    return worded(cut(list(with_units(events)), last, after), tied=tied, adapted=bool(lora))


def computing(history):
    """Yield what happened on the stream that computes, and that a gradient was made on another."""
    stream = next(each["stream"] for each in history if "alloc_all_gather_outputs" in functions(each))
    numbers = {}
    for number, each in enumerate(history):
        if each["size"] <= LARGE:
            continue
        if each["stream"] != stream:
            if each["action"] == "alloc" and "foreach_reduce" in functions(each):
                yield Event("scattered", True, number, size_name(WORLD * each["size"], "reduced"))
            continue
        if each["action"] == "alloc":
            kind = "weight" if "alloc_all_gather_outputs" in functions(each) else "other"
            kind = "reduced" if "foreach_reduce" in functions(each) else kind
            numbers[each["addr"]] = Event(kind, True, number, size_name(each["size"], kind))
            yield numbers[each["addr"]]
        elif each["action"] == "free_completed" and each["addr"] in numbers:
            yield dataclasses.replace(numbers.pop(each["addr"]), begins=False)


def functions(event):
    return [frame["name"] for frame in event.get("frames", ())]


def size_name(size, kind):
    """Name a block by its size.

    Raises:
        LookupError: It is none of the known products.
    """
    if kind == "reduced":  # in FP32, with norms
        rows = {name: sum(DIMENSIONS[letters[1]] for letters in weights.split()) for weights, name in UNITS.items()}
        of_units = (name for name, n in rows.items() if 0 <= size - 4 * DIMENSIONS["h"] * n <= 8 * DIMENSIONS["h"])
        return next(of_units, "layer")  # of adapters alone
    for factor in (1, 2, 4):
        for letter, n in DIMENSIONS.items():
            for name, product in ((f"T{letter}", T * n), (f"h{letter}", DIMENSIONS["h"] * n)):
                if size == -(-factor * product // ROUND) * ROUND:
                    return f"{factor}{name}"
    h = DIMENSIONS["h"]
    if size == 8 * T * h:  # partial sums: reserved.py counts them
        return "sum"
    if abs(size - 4.4 * T * h) < h * 4:  # of the embedding's gradient: T and a tenth of it
        return "4.4Th"
    raise LookupError(f"a block of {size} bytes")


def with_units(events):
    """Yield events, or what FSDP2 does to a unit, as words, in place of those of its weights."""
    for is_weights, run in runs(events):
        if not is_weights:
            yield from run
            continue
        unit = UNITS[" ".join(event.name[1:] for event in run)]
        yield ("gather:" if run[0].begins else "drop:") + unit


def runs(events):
    """Yield runs of events that are alike: whether they are of weights, and they."""
    run = []
    for event in events:
        if run and (event.kind == "weight", event.begins) != (run[-1].kind == "weight", run[-1].begins):
            yield run[0].kind == "weight", run
            run = []
        run.append(event)
    yield run[0].kind == "weight", run


def cut(events, last, after):
    """Cut a step into sections: the embedding, each layer's forward, the head, each layer's backward, and the end."""
    begin = ends_of_forward(events, last, after)
    backward = [i for i, event in enumerate(events) if event == f"gather:{last}" and i >= begin[-1]]
    length = backward[-1] - backward[-2]
    edges = [0, *begin, *backward, backward[-1] + length, len(events)]
    return [events[a:b] for a, b in itertools.pairwise(edges)]


def ends_of_forward(events, last, after):
    """Return where each layer's forward begins, and where the last one ends, so many events after its unit."""
    drops = [i + 1 + after for i, event in enumerate(events) if event == f"drop:{last}"][:LAYERS]
    first = drops[0] - (drops[1] - drops[0]) if last == "mlp" else events.index(f"gather:{last}")
    return [first, *drops]


def worded(parts, *, tied, adapted):
    """Return the sections in words; of layers, which must be alike, one of the middle."""
    names = ["embedding", *["forward"] * LAYERS, "head", *["backward"] * LAYERS, "end"]
    places, found = {}, {}
    if adapted:  # the first layer's input needs no gradient, and the embedding has none: they are left out
        names, found["end"] = ["embedding", "first", *names[2:-2]], ["-flow", *["drop:table"] * tied]
    for part, (name, events) in enumerate(zip(names, parts, strict=not adapted)):
        words = [word for event in events for word in word_of(event, name, part, places)]
        words = words[words[0] == "-input" :]  # the last layer's, if that does not keep it
        kept = {"forward": "input:", "head": "flow:"}.get(name)
        if kept:
            words.append(f"{kept}{alive(words)[-1]}")
        assert found.setdefault(name, words) == words, f"{name}: layers are not alike"
    found.pop("first", None)
    found["backward"] += ["scatter:layer"] * adapted  # which is not large
    found["embedding"] += ROTARY.split()
    found["end"] = ["-rotary", "-rotary", *found["end"]]
    if tied and not adapted:
        found["head"].append(f"shared:{alive(found['head'])[0]}")
    first = next(i for i, word in enumerate(found["forward"]) if word == "2Tq")
    found["forward"].insert(first + 1, "workspace:own")
    return found


def word_of(event, name, part, places):
    """Return an event's word; none for a buffer that is freed after its gradients were reduced."""
    if isinstance(event, str):
        event = event.replace("table", "head") if name == "head" else event
        return [event.replace("gather", "regather") if name == "backward" else event]
    if event.kind in ("reduced", "scattered"):
        verb, unit = "reduce" if event.kind == "reduced" else "scatter", "head" if name == "head" else event.name
        return [f"{verb}:{unit}"] if event.begins else []
    if event.begins:
        places[event.number] = part, 1 + sum(place == part for place, _ in places.values())
        return [event.name]
    where, number = places[event.number]
    if where == part:
        return [f"-{number}"]
    if where == 2 * LAYERS + 2 - part:  # of the same layer's forward
        return [f"-f{number}"]
    if where <= LAYERS:
        return ["-input"]
    return ["-shared" if event.name == "2hV" else "-flow"]


def alive(words):
    """Return which blocks of a section are not freed in it."""
    n_blocks = sum(bool(re.match(r"\d|sum", word)) for word in words)
    return [number for number in range(1, n_blocks + 1) if f"-{number}" not in words]


if __name__ == "__main__":
    sys.exit(main())
