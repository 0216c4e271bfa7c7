"""Which meshes a model, its sequences and the hosts allow; a refusal names a size that would work. Pure."""

from collections.abc import Iterator

from llama405b.contract.errors import UserError
from llama405b.contract.mesh import Axes, nearest_divisor
from llama405b.contract.phrases import counted
from llama405b.contract.schema import Parallel
from llama405b.contract.weights import Llama


def check_mesh(axes: Axes, parallel: Parallel, llama: Llama | None, seq_len: int, ranks_per_host: int) -> None:
    """Refuse a mesh that does not suit. ``llama``: None if it is not known yet; then only the hosts are looked at.

    Raises:
        UserError: Names the setting, why, and what to use.
    """
    for key, fault in faults_of_mesh(axes, parallel, llama, seq_len, ranks_per_host):
        raise UserError(f"--{key}: {fault}")


def faults_of_mesh(
    axes: Axes, parallel: Parallel, llama: Llama | None, seq_len: int, ranks_per_host: int
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a mesh: the setting, and a message that follows its name."""
    if llama:
        yield from _of_matrices(axes, llama, seq_len)
        yield from _of_sequences(axes, llama, seq_len)
        yield from _of_layers(axes, parallel, llama)
    if not parallel.tp_across_hosts and (axes.tp > ranks_per_host or ranks_per_host % axes.tp):
        fits = nearest_divisor(ranks_per_host, axes.tp)
        yield (
            "parallel.tp",
            f"tp {axes.tp} would reach over hosts of {counted(ranks_per_host, 'rank')}, and every layer would wait for the network; "
            f"use tp {fits}, or --parallel.tp_across_hosts true",
        )


def _of_matrices(axes: Axes, llama: Llama, seq_len: int) -> Iterator[tuple[str, str]]:
    divided = {
        "attention heads": llama.heads,
        "key-value heads": llama.kv_heads,
        "rows of the MLP": llama.intermediate,
        "tokens of the vocabulary": llama.vocab,
        "tokens of a sequence": seq_len,
    }
    for what, size in divided.items():
        if size % axes.tp:
            fits = next(n for n in reversed(range(1, axes.tp)) if not any(each % n for each in divided.values()))
            yield "parallel.tp", f"{size} {what} cannot be divided by {axes.tp}; use tp {fits}"


def _of_sequences(axes: Axes, llama: Llama, seq_len: int) -> Iterator[tuple[str, str]]:
    for what, size in (("attention heads", llama.heads), ("tokens of a sequence", seq_len)):
        if size % axes.tp == 0 and size // axes.tp % axes.cp:
            fits = next(
                n for n in reversed(range(1, axes.cp)) if not (llama.heads // axes.tp % n or seq_len // axes.tp % n)
            )
            each = f" on each of {axes.tp} ranks" if axes.tp > 1 else ""
            yield "parallel.cp", f"{size // axes.tp} {what}{each} cannot be divided by {axes.cp}; use cp {fits}"


def _of_layers(axes: Axes, parallel: Parallel, llama: Llama) -> Iterator[tuple[str, str]]:
    stages = axes.pp * parallel.chunks
    if axes.pp == 1:
        return
    if llama.tied:
        yield (
            "parallel.pp",
            "the embedding is also the head, and the first and the last stage would both have it; use pp 1",
        )
    if stages > llama.layers:
        yield (
            "parallel.pp",
            f"{counted(llama.layers, 'layer')} cannot be divided into {stages} stages; use pp {max(1, llama.layers // parallel.chunks)}",
        )
