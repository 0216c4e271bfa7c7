"""The training loop: each step and the work after it. Knows the parts of a run; builds none of them."""

import contextlib
import dataclasses
import math
import time

from llama405b import extend
from llama405b.contract.checkpoints import TrainedSoFar
from llama405b.contract.records import EventKind, Metrics, Phase
from llama405b.data.batches import BatchLoader
from llama405b.distributed import collectives, ranks
from llama405b.distributed.host_memory import StepTimer, peak_memory
from llama405b.extend import HookContext
from llama405b.model.host_inputs import HostInputs
from llama405b.optim.optimizer import lr_at, set_lr
from llama405b.optim.step import NoGradientError, NonFiniteError, SpikeError, StepResult, train_step
from llama405b.optim.updater import Updater
from llama405b.parallel.busy import BusyMeter
from llama405b.parallel.passes import ForwardBackward
from llama405b.settings.schema import Config
from llama405b.tracking.uploads import TrackerProcesses
from llama405b.training.checkpointer import STOP_PATIENCE_S, Checkpointer
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
    forward_backward: ForwardBackward
    updater: Updater
    reader: BatchLoader
    steps: range  # that are left
    flops_per_token: int
    bad_steps: BadSteps
    checkpointer: Checkpointer
    requests: Requests
    budget: Budget
    trackers: TrackerProcesses
    evaluator: Evaluator | None  # None: no held-out data
    busy_meter: BusyMeter | None = None  # None: not measured
    host_inputs: HostInputs | None = None  # None: layer inputs stay on the device
    evaluate_first: bool = False  # evaluate the initial weights
    tokens: int = 0  # target tokens so far, over all ranks

    def run_steps(self) -> None:
        """Run the steps, and write metrics, heartbeats and checkpoints; on a stop request save first."""
        journal = self.context.journal
        heartbeat = self.context.heartbeat
        timeouts = self.config.timeouts
        if self.evaluator and self.evaluate_first:
            loss, summary = self.evaluator.evaluate()
            journal.log(f"evaluation before step 1: {summary}")
            journal.write_evaluation(0, loss)
            self.evaluator.continue_prompts(0)
            extend.current().evaluated(self.hook_context(0, None), loss)
        heartbeat.enter_phase(Phase.TRAIN)
        stop = Stop.NO
        for step in self.steps:
            try:
                metrics = self.run_step(step)
            except (
                NonFiniteError,
                NoGradientError,
                SpikeError,
            ):  # on every rank; the save in progress must not be lost
                self.checkpointer.finish()
                raise
            busy_s = self.busy_meter.seconds() if self.busy_meter else None  # the step has waited for the device
            if metrics is None:
                heartbeat.record_step(step)
            else:
                metrics, evaluation_line = self.evaluate_if_due(metrics)
                # During a save, a slow disk of one rank may delay the update there.
                ranks.set_timeout(timeouts.load if self.checkpointer.saving_step else timeouts.step)
                heartbeat.record_step(step, data_s=metrics.data_s, optimizer_s=metrics.optimizer_s, busy_s=busy_s)
                user_metrics = extend.current().metrics(self.hook_context(step, metrics))
                metrics = dataclasses.replace(metrics, own=user_metrics) if user_metrics else metrics
                journal.write_metrics(metrics)
                if evaluation_line:
                    journal.log(evaluation_line)
                    extend.current().evaluated(self.hook_context(step, metrics), metrics.evaluation_loss)
            extend.current().after_step(self.hook_context(step, metrics))
            stop = self.after_step(step, metrics)
            self.report_new_checkpoints(step, metrics)
            if stop:
                reason = self.budget.stop_reason
                journal.log(f"stopped after step {step}, {reason}")
                journal.write_event(EventKind.STOPPED, step=step, detail=reason)
                break
        self.updater.wait()
        self.checkpointer.wait_for_after_save(
            self.max_wait_s(stop), lambda: stop is not Stop.REQUESTED and self.requests.stop.is_received
        )

    def max_wait_s(self, stop: Stop) -> float:
        """Return how long to wait for ``after_save`` at the end of the run."""
        if stop is Stop.BUDGET_SPENT:
            return max(STOP_PATIENCE_S, self.budget.remaining_s)
        return STOP_PATIENCE_S if stop else math.inf

    def hook_context(self, step: int, metrics: Metrics | None) -> HookContext:
        """Return the argument of the user's hooks."""
        rank = self.context.rank
        return HookContext(
            step,
            self.steps.stop - 1,
            metrics,
            self.forward_backward.model,
            rank.index,
            rank.world_size,
            self.context.run.path,
        )

    def report_new_checkpoints(self, step: int, metrics: Metrics | None) -> None:
        """Call the user's hook for each checkpoint that was completed since the last call."""
        for path in self.checkpointer.new_checkpoints:
            extend.current().saved(self.hook_context(step, metrics), path)
        self.checkpointer.new_checkpoints.clear()

    def close(self) -> None:
        """Stop the loader, release the checkpoint directory, close the budget, and flush the trackers."""
        with contextlib.ExitStack() as ending:
            ending.callback(self.trackers.close)
            ending.callback(self.budget.close)
            ending.callback(self.checkpointer.close)
            ending.callback(self.reader.close)

    def run_step(self, step: int) -> Metrics | None:
        """Run one step and return its metrics; None if the step was skipped."""
        rank, timer = self.context.rank, StepTimer(self.context.rank.device)
        lr = lr_at(step, self.steps.stop - 1, self.config.optimizer)
        set_lr(self.updater.optimizer, lr)
        self.context.heartbeat.live_progress.show_step(step)
        result = self.train_batch(step, timer)
        self.context.heartbeat.live_progress.show_unit(NO_UNIT)
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
            attempt=rank.attempt,
            **dataclasses.asdict(peak_memory(on_gpu=rank.on_gpu)),
            **(dataclasses.asdict(work) if work else {}),
            **(dataclasses.asdict(inputs) if inputs else {}),
        )

    def train_batch(self, step: int, timer: StepTimer) -> StepResult | None:
        """Fetch a batch and update the weights; return None if the batch has no target or the result is not finite."""
        microbatches = next(self.reader)
        timer.mark("data")
        try:
            result = train_step(
                self.forward_backward,
                self.updater,
                microbatches,
                max_norm=self.config.optimizer.max_norm,
                refuses_loss=self.bad_steps.refuses_loss,
                on_phase_end=timer.mark,
            )
        except NonFiniteError as error:
            self.bad_steps.check_finite(step, error)
            return None
        if result is None:
            self.bad_steps.count_empty(step)
        return result

    def evaluate_if_due(self, metrics: Metrics) -> tuple[Metrics, str]:
        """Evaluate after a step if due; return the metrics with the evaluation loss, and a line for the log."""
        if not (self.evaluator and self.evaluator.is_due(metrics.step, self.steps.stop - 1)):
            return metrics, ""
        loss, summary = self.evaluator.evaluate()
        self.evaluator.continue_prompts(metrics.step)
        self.context.heartbeat.enter_phase(Phase.TRAIN)
        return dataclasses.replace(metrics, evaluation_loss=loss), f"evaluation after step {metrics.step}: {summary}"

    def after_step(self, step: int, metrics: Metrics | None) -> Stop:
        """Do what is due or was requested after a step; return whether to stop the run."""
        step_s, loss = (metrics.step_s, metrics.evaluation_loss) if metrics else (None, None)
        requests, checkpointer = self.requests.poll(), self.checkpointer
        local_actions = self.requests.requested_actions(requests)
        actions = collectives.all_reduce_max_fields(
            dataclasses.replace(
                local_actions,
                stop=Stop.BUDGET_SPENT
                if self.budget.after_step(step_s or 0.0, checkpointer.save_s)
                else local_actions.stop,
                save=int(local_actions.save or checkpointer.is_due(step)),
                still_saving=int(checkpointer.saving.is_busy),
                after_save_failed_rank=checkpointer.local_failed_rank,
                save_best=int(checkpointer.is_best(loss)),
            )
        )
        checkpointer.report_after_save(actions.after_save_failed_rank)
        ending = bool(actions.stop) or step == self.steps.stop - 1
        if ending and checkpointer.cadence.is_enabled:
            ranks.set_timeout(self.config.timeouts.load)  # like loading, writing is slow and uneven between ranks
        checkpointer.after_step(
            step, actions, requests, TrainedSoFar(self.reader.position, loss), ending=ending, step_s=step_s
        )
        self.requests.after_step(step, actions, requests, ending=ending)
        return Stop(actions.stop)
