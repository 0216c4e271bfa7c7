"""The model's small files (configuration, tokenizer) on every host: only rank 0's needs the model's directory."""

import base64
import os
from pathlib import Path

import torch.distributed as dist

from llama405b.contract import weights
from llama405b.contract.config import DEMO_MODEL
from llama405b.contract.schema import Data, Model
from llama405b.data.demo_model import make_demo
from llama405b.distributed import collectives
from llama405b.model.llama import read_hf_config
from llama405b.training.context import RankContext


def bring_model_files(model: Model, data: Data, context: RankContext, *, whole: bool) -> Path:
    """Give every host the model's small files, as rank 0 has them; returns the directory where they are.

    ``whole``: the files must hold the whole model, not a host's rows. ``data``: whose sequences and template must fit.

    Raises:
        UserError: On every rank, if rank 0's directory is not a complete Llama checkpoint that fits the sequences.
    """
    me, target = context.me, context.run.model(context.me.host)
    small: dict[str, str] = {}
    with collectives.raise_on_all_ranks():
        if me.is_rank0:
            small = _read_checked(model, data, context, whole=whole)
    for name, content in collectives.broadcast_object(small, dict[str, str]).items():
        if me.local_rank == 0 and name in weights.SMALL_FILES:
            target.mkdir(parents=True, exist_ok=True)
            partial = target / f".{name}.{os.getpid()}"
            partial.write_bytes(base64.b64decode(content))
            partial.replace(target / name)
    dist.barrier()
    return target


def _read_checked(model: Model, data: Data, context: RankContext, *, whole: bool) -> dict[str, str]:
    """Read the small files of a complete checkpoint, by name, in base64; the demo's is made if it is not there."""
    directory = Path(model.path)
    if directory == Path(DEMO_MODEL) and not directory.exists():
        context.log(f"making the demo's model and tokenizer in {directory}")
        make_demo(directory)
    random = model.weights == "random"
    weights.check_checkpoint(directory, data.seq_len, model.layers, random=random, whole=whole)
    read_hf_config(directory)  # refuses what transformers would, before anything else reads it
    present = weights.small_files(directory, data.chat_template)
    return {name: base64.b64encode(path.read_bytes()).decode() for name, path in present.items()}
