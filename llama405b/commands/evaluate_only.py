"""Evaluate a model or a checkpoint on held-out data without training.

Allocates no optimizer states and saves nothing.
"""

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics
from llama405b.settings.schema import Config
from llama405b.training.build import build_evaluator
from llama405b.training.context import RankContext
from llama405b.training.journal import read_metrics
from llama405b.training.setup import Purpose, prepare


def evaluate_only(config: Config, resume: str, context: RankContext) -> None:
    """Evaluate the model, or the checkpoint at the path ``resume`` (no: none), and log the loss as a run's first evaluation.

    Raises:
        UserError: The model, the data or the checkpoint cannot be used.
    """
    setup = prepare(config, resume, context, Purpose.EVALUATE)
    start = setup.start
    evaluator = build_evaluator(start.config, setup.forward_backward, start.held_out, start.prompts, context)
    assert evaluator  # of what is held out
    loss, summary = evaluator.evaluate()
    context.journal.log(f"evaluation of {setup.weights}: {summary}")
    context.journal.resume_after(setup.step, setup.step, restart=True)
    context.journal.write_evaluation(setup.step, loss)
    if context.journal.not_written.count:
        raise RunError(f"the evaluation could not be recorded: {context.journal.not_written.detail}")
    evaluator.continue_prompts(setup.step)


def refuse_trained(run: RunDir) -> None:
    """Refuse the directory of a run that trained, before any of its files changes."""
    if any(isinstance(line, Metrics) for line in read_metrics(run.metrics)):
        raise UserError(f"--run-dir: {run.path} is the directory of a run that trained; name another one")
