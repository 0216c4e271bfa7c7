"""The step loop: a step, what follows it, and requests. Knows its parts; builds none."""

import dataclasses
import functools
import itertools
import math
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from llama405b.checkpoint.store import Store
from llama405b.contract.checkpoints import Reached
from llama405b.contract.errors import UserError
from llama405b.contract.events import EventKind
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import reason_of
from llama405b.contract.records import Metrics, Phase, RequestKind, RunRequest
from llama405b.contract.schema import Config
from llama405b.data.batches import Batches
from llama405b.data.provenance import documents_at
from llama405b.data.reader import Reader
from llama405b.distributed import collectives, ranks
from llama405b.distributed.host_memory import peak_bytes
from llama405b.distributed.ranks import Rank
from llama405b.distributed.step_timer import StepTimer
from llama405b.optim.adamw import lr_at, set_lr
from llama405b.optim.step import NonFiniteError, SpikeError, StepResult, train_step
from llama405b.optim.updater import Updater
from llama405b.training.checkpointer import Checkpointer
from llama405b.training.diagnostics import Profile, write_memory, write_stacks
from llama405b.training.evaluate import evaluate
from llama405b.training.heartbeat import HeartbeatWriter
from llama405b.training.inbox import MAX_STEPS, Inbox
from llama405b.training.journal import Journal
from llama405b.training.loss_spikes import MOST_SKIPPED, SpikeDetector

NAMED = 20  # documents of a step
ENOUGH_SKIPPED = 10  # skipped steps, before skipping most steps counts as a mistake


class StopSignal:
    """Whether the node runner asked this rank to save and stop.

    It sends SIGUSR1: SIGTERM is how torchrun ends the survivors of a failure, which must not wait for a step.
    """

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGUSR1, self._take)

    def _take(self, *_: object) -> None:
        self.came = True


