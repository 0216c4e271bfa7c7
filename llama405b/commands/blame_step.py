"""Which document of a run's step is to blame: each by itself, by the weights of the checkpoint before, without training."""

import dataclasses

from llama405b.checkpoint.compatibility import beginning
from llama405b.commands.evaluate_only import choose_checkpoint, look_at_weights, write_settings
from llama405b.contract import reader
from llama405b.contract.config import on_ranks
from llama405b.contract.errors import UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.records import Phase
from llama405b.contract.schema import Config
from llama405b.training.blame import BLAMED, measure, pieces_of, report, scored, skips_of
from llama405b.training.build import bind_to_numa_node
from llama405b.training.build_data import open_data
from llama405b.training.context import RankContext
from llama405b.training.model_files import bring_model_files


def blame(config: Config, resume: str, step: int, context: RankContext) -> None:
    """Measure the documents of a step by the checkpoint at the path ``resume`` (no: the model itself), and report which stand out.

    Raises:
        UserError: The step or the data is not what the checkpoint goes on with, or something cannot be used.
    """
    config = on_ranks(config, context.me.axes)
    bind_to_numa_node(config.parallel, context)
    files = bring_model_files(config.model, config.data, context, whole=config.parallel.by_fsdp1)
    chosen = choose_checkpoint(config, resume, files, context)
    context.phase(Phase.DATA)
    unmasked = dataclasses.replace(config.data, skip="")
    batches, _ = open_data(unmasked, config.evaluation, files, context)
    start = beginning(chosen.found if chosen else None, config, files, batches)
    manifest = chosen.found.manifest if chosen and chosen.found else None
    if manifest and manifest.identity and manifest.identity.data != start.identity.data:
        raise UserError(
            f"--data.paths: the data is not what {resume} was trained with, so its step {step} had other documents"
        )
    done = manifest.step if manifest else 0
    if step <= done:
        raise UserError(f"--blame: step {step} was taken before {resume}; name an older checkpoint")
    write_settings(config, context)
    context.phase(Phase.LOAD)
    weights = look_at_weights(config, chosen, files, context)
    context.phase(Phase.EVAL)
    each = config.training.global_batch_size
    first = start.position + (step - 1 - done) * each
    found = []
    for piece in pieces_of(batches, range(first, first + each)):
        context.heartbeat.alive()
        if one := measure(weights.passes, weights.updater, context.me, batches, piece):
            found.append(one)
    if not found:
        raise UserError(f"--blame: step {step} has no target to learn; name another step")
    scores = scored(found)
    if context.me.is_rank0:
        path = context.run.skips
        blamed = [score for score in scores if score.score >= BLAMED]
        write_atomic(context.run.blamed, "".join(reader.dumps(score) + "\n" for score in scores))
        if blamed:
            write_atomic(path, "".join(reader.dumps(skip) + "\n" for skip in skips_of(batches, blamed)))
        context.log(f"by the weights of {weights.what}")
        for line in report(step, scores, path):
            context.log(line)
