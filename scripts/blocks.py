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
LAYERS, SHARDS, TP, CP = 5, 8, 3, 2
HEAD = 32  # a head's size, so small that rotary blocks are not large: ROTARY stands for them
DIMENSIONS = {"T": 3328, "h": 4608, "f": 11264, "q": 3072, "k": 1024, "a": 96, "V": 50176}
LOCAL = {"T": 3456, "t": 1152, "h": 4800, "f": 3776, "q": 2560, "k": 512, "a": 80, "V": 16768}  # of a rank with tp
LORA = {"lora": "", "lora_attention": "q k v o", "lora_q_v": "q v"}  # tables, and which matrices have adapters
RANK = 2  # of adapters, whose blocks are not large then: reserved.py counts the rest
LARGE = 1 << 20  # bytes; up to this, blocks are in another pool
ROUND = 512
# Cosines and sines of positions, as the same history has them where they are large; freed in the first layer's backward.
ROTARY = "2Sd 4Sd 4Sd 4Sd -{3} 4Sd 4Sd -{5} 2Sd 2Sd -{1} -{2} -{4} -{6}"
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
#                  With tp: f, a, q, k and V: a rank's own; t: its tokens between matrices; W: the whole vocabulary.
#   -3 -f3 -input  free the section's third block; that of the same layer's forward; or the last one that was kept as input
#   input:33       keep the section's 33rd block, as the input of the next layer; flow: as the gradient, in the backward;
#                  shared: as the head's gradient, to which the embedding adds its own; rotary: as cosines and sines; first: what
#                  the first layer frees
#   workspace:own  cuBLAS's own memory, once
#   gather:layer   FSDP2's: gather a unit (regather: in the backward), drop its weights, reduce its gradients from
#                  a buffer, which scatter makes the rank's own of; table: the embedding's
# _operators, _none: of layers that compute less again (model.activation_checkpointing).
# [whole]: decoder layers are units. The others say what differs. [halves]: attention and MLP are units; [root]: the embedding is none;
# [tied]: the embedding is the head; [fused]: model.fused; [lora]: all matrices are frozen, and have adapters; [lora_tied]: both;
# [tp], [cp]: matrices or sequences are split over ranks; [tp_fused], [cp_fused]: with model.fused.
"""


@dataclasses.dataclass(frozen=True)
class Event:
    """What happened to a block."""

    kind: str  # weight, reduced, scattered, or other
    begins: bool
    number: int  # of the block
    name: str  # its size, as in the table


def main():
    whole, halves = of_kinds("layer"), of_kinds("sublayer")
    root, tied = sections("layer", embedding=False), sections("layer", tied=True)
    fused, fused_halves = of_kinds("layer", fused=True), of_kinds("sublayer", fused=True)
    fused_tied = sections("layer", tied=True, fused=True)
    cp, cp_fused = of_kinds("layer", cp=CP), of_kinds("layer", cp=CP, fused=True)
    for other, usual in ((halves, whole), (cp, whole), (cp_fused, fused)):
        assert without_layers(other) == without_layers(usual)
    assert (fused["embedding"], fused["end"], fused_tied["end"]) == (whole["embedding"], whole["end"], tied["end"])
    lora = {}
    for name, targets in LORA.items():
        lora[name] = of_kinds("layer", lora=RANK, targets=targets)
        lora[f"{name}_halves"] = of_kinds("sublayer", lora=RANK, targets=targets)
    tables = {
        "whole": whole,
        "halves": of_layers(halves),
        "root": {name: root[name] for name in ("embedding", "end")},
        "tied": without_layers(tied),
        "fused": {name: words for name, words in fused.items() if name not in ("embedding", "end")},
        "fused_halves": of_layers(fused_halves),
        "fused_tied": {"head": fused_tied["head"]},
        **{name: found if name == "lora" else of_layers(found) for name, found in lora.items()},
        "lora_tied": without_layers(sections("layer", tied=True, lora=RANK)),
        "tp": of_kinds("layer", tp=TP),
        "tp_fused": of_kinds("layer", tp=TP, fused=True),
        "cp": of_layers(cp),
        "cp_fused": of_layers(cp_fused),
    }
    parts = [ABOUT]
    for table, found in tables.items():
        parts.append(f"\n[{table}]\n")
        for name, words in found.items():
            text = textwrap.fill(" ".join(words), 138, break_on_hyphens=False)
            parts.append(f'{name} = """\n{text}"""\n')
    TABLE.write_text("".join(parts), encoding="ascii")
    return 0


def of_layers(found):
    """The sections of layers."""
    return {name: words for name, words in found.items() if "ward" in name}


def without_layers(found):
    """The sections before, between and after the layers."""
    return {name: found[name] for name in ("embedding", "head", "end")}


def of_kinds(unit, **more):
    """Return the sections, and those of layers that compute less again; all else is alike, but for inputs, which reserved.py frees."""
    usual = sections(unit, **more)
    for kind in ("operators", "none"):
        found = sections(unit, kind=kind, **more)
        for name, words in without_layers(found).items():
            here, there = ([word for word in each if word != "-input"] for each in (words, usual[name]))
            assert here == there, f"{name} of {kind} is another"
        usual |= {f"{name}_{kind}": found[name] for name in ("forward", "backward")}
    return usual


def sections(unit, *, embedding=True, tied=False, kind="full", fused=False, tp=1, cp=1, **lora):
    """Run a step, and return its sections."""
    more = {"unit": unit, "embedding": embedding, "recompute": kind, "fused": fused, "tp": tp, "cp": cp, **lora}
    sizes, last = LOCAL if tp > 1 else DIMENSIONS, "mlp" if unit == "sublayer" else "layer"  # that ends a forward
    setting = Setting("llama3.1-8b", SHARDS * tp, "all", seq_len=sizes["T"] * cp, **more)
    config = ARCHITECTURES[setting.model] | shape(sizes, tp) | {"tie_word_embeddings": tied}
    with tempfile.TemporaryDirectory() as scratch:
        history = Path(scratch) / "history"
        measure(setting, config, history)
        events = list(computing(pickle.loads(history.read_bytes()), sizes | {"W": sizes["V"] * tp}))
    return worded(cut(list(with_units(events)), last, "2Th" if fused else "4Th"), tied=tied, adapted=bool(lora))


def shape(sizes, tp):
    """The model of which a rank has these sizes."""
    return {
        "hidden_size": sizes["h"], "intermediate_size": tp * sizes["f"], "num_attention_heads": tp * sizes["a"],
        "num_key_value_heads": tp * sizes["k"] // HEAD, "head_dim": HEAD, "vocab_size": tp * sizes["V"],
        "num_hidden_layers": LAYERS,
    }  # fmt: skip


def computing(history, sizes):
    """Yield what happened on the stream that computes, and that a gradient was made on another."""
    stream = next(each["stream"] for each in history if "alloc_all_gather_outputs" in functions(each))
    numbers = {}
    for number, each in enumerate(history):
        if each["size"] <= LARGE:
            continue
        if each["stream"] != stream:
            if each["action"] == "alloc" and "foreach_reduce" in functions(each):
                yield Event("scattered", True, number, size_name(SHARDS * each["size"], "reduced", sizes))
            continue
        if each["action"] == "alloc":
            kind = "weight" if "alloc_all_gather_outputs" in functions(each) else "other"
            kind = "reduced" if "foreach_reduce" in functions(each) else kind
            numbers[each["addr"]] = Event(kind, True, number, size_name(each["size"], kind, sizes))
            yield numbers[each["addr"]]
        elif each["action"] == "free_completed" and each["addr"] in numbers:
            yield dataclasses.replace(numbers.pop(each["addr"]), begins=False)


def functions(event):
    return [frame["name"] for frame in event.get("frames", ())]


def size_name(size, kind, sizes):
    """Name a block by its size.

    Raises:
        LookupError: It is none of the known products.
    """
    if kind == "reduced":  # in FP32, with norms
        rows = {name: sum(sizes[letters[1]] for letters in weights.split()) for weights, name in UNITS.items()}
        of_units = (name for name, n in rows.items() if 0 <= size - 4 * sizes["h"] * n <= 8 * sizes["h"])
        return next(of_units, "layer")  # of adapters alone
    features = [letter for letter in sizes if letter not in "Tt"]
    for factor in (1, 2, 4):
        for first, second in (*((first, second) for second in features for first in "Th"), ("t", "h")):
            product = sizes.get(first, 0) * sizes[second]
            if size == -(-factor * product // ROUND) * ROUND:
                return f"{factor}{first}{second}"
    h = sizes["h"]
    if size == 8 * sizes.get("t", sizes["T"]) * h:  # partial sums: reserved.py counts them
        return "sum"
    if abs(size - 4.4 * sizes["T"] * h) < h * 4:  # of the embedding's gradient: T and a tenth of it
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


def cut(events, last, norm):
    """Cut a step into sections: the embedding, each layer's forward, the head, each layer's backward, and the end."""
    begin = ends_of_forward(events, last, norm)
    backward = [i for i, event in enumerate(events) if event == f"gather:{last}" and i >= begin[-1]]
    length = backward[-1] - backward[-2]
    edges = [0, *begin, *backward, backward[-1] + length, len(events)]
    return [events[a:b] for a, b in itertools.pairwise(edges)]


def ends_of_forward(events, last, norm):
    """Return where each layer's forward begins, and where the last one ends; ``norm``: the block that the next begins with, if no unit."""
    ends = [i + 1 for i, event in enumerate(events) if event == f"drop:{last}"][:LAYERS]
    if last != "mlp":
        return [events.index(f"gather:{last}"), *ends]
    first = 1 + events.index("drop:table")
    return [first, *(begins_norm(events, end, norm) for end in ends)]