@dataclasses.dataclass(slots=True)
class Trainer:
    """A model on its ranks, and everything that takes its steps."""

    config: Config
    run: RunDir
    me: Rank
    module: torch.nn.Module
    updater: Updater
    reader: Reader
    checkpoints: Store
    saver: Checkpointer
    steps: range  # still to do
    journal: Journal
    pulse: HeartbeatWriter
    stop: StopSignal
    inbox: Inbox
    tokens: int = 0  # target tokens so far, over all ranks
    flops_per_token: int = 0
    held_out: Batches | None = None  # to evaluate on
    spikes: SpikeDetector = dataclasses.field(default_factory=lambda: SpikeDetector(math.inf))
    profile: Profile | None = None
    skipped: int = 0  # steps with nothing to learn, in this attempt
    evaluates_first: bool = False  # the weights that the run begins with

    def take_steps(self) -> None:
        """Run the steps, writing metrics, heartbeats and checkpoints; a stop request saves first.

        Raises:
            UserError: A checkpoint could not be written, or most steps have nothing to learn.
            RunError: The loss or the gradient is not finite; the last checkpoint is intact.
        """
        if self.evaluates_first and self.held_out:
            loss, words = evaluate_weights(self.config, self.module, self.held_out, self.me, self.pulse)
            self.journal.log(f"evaluation before step 1: {words}")
            self.journal.evaluation(0, loss)
        self.pulse.phase(Phase.TRAIN)
        for step in self.steps:
            try:
                metrics = self.one_step(step)
            except (NonFiniteError, SpikeError):  # on every rank
                self.saver.finish()
                raise
            if metrics is None:
                self.pulse.stepped(step)
            else:
                metrics, evaluated = self.evaluated(metrics)
                timeouts = self.config.timeouts  # a slow disk, on one rank, may hold up the update there
                ranks.set_timeout(timeouts.load if self.saver.step else timeouts.step)
                self.pulse.stepped(step, data_s=metrics.data_s, optimizer_s=metrics.optimizer_s)
                self.journal.metrics(metrics)
                if evaluated:
                    self.journal.log(evaluated)
            if self.obey(step, metrics):
                self.journal.log(f"stopped after step {step}, as requested")
                self.journal.event(EventKind.STOPPED, step=step)
                break
        self.updater.drain()

    def evaluated(self, metrics: Metrics) -> tuple[Metrics, str]:
        """Evaluate the weights after a step, if that is due; returns its metrics with the loss, and a line about it."""
        every, step = self.config.evaluation.every, metrics.step
        if self.held_out is None or (step % every and step != self.steps.stop - 1):
            return metrics, ""
        loss, words = evaluate_weights(self.config, self.module, self.held_out, self.me, self.pulse)
        self.pulse.phase(Phase.TRAIN)
        return dataclasses.replace(metrics, evaluation_loss=loss), f"evaluation after step {step}: {words}"

    def skip(self, step: int) -> None:
        """Record a step in which every target is masked, for example by very long prompts.

        Raises:
            UserError: Most steps of this attempt have nothing to learn.
        """
        self.skipped += 1
        self.journal.log(f"step {step}/{self.journal.steps}  skipped: every target is masked")
        self.journal.event(EventKind.SKIPPED, step=step, count=self.skipped)
        taken = step - self.steps.start + 1
        if self.skipped >= ENOUGH_SKIPPED and 2 * self.skipped > taken:
            raise UserError(
                f"--data.paths: {self.skipped} of {taken} steps have no target to learn; remove documents whose prompts are "
                "longer than --data.seq_len, or raise it"
            )

    def one_step(self, step: int) -> Metrics | None:
        """Fetch a batch, update the weights, and measure; None if the step was left out.

        Raises:
            NonFiniteError: Loss or gradient is not finite, and the run is to stop then, or one step after another would be left out.
            SpikeError: The loss is far above the last ones', and the run is to stop then.
        """
        laps = StepTimer(self.me.device)
        lr = lr_at(step, self.steps.stop - 1, self.config.optimizer)
        set_lr(self.updater.optimizer, lr)
        result = self.learn(step, laps)
        if result is None:
            return None
        self.judge(step, result)
        seconds, work = laps.seconds(), self.updater.work()
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
            step_s=step_s,
            data_s=seconds["data"],
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            optimizer_s=seconds["optimizer"],
            step_tokens=result.n_targets,
            flops_per_token=self.flops_per_token,
            attempt=self.me.attempt,
            peak_bytes=peak_bytes(on_gpu=self.me.on_gpu),
            **(dataclasses.asdict(work) if work else {}),
        )

    def learn(self, step: int, laps: StepTimer) -> StepResult | None:
        """Fetch a batch and update the weights; None if it has nothing to learn, or nothing finite came of it.

        Raises:
            NonFiniteError: See ``report_not_finite``.
        """
        config, microbatches = self.config, next(self.reader)
        laps.end("data")
        try:
            result = train_step(
                self.module,
                self.updater,
                microbatches,
                max_norm=config.optimizer.max_norm,
                dp_size=self.me.dp.size,
                refuses=lambda loss: config.training.on_spike != "warn" and self.spikes.is_one(loss),
                lap=laps.end,
            )
        except NonFiniteError as error:
            self.report_not_finite(step, error)
            return None
        if result is None:
            self.skip(step)
        return result

    def report_not_finite(self, step: int, error: NonFiniteError) -> None:
        """Report a loss or gradient that is not finite, with the documents of its step.

        Raises:
            NonFiniteError: The run is to stop then, or one step after another would be left out.
        """
        choice = self.config.training.on_nonfinite
        self.spikes.leave_out()
        self.report(EventKind.NOT_FINITE, step, choice, f"{error}; the weights are still those of step {step - 1}")
        if choice == "stop":
            raise NonFiniteError(
                f"step {step}: {error}; the weights are still those of step {step - 1}; the log names its documents; resume "
                "with --training.on_nonfinite skip, without these documents, or with a lower --optimizer.lr"
            ) from None
        if self.spikes.in_a_row >= MOST_SKIPPED:
            raise NonFiniteError(
                f"step {step}: {MOST_SKIPPED} steps in a row were left out, the last since {error}; resume from an older "
                "checkpoint, or with a lower --optimizer.lr"
            ) from None

    def judge(self, step: int, result: StepResult) -> None:
        """Report a loss that is far above the last ones', with the documents of its step.

        Raises:
            SpikeError: The run is to stop then, or one step after another would be left out.
        """
        usual, choice = self.spikes.usual, self.config.training.on_spike
        if not self.spikes.take(result.loss, always=choice == "warn"):
            return
        loss = f"loss {result.loss:.4f} is {result.loss / (usual or math.inf):.1f} times the median of the last steps"
        what = "" if result.updated else f"; the weights are still those of step {step - 1}"
        self.report(EventKind.SPIKE, step, choice, f"{loss}{what}")
        if choice == "stop":
            raise SpikeError(
                f"step {step}: {loss}; the log names its documents; resume from the last checkpoint, with "
                "--training.on_spike skip or without these documents"
            )
        if choice == "skip" and self.spikes.in_a_row >= MOST_SKIPPED:
            raise SpikeError(
                f"step {step}: {MOST_SKIPPED} steps in a row were left out, the last since {loss}; resume from an older "
                "checkpoint, or with --training.on_spike warn or a higher --training.spike"
            )

    def report(self, kind: EventKind, step: int, choice: str, what: str) -> None:
        """Log what is wrong with a step, with its documents; ``choice``: what is done about it."""
        detail = f"{what}; its documents: {self.documents_of_step()}"
        self.journal.log(f"step {step}/{self.journal.steps}  {detail}")
        self.journal.event(kind, step=step, detail=f"{choice}: {detail}")

    def documents_of_step(self) -> str:
        """Name the first documents of the step that was read last; '' on ranks that report nothing."""
        if not self.me.leads:
            return ""
        end = self.reader.position
        indices = range(end - self.config.training.global_batch_size, end)
        names = list(itertools.islice(documents_at(self.reader.batches.mixture, indices), NAMED + 1))
        return ", ".join(names[:NAMED]) + " and more" * (len(names) > NAMED) if names else "unknown"

    def obey(self, step: int, metrics: Metrics | None) -> bool:
        """Do what is due or was requested after a step; returns whether to stop the run."""
        step_s, loss = (metrics.step_s, metrics.evaluation_loss) if metrics else (None, None)
        requests = list(self.inbox.new())
        counts = dict.fromkeys(RequestKind, 0)
        for request in requests:
            counts[request.kind] = max(counts[request.kind], 1, min(request.steps, MAX_STEPS))
        is_best = self.config.checkpoint.keep_best and loss is not None and loss < self.saver.best_loss
        due = self.me.leads and self.saver.clock.due(step)  # one clock decides for all
        own = [self.stop.came, due, self.saver.busy, is_best, *counts.values()]
        stops, is_due, busy, best, *found = collectives.all_reduce_max([int(each) for each in own])
        wanted = dict(zip(counts, found, strict=True))
        ending = bool(stops) or step == self.steps.stop - 1
        if self.saver.saves:
            if ending:
                ranks.set_timeout(self.config.timeouts.load)  # writing is slow and skewed, as loading is
            self.saver.after_step(
                step,
                due=bool(is_due or wanted[RequestKind.SAVE]),
                busy=bool(busy),
                ending=ending,
                requests=[request for request in requests if request.kind is RequestKind.SAVE],
                reached=Reached(self.reader.position, loss),
                step_s=step_s,
                best=bool(best),
            )
        elif wanted[RequestKind.SAVE]:
            self.answer(requests, RequestKind.SAVE, step, None, "checkpoint.every is 0: this run saves no checkpoints")
        for kind, write in ((RequestKind.STACKS, write_stacks), (RequestKind.MEMORY, write_memory)):
            if wanted[kind]:
                self.answer(requests, kind, step, *everywhere(functools.partial(write, self.run, self.me, step)))
        self.finish_profile(step, ending=ending)
        self.begin_profile(requests, wanted[RequestKind.PROFILE], step)
        return bool(stops)

    def finish_profile(self, step: int, *, ending: bool) -> None:
        """Write the profile if this was its last step, or the run's."""
        if self.profile and (ending or step >= self.profile.last_step):
            path, why = everywhere(self.profile.finish)
            request, self.profile = self.profile.request, None
            self.journal.event(EventKind.ANSWERED, step=step, path=path, request=request, detail=why)

    def begin_profile(self, requests: Sequence[RunRequest], n_steps: int, step: int) -> None:
        """Start a requested profile, one at a time."""
        asked = [request.id for request in requests if request.kind is RequestKind.PROFILE]
        if n_steps and not self.profile:
            first, asked = asked[:1], asked[1:]
            self.profile = Profile(self.run, self.me, "".join(first), step + 1, n_steps)
        for request in asked:
            self.journal.event(EventKind.ANSWERED, step=step, request=request, detail="another profile is being taken")

    def answer(
        self, requests: Sequence[RunRequest], kind: RequestKind, step: int, path: Path | None, why: str = ""
    ) -> None:
        """Report for all requests of a kind that they were carried out, or why not."""
        for request in requests:
            if request.kind is kind:
                self.journal.event(EventKind.ANSWERED, step=step, path=path, request=request.id, detail=why)


def evaluate_weights(
    config: Config, module: torch.nn.Module, held_out: Batches, me: Rank, pulse: HeartbeatWriter
) -> tuple[float | None, str]:
    """Evaluate the weights as they are; returns the loss, None if it is not finite, and words about it."""
    pulse.phase(Phase.EVAL)
    began, evaluation = time.monotonic(), config.evaluation
    micro = evaluation.micro_batch_size or config.training.micro_batch_size
    found = evaluate(module, held_out, me, micro, evaluation.max_sequences, pulse.alive)
    loss = found.loss if math.isfinite(found.loss) else None
    return loss, f"{found}, {time.monotonic() - began:.1f} s"


def everywhere(write: Callable[[], Path]) -> tuple[Path | None, str]:
    """Write a file on every rank; returns this rank's and "", once all ranks are done, or why one is missing.

    A disk that is full is no reason to end the run.
    """
    path, why = None, ""
    try:
        path = write()
    except OSError as error:
        why = f"the file could not be written ({reason_of(error)})"
    [lacking] = collectives.all_reduce_max([int(path is None)])
    if lacking and path:
        why = "another rank could not write its file"
    return path, why
