"""A few prompts of the user's own, continued at each evaluation: greedily, by the sharded model as it is.

Every token is a forward of the whole model, as no keys and values are kept: so they are few. All ranks compute the same.

Shape suffixes: B prompts, S positions, W the positions whose next token is asked for, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from llama405b.contract.errors import UserError
from llama405b.contract.schema import Evaluation
from llama405b.data.tokens import read_tokenizer
from llama405b.distributed import collectives
from llama405b.model.batch import Batch
from llama405b.model.inputs import model_inputs
from llama405b.parallel.fsdp2 import take_forward
from llama405b.training.context import RankContext


class Prompts:
    """What is continued, and by which tokens."""

    def __init__(self, settings: Evaluation, files: Path, seq_len: int, context: RankContext) -> None:
        """``files``: the directory of the tokenizer.

        Raises:
            UserError: A prompt is too long, or no rank has the whole model.
        """
        self.texts, self.context, self.n_new = settings.prompts, context, settings.prompt_tokens
        if split := [name for name in ("tp", "cp", "pp") if getattr(context.me.axes, name) > 1]:
            raise UserError(
                f"--evaluation.prompts: they are continued where ranks have whole layers; leave them out, or use {split[0]} 1"
            )
        self.tokenizer = read_tokenizer(files)
        self.prompts = [self.tokenizer(text)["input_ids"] for text in self.texts]
        for text, prompt in zip(self.texts, self.prompts, strict=True):
            if not 0 < len(prompt) <= seq_len - self.n_new:
                raise UserError(
                    f"--evaluation.prompts: {text[:40]!r} is {len(prompt)} tokens; use 1 to {seq_len - self.n_new}, which leaves "
                    f"{self.n_new} of data.seq_len to continue it"
                )
        ends = self.tokenizer.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else {*(ends or ())}

    def continued(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield each prompt and its continuation."""
        new = continuations(
            model, self.prompts, self.n_new, self.ends, self.context.me.device, self.context.heartbeat.alive
        )
        for text, tokens in zip(self.texts, new, strict=True):
            yield text, self.tokenizer.decode(tokens, skip_special_tokens=True)


def continuations(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    ends: set[int],
    device: torch.device,
    alive: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Return the most likely next tokens of each prompt, one after the other; they end at the first of ``ends``, or are ``n_new``.

    All forwards are of one shape: what follows a row's last token is not attended to by it.
    """
    reached = [len(prompt) for prompt in prompts]
    ids_BS = torch.zeros(len(prompts), max(reached) + n_new, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids_BS[row, : len(prompt)] = torch.tensor(prompt)
    new: list[list[int]] = [[] for _ in prompts]
    with _inference(model):
        for _ in range(n_new):
            alive()
            if all(tokens and tokens[-1] in ends for tokens in new):
                break
            for row, token in enumerate(_next(model, ids_BS, reached)):
                if new[row] and new[row][-1] in ends:
                    continue
                new[row].append(token)
                ids_BS[row, reached[row]] = token
                reached[row] += 1
    return new


def _next(model: nn.Module, ids_BS: Tensor, reached: Sequence[int]) -> list[int]:
    """Return the token that follows each row; rank 0's, since others may round otherwise."""
    last = sorted({length - 1 for length in reached})
    inputs = model_inputs(Batch(ids_BS, ids_BS), model.config._attn_implementation)
    logits_BWV = model(**inputs, use_cache=False, logits_to_keep=torch.tensor(last, device=ids_BS.device)).logits
    take_forward(model)
    rows = range(len(reached))
    best = [int(logits_BWV[row, last.index(reached[row] - 1)].argmax()) for row in rows]
    return list(collectives.broadcast_object(tuple(best), tuple[int, ...]))


@contextlib.contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        try:
            yield
        finally:
            model.train()
