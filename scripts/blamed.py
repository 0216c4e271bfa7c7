"""Plant a document that does not belong among 63 that do, a hundred times, and see how often it is the one to blame.

    .venv/bin/python scripts/blamed.py [--steps 1400] [--each 20] [--healthy 20]

A small model learns bodies of the standard library's functions, given their heads, by the trainer itself on two ranks. Then each of five
kinds of document (repeated text, another language, shuffled tokens, a huge table, a label at the wrong place) is planted among functions
that it has not seen, and measured as `llama405b blame` does; steps without one follow. docs/measurements/blame.md has what it printed.
"""

import argparse
import ast
import collections
import contextlib
import json
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from llama405b.commands.blame_step import MIN_BLAMED_SCORE, iterate_documents, measure_document, score_documents
from llama405b.data.batches import batches_from_files
from llama405b.data.demo_model import make_demo
from llama405b.data.tokenizer import read_tokenizer
from llama405b.data.tokens import ProgressReport, load_or_tokenize
from llama405b.distributed.ranks import Rank, with_mesh
from llama405b.model import llama
from llama405b.optim.build_updater import OnDeviceUpdate
from llama405b.optim.optimizer import build_optimizer
from llama405b.parallel.load_weights import load
from llama405b.parallel.passes import build_forward_backward
from llama405b.parallel.split import shard_layout_of, split_model
from llama405b.settings.schema import Data, Model, Optimizer, Parallel

SEQ, DOCUMENTS, UNSEEN, LONGEST = 256, 64, 1200, 900
KINDS = ("repeated text", "another language", "shuffled tokens", "a huge table", "a label at the wrong place")
GERMAN = (
    "Der alte Mann ging am frühen Morgen zum Markt, um frisches Brot zu kaufen.",
    "Im Winter liegt auf den Bergen so viel Schnee, dass niemand hinauf kann.",
    "Die Kinder spielten bis zum Abend im Garten hinter dem Haus.",
    "Wir haben gestern lange über die neue Brücke gesprochen.",
    "Niemand wusste, warum der Zug schon wieder eine Stunde Verspätung hatte.",
    "Meine Schwester arbeitet seit vielen Jahren in einer kleinen Bäckerei.",
    "Wenn es morgen regnet, bleiben wir zu Hause und lesen ein Buch.",
    "Das Wasser des Flusses war so klar, dass man die Steine zählen konnte.",
    "Er hatte seinen Schlüssel vergessen und wartete vor der Tür.",
    "Am Ende des Weges steht eine Kirche, deren Glocken man weit hört.",
)


def main():
    """Train, plant, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 1400), ("each", 20), ("healthy", 20), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--place", type=Path, help="keep the model here, and use it again")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        place = args.place or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.mkdir(exist_ok=True)
        documents = functions()
        random.Random(0).shuffle(documents)
        trained(place, documents[:-UNSEEN], args.steps)
        judge(place, documents[-UNSEEN:], args)


def functions():
    """Every function of the standard library that has a docstring: its head, and the rest."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        with contextlib.suppress(SyntaxError, ValueError):
            text = file.read_text(encoding="utf-8")
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                if (
                    not isinstance(node, ast.FunctionDef)
                    or len(node.body) < 2
                    or len(ast.get_docstring(node) or "") < 40
                ):
                    continue
                head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n"
                rest = "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])
                if len(head) < 400 and len(rest) >= 120:
                    found.append((head, rest[:LONGEST]))
    return found


def write(path, documents):
    """Write documents as prompts and completions."""
    path.write_text("".join(json.dumps({"prompt": head, "completion": rest}) + "\n" for head, rest in documents))


