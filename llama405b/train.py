"""The training program, one process a rank, under torchrun (``-m llama405b.train``).

Composes the parts in the order in which the data flows, and is the only module of the trainer that prints.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from llama405b import load, ranks
from llama405b.checkpoint import store as checkpoint
from llama405b.commands.make_demo import make_demo
from llama405b.commands.shape import report
from llama405b.contract import command, weights
from llama405b.contract.config import DEMO_MODEL, check_world, to_toml
from llama405b.contract.errors import FAILED, RunError, UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import UMASK, RunDir
from llama405b.contract.records import Metrics
from llama405b.contract.schema import BYTES_PER_PARAMETER, Config
from llama405b.data import batches as data
from llama405b.heartbeat import Pulse
from llama405b.model import llama as model
from llama405b.optim.adamw import build_optimizer, lr_at, set_lr
from llama405b.parallel import fsdp1, fsdp2
from llama405b.ranks import Ranks
from llama405b.step import NonFiniteError, StepResult, train_step
from llama405b.timer import Laps


def main(argv: Sequence[str] | None = None) -> int:
    """Run a training command; returns the exit code."""
    pulse: Pulse | None = None
    try:
        asked = command.parse(sys.argv[1:] if argv is None else argv)
        stop = StopAsked()
        if asked.dry_run:
            print(report(asked.config, asked.preset, asked.world))
            return 0
        os.umask(UMASK)
        pulse = Pulse(RunDir(asked.run_dir), ranks.place())
        me = ranks.join(asked.config.parallel.device, asked.config.timeouts.load)
        train(asked.config, RunDir(asked.run_dir), asked.resume, me, pulse, stop)
        pulse.phase("done")
        ranks.leave()
    except Exception as error:
        if _lost_peer(error):
            where = f" in phase {pulse.phase_name}" if pulse else ""
            _say_why(f"lost contact with another rank{where}: {str(error)[:300]}", pulse)
            return FAILED
        if isinstance(error, UserError):
            _say_why(str(error), pulse)
            return error.exit_code
        _say_why(f"{type(error).__name__}: {error}", pulse)
        raise
    return 0


class StopAsked:
    """Whether the node runner asked this rank to save and end.

    By SIGUSR1: SIGTERM stays what torchrun ends the survivors of a failure with, which must not wait for a step.
    """

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGUSR1, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


def train(config: Config, run: RunDir, resume: str, me: Ranks, pulse: Pulse, stop: StopAsked) -> None:
    """Train from the model's weights, or from a checkpoint, to the last step or until ``stop`` is asked.

    Raises:
        UserError: The model, the data or a checkpoint cannot be used.
        RunError: The loss or the gradient is not finite; the last checkpoint stands.
    """
    accumulate = check_world(config, me.world)
    files = bring_model_files(config, run, me)
    pulse.phase("data")
    batches = data.open_batches(config.data, files, run.path.parent / ".cache", me)
    steps = config.training.max_steps or batches.steps(config.training.epochs, config.training.global_batch_size)
    root = Path(config.checkpoint.dir) if config.checkpoint.dir else run.checkpoints
    store = checkpoint.Store(root, config.checkpoint.keep, me, config.timeouts.load, run=run.name)
    if config.checkpoint.every:
        store.prove_shared()
    start, passed_over = store.find(resume)
    for why in passed_over:
        _log(me, f"passed over {why}")
    if me.leads:
        write_atomic(run.config, to_toml(config))
    pulse.phase("load")
    module = build(config, files, start, me, pulse)
    optimizer = build_optimizer(module, config.optimizer)
    torch.manual_seed(config.training.seed + me.rank)
    done = 0
    if start:
        pulse.phase("resume")
        done = checkpoint.restore(start, module, optimizer, me)
        _log(me, f"resumed from {start}")
    elif resume == "auto":
        _log(me, "no checkpoint yet: starting from the model's weights")
    shape = f"{config.training.global_batch_size} x {config.data.seq_len} tokens"
    micro = f"{accumulate} micro-batches on each of {me.world} ranks"
    _log(me, f"{steps} steps of {shape} ({micro}), {batches.n_sequences} sequences in an epoch")
    writer = None
    if me.leads:
        flops = weights.read_llama(files, config.model.layers).flops_per_token(config.data.seq_len)
        writer = MetricsWriter(run.metrics, done, flops)
    run_steps(config, range(done + 1, steps + 1), module, optimizer, batches, store, writer, me, pulse, stop)


def run_steps(
    config: Config,
    steps: range,
    module: Any,
    optimizer: torch.optim.Optimizer,
    batches: data.Batches,
    store: checkpoint.Store,
    writer: "MetricsWriter | None",
    me: Ranks,
    pulse: Pulse,
    stop: StopAsked,
) -> None:
    """Take the steps, writing metrics, heartbeats and checkpoints; a stop that is asked for saves first.

    Raises:
        UserError: A checkpoint could not be written.
        RunError: The loss or the gradient is not finite; the last checkpoint stands.
    """
    pulse.phase("train")
    last = steps.stop - 1
    for step in steps:
        metrics = one_step(config, step, last, module, optimizer, batches, me)
        ranks.set_timeout(config.timeouts.step)
        pulse.stepped(metrics)
        if writer:
            writer.write(metrics, last)
        stopping = ranks.any_of(stop.asked)
        if config.checkpoint.every and (step % config.checkpoint.every == 0 or step == last or stopping):
            pulse.phase("checkpoint")
            ranks.set_timeout(config.timeouts.load)  # writing is slow and skewed, as loading is
            _log(me, f"saved {store.save(step, module, optimizer)}")
            pulse.phase("train")
        if stopping:
            _log(me, f"stopped after step {step}, as asked")
            return


def bring_model_files(config: Config, run: RunDir, me: Ranks) -> Path:
    """Give every host the model's small files (configuration, tokenizer); only rank 0's needs the directory.

    Raises:
        UserError: On every rank, where rank 0's directory is not a whole Llama checkpoint that fits the sequences.
    """
    directory, random = Path(config.model.path), config.model.weights == "random"
    small: dict[str, bytes] = {}
    error: UserError | None = None
    if me.leads:
        try:
            if directory == Path(DEMO_MODEL) and not directory.exists():
                _log(me, f"making the demo's model and tokenizer in {directory}")
                make_demo(directory)
            weights.check_checkpoint(directory, config.data.seq_len, config.model.layers, random=random)
            small = {
                name: (directory / name).read_bytes() for name in weights.SMALL_FILES if (directory / name).is_file()
            }
        except UserError as found:
            error = found
    ranks.refuse_together(error)
    target = run.model(me.host)
    for name, content in ranks.from_rank0(small).items():
        if me.local_rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            partial = target / f".{name}.{os.getpid()}"
            partial.write_bytes(content)
            partial.replace(target / name)
    dist.barrier()
    return target


def build(config: Config, files: Path, start: Path | None, me: Ranks, pulse: Pulse) -> Any:
    """The sharded model with its weights (or, where a checkpoint follows, with memory for them).

    Raises:
        UserError: The configuration does not fit the model or the device.
    """
    parallel, weights_in = config.parallel, Path(config.model.path)
    attention, why = model.choose_attention(config.model.attention, me.device, parallel.numerics)
    hf_config = model.read_config(files, config.model.layers)
    llama = weights.read_llama(files, config.model.layers)
    random = config.model.weights == "random"
    began = time.monotonic()
    if parallel.fsdp == "fsdp1":
        if me.device.type == "cpu":
            raise UserError("--parallel.fsdp: torch refuses fsdp1 on CPU; take fsdp2")
        module = fsdp1.build(None if random else weights_in, hf_config, attention, parallel, me)
        how = "rank 0 broadcast the weights"
    else:
        module = model.build_on_meta(hf_config, attention, fsdp2.kept_dtype(parallel.numerics))
        fsdp2.shard(module, parallel, me.device)
        if start:
            load.materialise(module, me, offload=parallel.cpu_offload)
            how = "weights come from the checkpoint"
        else:
            how = load.load(
                module,
                weights_in,
                config.model.load,
                me,
                pulse.beat,
                offload=parallel.cpu_offload,
                random=llama if random else None,
            )
    if config.model.activation_checkpointing:
        fsdp2.checkpoint_activations(module)
    n, each = llama.parameters, BYTES_PER_PARAMETER[parallel.numerics]
    what = f"{n:,} parameters, {parallel.numerics} at {each} bytes each"
    _log(me, f"{parallel.fsdp} on {me.world} x {me.device.type}: {what}; {how}, {time.monotonic() - began:.1f} s")
    recompute = f"activation checkpointing: {config.model.activation_checkpointing}"
    _log(me, f"attention: {attention} ({why}); {recompute}; cpu offload: {parallel.cpu_offload}")
    return module


def one_step(
    config: Config,
    step: int,
    steps: int,
    module: Any,
    optimizer: torch.optim.Optimizer,
    batches: data.Batches,
    me: Ranks,
) -> Metrics:
    """Fetch a batch, update the weights, and measure.

    Raises:
        RunError: Loss or gradient is not finite.
    """
    laps = Laps(me.device)
    lr = lr_at(step, steps, config.optimizer)
    set_lr(optimizer, lr)
    microbatches = batches.microbatches(step, me, config.training.global_batch_size, config.training.micro_batch_size)
    laps.end("data")
    try:
        result: StepResult = train_step(
            module,
            optimizer,
            microbatches,
            max_norm=config.optimizer.max_norm,
            world=me.world,
            set_to_none=not config.parallel.cpu_offload,
            lap=laps.end,
        )
    except NonFiniteError as error:
        raise RunError(
            f"step {step}: {error}; the weights are still those of step {step - 1}; lower --optimizer.lr, or look at "
            "the data of this step, and resume"
        ) from None
    seconds = laps.seconds()
    step_s = sum(seconds.values())
    return Metrics(
        step=step,
        time=time.time(),
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=lr,
        tokens=result.n_targets,
        tokens_per_s=result.n_targets / step_s,
        step_s=step_s,
        data_s=seconds["data"],
        forward_s=seconds["forward"],
        backward_s=seconds["backward"],
        optimizer_s=seconds["optimizer"],
    )


class MetricsWriter:
    """Rank 0's ``metrics.jsonl`` and its lines on stdout."""

    def __init__(self, path: Path, done: int, flops_per_token: int) -> None:
        """Keep the lines up to step ``done``, which a resumed run goes on from."""
        self.flops_per_token = flops_per_token
        kept = [line for line in _lines(path) if line["step"] <= done]
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.tokens = int(kept[-1]["tokens"]) if kept else 0
        self.file = path.open("a", encoding="utf-8")

    def write(self, metrics: Metrics, steps: int) -> None:
        """Append one step."""
        self.tokens += metrics.tokens
        record = {name: getattr(metrics, name) for name in Metrics.__slots__} | {"tokens": self.tokens}
        record["flops_per_token"] = self.flops_per_token
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        print(
            f"step {metrics.step}/{steps}  loss {metrics.loss:.4f}  grad {metrics.grad_norm:.3f}  lr {metrics.lr:.2e}  "
            f"{metrics.tokens_per_s:,.0f} tokens/s  {metrics.step_s:.2f} s",
            flush=True,
        )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Metrics lines of an earlier attempt; a last line that a kill cut short is dropped."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


def _log(me: Ranks, message: str) -> None:
    if me.leads:
        print(message, flush=True)


def _say_why(message: str, pulse: Pulse | None) -> None:
    message = " ".join(message.split())  # one line, whoever wrote it
    print(f"llama405b train: {message}", file=sys.stderr, flush=True)
    if pulse:
        pulse.failed(message)


def _lost_peer(error: Exception) -> bool:
    """Whether the fault is that another rank went away: then that rank's own words matter, not this one's."""
    signs = (
        "Connection closed by peer",
        "Connection reset",
        "Broken pipe",
        "Timed out waiting",
        "timed out",
        "Socket Timeout",
    )
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or any(sign in str(error) for sign in signs)


def run_and_leave() -> NoReturn:
    """Run as a program, and end at once, without the interpreter's own end.

    In that torch's threads abort a rank while its peers die (its exit code and words would be lost), and a signal that
    asks for a stop finds no handler any more and kills.
    """
    code: object = FAILED
    try:
        code = main()
    except SystemExit as leaving:  # argparse's --help
        code = leaving.code
    except BaseException:  # noqa: BLE001 - printed, as the interpreter would
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else FAILED)


if __name__ == "__main__":
    run_and_leave()
