"""The training loop: each step and the work after it. Knows the parts of a run; builds none of them."""

import contextlib
import dataclasses
import math
import time

from llama405b import extend
from llama405b.contract.checkpoints import Reached
from llama405b.contract.records import EventKind, Metrics, Phase
from llama405b.data.batches import Reader
from llama405b.distributed import collectives, ranks
from llama405b.distributed.host_memory import StepTimer, memory_held
from llama405b.extend import Moment
from llama405b.model.host_inputs import HostInputs
from llama405b.optim.adamw import lr_at, set_lr
from llama405b.optim.step import NoGradientError, NonFiniteError, SpikeError, StepResult, train_step
from llama405b.optim.updater import Updater
from llama405b.parallel.busy import BusyMeter
from llama405b.parallel.passes import Passes
from llama405b.settings.schema import Config
from llama405b.tracking.start import Trackers
from llama405b.training.checkpointer import HURRY_S, Checkpointer
from llama405b.training.context import RankContext
from llama405b.training.evaluate import Evaluator
from llama405b.training.guards import BadSteps, Budget
from llama405b.training.journal import NO_UNIT
from llama405b.training.requests import Requests, Stop


@dataclasses.dataclass(slots=True)
class Trainer:
    """The training loop of one rank, with all of its parts."""

    config: Config
    context: RankContext
    passes: Passes
    updater: Updater
    reader: Reader
    steps: range  # that are left
    flops_per_token: int
    bad_steps: BadSteps
    checkpointer: Checkpointer
    requests: Requests
    budget: Budget
    trackers: Trackers
    evaluator: Evaluator | None  # None: no held-out data
    busy: BusyMeter | None = None  # None: not measured
    host_inputs: HostInputs | None = None  # None: layer inputs stay on the device
    evaluates_first: bool = False  # evaluate the initial weights
    tokens: int = 0  # target tokens so far, over all ranks

    def take_steps(self) -> None:
        """Run the steps, and write metrics, heartbeats and checkpoints; on a stop request save first."""
        journal = self.context.journal
        heartbeat = self.context.heartbeat
        timeouts = self.config.timeouts
        if self.evaluator and self.evaluates_first:
            loss, words = self.evaluator.evaluate()
            journal.log(f"evaluation before step 1: {words}")
            journal.evaluation(0, loss)
            self.evaluator.continue_prompts(0)
            extend.current().evaluated(self.moment(0, None), loss)
        heartbeat.phase(Phase.TRAIN)
        stop = Stop.NO
        for step in self.steps:
            try:
                metrics = self.one_step(step)
            except (
                NonFiniteError,
                NoGradientError,
                SpikeError,
            ):  # on every rank; the save in progress must not be lost
                self.checkpointer.finish()
                raise
            busy_s = self.busy.seconds() if self.busy else None  # the step has waited for the device
            if metrics is None:
                heartbeat.finished_step(step)
            else:
                metrics, evaluated = self.evaluated(metrics)
                # During a save, a slow disk of one rank may delay the update there.
                ranks.set_timeout(timeouts.load if self.checkpointer.step else timeouts.step)
                heartbeat.finished_step(step, data_s=metrics.data_s, optimizer_s=metrics.optimizer_s, busy_s=busy_s)
                own = extend.current().metrics(self.moment(step, metrics))
                metrics = dataclasses.replace(metrics, own=own) if own else metrics
                journal.metrics(metrics)
                if evaluated:
                    journal.log(evaluated)
                    extend.current().evaluated(self.moment(step, metrics), metrics.evaluation_loss)
            extend.current().after_step(self.moment(step, metrics))
            stop = self.after_step(step, metrics)
            self.tell_saved(step, metrics)
            if stop:
                why = self.budget.why_stopped
                journal.log(f"stopped after step {step}, {why}")
                journal.event(EventKind.STOPPED, step=step, detail=why)
                break
        self.updater.wait()
        self.checkpointer.wait_for_after_save(
            self.patience_s(stop), lambda: stop is not Stop.ASKED and self.requests.stop.received
        )

    def patience_s(self, stop: Stop) -> float:
        """Return how long to wait for ``after_save`` at the end of the run."""
        if stop is Stop.SPENT:
            return max(HURRY_S, self.budget.left_s)
        return HURRY_S if stop else math.inf

    def moment(self, step: int, metrics: Metrics | None) -> Moment:
        """Return the argument of the user's hooks."""
        me = self.context.me
        return Moment(step, self.steps.stop - 1, metrics, self.passes.model, me.rank, me.world, self.context.run.path)

    def tell_saved(self, step: int, metrics: Metrics | None) -> None:
        """Call the user's hook for each checkpoint that was completed since the last call."""
        for path in self.checkpointer.landed:
            extend.current().saved(self.moment(step, metrics), path)
        self.checkpointer.landed.clear()

    def close(self) -> None:
        """Stop the loader, release the checkpoint directory, close the budget, and flush the trackers."""
        with contextlib.ExitStack() as ending:
            ending.callback(self.trackers.close)
            ending.callback(self.budget.close)
            ending.callback(self.checkpointer.close)
            ending.callback(self.reader.close)

    def one_step(self, step: int) -> Metrics | None:
        """Run one step and return its metrics; None if the step was skipped."""
        me, timer = self.context.me, StepTimer(self.context.me.device)
        lr = lr_at(step, self.steps.stop - 1, self.config.optimizer)
        set_lr(self.updater.optimizer, lr)
        self.context.heartbeat.memory.step(step)
        result = self.learn(step, timer)
        self.context.heartbeat.memory.unit(NO_UNIT)
        if result is None:
            return None
        self.bad_steps.check_spike(step, result)
        seconds, work = timer.seconds(), self.updater.work()
        inputs = self.host_inputs.work() if self.host_inputs else None
        step_s = sum(seconds.values())
        self.tokens += result.n_targets
        return Metrics(
            step=step,
            time=time.time(),
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=self.tokens,
            tokens_per_s=result.n_targets / step_s,
            all_tokens_per_s=self.config.training.global_batch_size * self.config.data.seq_len / step_s,
            step_s=step_s,
            data_s=seconds["data"],
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            optimizer_s=seconds["optimizer"],
            step_tokens=result.n_targets,
            flops_per_token=self.flops_per_token,
            attempt=me.attempt,
            **dataclasses.asdict(memory_held(on_gpu=me.on_gpu)),
            **(dataclasses.asdict(work) if work else {}),
            **(dataclasses.asdict(inputs) if inputs else {}),
        )

    def learn(self, step: int, timer: StepTimer) -> StepResult | None:
        """Fetch a batch and update the weights; return None if the batch has no target or the result is not finite."""
        microbatches = next(self.reader)
        timer.mark("data")
        try:
            result = train_step(
                self.passes,
                self.updater,
                microbatches,
                max_norm=self.config.optimizer.max_norm,
                refuses=self.bad_steps.refuses,
                lap=timer.mark,
            )
        except NonFiniteError as error:
            self.bad_steps.check_finite(step, error)
            return None
        if result is None:
            self.bad_steps.count_empty(step)
        return result

    def evaluated(self, metrics: Metrics) -> tuple[Metrics, str]:
        """Evaluate after a step if due; return the metrics with the evaluation loss, and a line for the log."""
        if not (self.evaluator and self.evaluator.is_due(metrics.step, self.steps.stop - 1)):
            return metrics, ""
        loss, words = self.evaluator.evaluate()
        self.evaluator.continue_prompts(metrics.step)
        self.context.phase(Phase.TRAIN)
        return dataclasses.replace(metrics, evaluation_loss=loss), f"evaluation after step {metrics.step}: {words}"

    def after_step(self, step: int, metrics: Metrics | None) -> Stop:
        """Do what is due or was requested after a step; return whether to stop the run."""
        step_s, loss = (metrics.step_s, metrics.evaluation_loss) if metrics else (None, None)
        requests, saver = self.requests.new(), self.checkpointer
        mine = self.requests.wishes(requests)
        wishes = collectives.all_reduce_max_fields(
            dataclasses.replace(
                mine,
                stop=Stop.SPENT if self.budget.after_step(step_s or 0.0, saver.took_s) else mine.stop,
                save=int(mine.save or saver.is_due(step)),
                still_saving=int(saver.busy),
                unsent=saver.own_unsent,
                best=int(saver.is_best(loss)),
            )
        )
        saver.tell_after_save(wishes.unsent)
        ending = bool(wishes.stop) or step == self.steps.stop - 1
        if ending and saver.cadence.saves:
            ranks.set_timeout(self.config.timeouts.load)  # like loading, writing is slow and uneven between ranks
        saver.after_step(step, wishes, requests, Reached(self.reader.position, loss), ending=ending, step_s=step_s)
        self.requests.after_step(step, wishes, requests, ending=ending)
        return Stop(wishes.stop)
