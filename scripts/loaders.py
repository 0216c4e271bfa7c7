"""Have others read an export of each family, and write docs/loaders.md.

    .venv/bin/python scripts/loaders.py PLACE

PLACE has what serves models, of which only the readers of configuration and tokenizer are called, so that no GPU is needed:

    pip install --no-deps --target PLACE vllm sglang orjson psutil pybase64 pillow starlette pyzmq traitlets dill sentencepiece
"""

import concurrent.futures
import datetime
import importlib.metadata
import multiprocessing
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "rigs"), str(ROOT), str(ROOT / "tools")]
import loaders  # noqa: E402

LOADERS = ("transformers", "safetensors", "gguf", "vllm", "sglang")  # of whole models
PAGE = """# Tested readers of an export

`scripts/loaders.py` trains a model of each family for one step with a custom chat template, exports it, and reads it with other programs.
Versions ({date}): {versions}.
Of vLLM and sglang only the configuration and tokenizer readers are tested, and of llama.cpp (gguf) only the converter's.

A cell lists what a reader looks for and finds as trained; OTHERWISE marks a difference.
The items: architecture, token ids of a text, chat template's output (chat), end tokens (ends), tensor names, logits of the files.

| family | {loaders} | peft (adapter) |
|---|{lines}---|
{rows}

Qwen 2 has the tokenizer of another model here.
transformers and the trainer then use transformers' Qwen2Tokenizer, because of the model type.
sglang, and readers of an adapter's directory, use tokenizer.json as it is.
Published Qwen files were not tested.
"""


def main(place: Path) -> int:
    """Try all; returns 1 where something is read otherwise."""
    apart = {"gguf": ROOT / ".venv/gguf", "peft": ROOT / ".venv/peft", "vllm": place, "sglang": place}
    rows, failed = [], 0
    for family in loaders.FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            right, exported = loaders.trained(family, Path(scratch))
            right.logits = alone("safetensors", exported["whole"], None).logits
            cells = [cell(right, alone(name, exported["whole"], apart.get(name))) for name in LOADERS]
            merged = alone("transformers", exported["merged"], None)
            cells.append(cell(merged, alone("peft", exported["adapter"], apart["peft"])))
            failed += sum("OTHERWISE" in each for each in cells)
            rows.append(f"| {family} | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    found = {name: importlib.metadata.version(name) for name in ("transformers", "safetensors")} | {
        name: version_in(where, name) for name, where in apart.items()
    }
    page = PAGE.format(
        date=datetime.datetime.now(datetime.UTC).date(),
        versions=", ".join(f"{name} {version}" for name, version in found.items()),
        loaders=" | ".join(LOADERS),
        lines="---|" * len(LOADERS),
        rows="\n".join(rows),
    )
    (ROOT / "docs" / "loaders.md").write_text(page)
    return int(failed > 0)


def alone(name: str, directory: Path, packages: Path | None) -> loaders.Reading:
    """Read in a process of its own: some of these change what others import."""
    spawning = multiprocessing.get_context("spawn")
    usual = [*sys.path]
    sys.path += [str(packages)] if packages else []  # the new process has this from its first import on
    with concurrent.futures.ProcessPoolExecutor(1, spawning) as pool:
        found = pool.submit(loaders.read, None, name, directory, packages).result()
    sys.path[:] = usual
    return found


def cell(right: loaders.Reading, found: loaders.Reading) -> str:
    """What was compared, or what differs."""
    names, wrong = loaders.compared(right, found)
    if wrong:
        print("; ".join(wrong), flush=True)
    return ", ".join(
        f"{name} OTHERWISE" if any(each.startswith(f"{name}: ") for each in wrong) else name for name in names
    )


def version_in(place: Path, name: str) -> str:
    """The version of a package in a directory."""
    [found] = importlib.metadata.distributions(name=name, path=[str(place)])
    return found.version


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
