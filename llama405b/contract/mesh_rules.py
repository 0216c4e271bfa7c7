"""Which meshes a model, its sequences and the hosts allow; a refusal names a size that would work. Pure."""

from collections.abc import Callable, Iterator

from llama405b.contract.errors import UserError
from llama405b.contract.mesh import DP, SHARD, Axes
from llama405b.contract.phrases import counted
from llama405b.contract.schema import Parallel
from llama405b.contract.strategies import STRATEGIES
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

    def within_host(tp: int) -> bool:
        return parallel.tp_across_hosts or ranks_per_host % tp == 0

    if llama:
        yield from _of_matrices(axes, parallel, llama, seq_len, within_host)
        yield from _of_sequences(axes, parallel, llama, seq_len)
        yield from _of_layers(axes, parallel, llama)
    yield from _of_shards(axes.size(SHARD), parallel.reshard_after_forward)
    if not within_host(axes.tp):
        fits = _smaller(axes, parallel, "tp", within_host)
        yield (
            "parallel.tp",
            f"tp {axes.tp} would reach over hosts of {counted(ranks_per_host, 'rank')}, and every layer would wait for the network; "
            f"use {fits}, or --parallel.tp_across_hosts true",
        )


def _of_matrices(
    axes: Axes, parallel: Parallel, llama: Llama, seq_len: int, within_host: Callable[[int], bool]
) -> Iterator[tuple[str, str]]:
    divided = {
        "attention heads": llama.heads,
        "key-value heads": llama.kv_heads,
        "rows of the MLP": llama.intermediate,
        "tokens of the vocabulary": llama.vocab,
        "tokens of a sequence": seq_len,
    }
    if axes.tp > 1 and llama.family.query_norms:
        yield (
            "parallel.tp",
            f"the norms of queries and keys that a {llama.family.architecture} has are not split; use tp 1",
        )
    for what, size in divided.items():
        if size % axes.tp:
            fits = _smaller(
                axes, parallel, "tp", lambda n: within_host(n) and not any(each % n for each in divided.values())
            )
            yield "parallel.tp", f"{size} {what} cannot be divided by {axes.tp}; use {fits}"


def _of_sequences(axes: Axes, parallel: Parallel, llama: Llama, seq_len: int) -> Iterator[tuple[str, str]]:
    divided = {"attention heads": llama.heads // axes.tp, "tokens of a sequence": seq_len // axes.tp}
    if llama.heads % axes.tp or seq_len % axes.tp:
        return  # told of tp
    for what, size in divided.items():
        if size % axes.cp:
            fits = _smaller(axes, parallel, "cp", lambda n: not any(each % n for each in divided.values()))
            each = f" on each of {axes.tp} ranks" if axes.tp > 1 else ""
            yield "parallel.cp", f"{size} {what}{each} cannot be divided by {axes.cp}; use {fits}"


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
        fits = _smaller(axes, parallel, "pp", lambda n: n * parallel.chunks <= llama.layers)
        yield "parallel.pp", f"{counted(llama.layers, 'layer')} cannot be divided into {stages} stages; use {fits}"


def _of_shards(shards: int, kept_by: int) -> Iterator[tuple[str, str]]:
    if not kept_by or (shards % kept_by == 0 and kept_by < shards):
        return
    divisors = [n for n in range(2, min(kept_by, shards)) if shards % n == 0]
    instead = f"use {divisors[-1]}" if divisors else "leave it out"
    yield (
        "parallel.reshard_after_forward",
        f"{counted(shards, 'shard')} cannot be kept by groups of {kept_by} ranks; {instead}",
    )


def _smaller(axes: Axes, parallel: Parallel, name: str, fits: Callable[[int], bool]) -> str:
    """Name the largest size of an axis that fits and that leaves whole shards, or copies, of the other ranks."""
    rest = DP if STRATEGIES[parallel.strategy].copies == "ranks" else ("dp_shard",)
    ranks = axes.size((name, *rest))
    smaller = (n for n in range(1, getattr(axes, name)) if ranks % n == 0 and fits(n))
    return f"{name} {max(smaller, default=1)}"
