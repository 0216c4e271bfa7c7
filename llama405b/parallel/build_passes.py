"""How a rank takes its part in forwards and backwards, as the settings have it."""

from torch import nn

from llama405b import extend
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Parallel
from llama405b.distributed.ranks import Rank
from llama405b.model.head import loss_of
from llama405b.parallel.context import attention_of
from llama405b.parallel.fsdp2 import GradientSync
from llama405b.parallel.passes import Cut, OneByOne, Passes
from llama405b.parallel.pipeline import Pipeline
from llama405b.parallel.stage import Stage


def build_passes(parallel: Parallel, model: nn.Module, me: Rank) -> Passes:
    """Return that of a model that is split over the ranks.

    Raises:
        UserError: The user's module computes a loss of logits that no rank has.
    """
    own = extend.current().loss
    if own and (parallel.loss == "parts" or me.axes.tp > 1):
        raise UserError(
            "--extend: loss() is given all logits, which no rank has with loss = parts or tp; remove one of them"
        )
    averaged, loss = me.dp.size * me.axes.cp, loss_of(parallel.loss, model.lm_head, own)
    if parallel.by_fsdp1:
        return OneByOne(model, averaged, loss=loss)
    cut = Cut(me.axes, me.rank, attention_of(model.config._attn_implementation))
    sync = GradientSync(model, parallel.of_strategy, me.axes.dp_replicate)
    if isinstance(model, Stage):
        return Pipeline(model, me.axes, me.rank, parallel.pp_schedule, averaged, sync, cut, loss)
    return OneByOne(model, averaged, sync, cut, loss)