def trained(place, documents, steps):
    """Have the trainer learn them, unless it has."""
    if (place / "learnt").exists():
        return
    if not (place / "demo").exists():
        make_demo(place / "demo")
    write(place / "train.jsonl", documents)
    words = {
        "model.path": place / "demo", "data.paths": place / "train.jsonl", "data.seq_len": SEQ, "training.max_steps": steps,
        "training.global_batch_size": 8, "training.micro_batch_size": 4, "optimizer.lr": 3e-3, "optimizer.min_lr": 3e-4,
        "optimizer.warmup": 20, "evaluation.every": 0, "evaluation.fraction": 0, "checkpoint.every": 10**6, "parallel.device": "cpu",
        "data.max_bytes": 0,
    }  # fmt: skip
    flags = [f"--{key}={value}" for key, value in words.items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "llama405b.train"]
    subprocess.run([*torchrun, "--preset", "demo", "--run-dir", str(place / "run"), *flags], check=True)
    exported = [
        sys.executable,
        "-m",
        "llama405b_tools.cli",
        "export",
        str(place / "run"),
        str(place / "learnt"),
        "--dtype",
        "fp32",
    ]
    subprocess.run(exported, check=True)


def planted(kind, documents, tokenizer, draw):
    """Return a document that does not belong."""
    head, rest = draw.choice(documents)
    size = len(rest)
    if kind == "repeated text":
        rest = (rest.strip().splitlines()[0] + "\n") * 60
    elif kind == "another language":
        rest = " ".join(draw.choice(GERMAN) for _ in range(30))
    elif kind == "shuffled tokens":
        ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
        draw.shuffle(ids)
        rest = tokenizer.decode(ids)
    elif kind == "a huge table":
        rest = "\n".join(",".join(f"{draw.uniform(0, 9999):.2f}" for _ in range(8)) for _ in range(30))
        size = 2 * size
    else:
        head, rest = rest, head
    return head, rest[:size]


def judge(place, documents, args):
    """Plant, measure, and count."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel = Parallel(numerics="fp32", device="cpu")
    me = with_mesh(Rank(0, 1, 0, "here", torch.device("cpu")), parallel)
    whole = llama.build_on_meta(llama.read_hf_config(place / "learnt"), "sdpa", llama.compute_dtype("fp32"))
    holdings = shard_layout_of(whole, parallel, me)
    model = split_model(whole, parallel, me)
    load(model, place / "learnt", "rank0", me, lambda *_: None, shard_layout=holdings)
    updater = OnDeviceUpdate(model, model, build_optimizer(model, Optimizer()))
    passes, tokenizer = build_forward_backward(parallel, model, me, Model()), read_tokenizer(place / "learnt")
    first, named, scores = collections.Counter(), collections.Counter(), []
    draw = random.Random(args.seed)
    for kind in [kind for kind in KINDS for _ in range(args.each)] + [""] * args.healthy:
        step = draw.sample(documents, DOCUMENTS - bool(kind))
        at = draw.randrange(DOCUMENTS) if kind else -1
        if kind:
            step.insert(at, planted(kind, documents, tokenizer, draw))
        write(place / "step.jsonl", step)
        data = Data(paths=(str(place / "step.jsonl"),), seq_len=SEQ, long_documents="truncate")
        batches = batches_from_files(
            data, place, [load_or_tokenize(data, place / "learnt", place, ProgressReport(*[lambda *_: None] * 3))]
        )
        pieces = iterate_documents(batches, range(batches.n_sequences))
        result = score_documents(
            list(filter(None, (measure_document(passes, updater, me, batches, piece) for piece in pieces)))
        )
        for file in place.glob("tokens-*"):
            file.unlink()
        if kind:
            worst = result[0].measured.piece.name.endswith(f"step.jsonl {at + 1}")
            first[kind] += worst
            named[kind] += worst and result[0].score >= MIN_BLAMED_SCORE
        else:
            scores.append(result[0].score)
        print(
            f"{kind or 'healthy'}: {result[0].score:.1f}, {result[1].score:.1f} {result[0].measured}",
            file=sys.stderr,
            flush=True,
        )
    for kind in KINDS:
        print(f"{kind}: first of {DOCUMENTS} in {first[kind]} of {args.each} steps, blamed in {named[kind]}")
    print(f"all: first in {first.total()} of {args.each * len(KINDS)}, blamed in {named.total()}")
    blamed = sum(score >= MIN_BLAMED_SCORE for score in scores)
    said = f"the highest score is {statistics.median(scores or [0]):.1f} in the median, at most {max(scores, default=0):.1f}"
    print(f"healthy: {said}; blamed in {blamed} of {len(scores)}")


if __name__ == "__main__":
    main()