def begins_norm(events, start, norm):
    """Return where a unit or a norm begins after the sum of the residual, which is the first block."""
    begun = [i for i in range(start, start + 12) if isinstance(events[i], str) or events[i].begins]
    return next(i for i in begun[1:] if isinstance(events[i], str) or events[i].name == norm)


def worded(parts, *, tied, adapted):
    """Return the sections in words; of layers, which must be alike, one of the middle."""
    names = ["embedding", *["forward"] * LAYERS, "head", *["backward"] * LAYERS, "end"]
    places, found = {}, {}
    if adapted:  # the first layer's input needs no gradient, and the embedding has none: they are left out
        names, found["end"] = ["embedding", "first", *names[2:-2]], ["-flow", *["drop:table"] * tied]
    for part, (name, events) in enumerate(zip(names, parts, strict=not adapted)):
        words = [word for event in events for word in word_of(event, name, part, places)]
        # The last layer's, if that does not keep it.
        words = words[words[0] == "-input" : len(words) - (name == "forward" and words[-1] == "-input")]
        if name == "forward" and len(alive(found["embedding"])) > 1:  # with tp: the first layer frees its sum
            words[1 : 1 + (words[1] == "-input")] = ["-first"]
        kept = {"forward": "input:", "head": "flow:"}.get(name)
        if kept:
            words.append(f"{kept}{alive(words)[-1]}")
        assert found.setdefault(name, words) == words, f"{name}: layers are not alike"
    found.pop("first", None)
    if adapted:  # what all adapters of a layer are reduced from and to, which is not large here
        has_reduce = any(word.startswith("reduce:") for word in found["backward"])
        found["backward"] += [*["reduce:layer"] * (not has_reduce), "scatter:layer"]
    count, n_rotary = n_blocks(found["embedding"]), n_blocks(ROTARY.split())
    *others, kept = alive(found["embedding"])
    rotary = ROTARY.format(*range(count, count + 1 + n_rotary)).split()
    found["embedding"] += [*rotary, *(f"first:{number}" for number in others), f"input:{kept}"]
    found["embedding"] += [f"rotary:{count + number}" for number in (n_rotary - 1, n_rotary)]
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
    return [number for number in range(1, n_blocks(words) + 1) if f"-{number}" not in words]


def n_blocks(words):
    """Return how many blocks a section allocates."""
    return sum(bool(re.match(r"\d|sum", word)) for word in words)


if __name__ == "__main__":
    sys.exit(main())
