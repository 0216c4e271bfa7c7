"""A model with its updater on each of several ranks, and steps that can be compared bit for bit."""

import time

import torch

from llama405b.data.batch import Batch

BATCH, SEQ, VOCABULARY = 12, 16, 131
IDENTITY = ("a model", "some data", 16, 12, "fp32", 0, 0)


def batch(step, me, accumulation):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQ + 1), generator=generator)
    if step % 3:
        ids = (ids[:, :1] + torch.arange(SEQ + 1)) % VOCABULARY  # each token predicts the next
    each = BATCH // me.world_size
    mine = ids[me.index * each :][:each]
    return [Batch(part[:, :-1], part[:, 1:]) for part in mine.tensor_split(min(accumulation, each))]


def build(
    me,
    directory,
    *,
    overlap,
    offload="all",
    numerics="",
    masters=True,
    optimizer="adamw",
    **more,
):
    from llama405b.model import llama
    from llama405b.model.llama import checkpoint_activations
    from llama405b.optim.build_updater import build_updater
    from llama405b.optim.optimizer import master_model
    from llama405b.parallel import fsdp, load_weights
    from llama405b.settings.schema import Optimizer, Parallel

    numerics = numerics or ("fp32" if offload == "all" else "fp32-master")
    parallel = Parallel(numerics=numerics, offload=offload, overlap=overlap, **more)
    module = llama.build_on_meta(llama.read_hf_config(directory), "sdpa", fsdp.shard_dtype(parallel))
    fsdp.shard_model(module, parallel, me.device)
    master = master_model(module, parallel) if masters else module
    if offload == "all":
        load_weights.materialize(module, me, offload=True, on_pin_progress=lambda *_: None)
    load_weights.load(master, directory, "rank0", me, lambda *_: None, offload=True)
    load_weights.materialize(module, me)
    checkpoint_activations(module)
    return module, build_updater(module, Optimizer(kind=optimizer, lr=3e-3), parallel, me.device, master=master)


def take(me, module, updater, step, accumulation=1, max_norm=0.5, **more):
    from llama405b.optim.optimizer import set_lr
    from llama405b.optim.step import train_step
    from llama405b.parallel.passes import MicrobatchLoop

    set_lr(updater.optimizer, 3e-3 / (1 + step / 50))  # each step another, as a schedule has it
    micro = batch(step, me, accumulation)
    result = train_step(MicrobatchLoop(module, me.dp.size), updater, micro, max_norm=max_norm, **more)
    return result.loss, result.grad_norm


def bits(module, updater):
    """Weights as they are kept and as the model has them, and moments, of this rank."""
    from llama405b.model.llama import strip_wrappers
    from llama405b.optim.updater import local_tensor

    updater.wait()
    found = {}
    computed = {strip_wrappers(name): p for name, p in module.named_parameters()}
    for name, parameter in updater.master.named_parameters():
        name = strip_wrappers(name)
        state = updater.optimizer.state[parameter]
        rounded = local_tensor(computed[name]).to(torch.bfloat16)
        found[name] = [
            rounded,
            local_tensor(parameter),
            *(local_tensor(state[key]) for key in sorted(state)),
        ]
    return {name: [tensor.detach().clone() for tensor in tensors] for name, tensors in found.items()}


def slow(updater, seconds=0.001):
    """Slow every update down, so that it would still run where nobody waited for it."""
    update = updater._update_unit

    def slow(*args):
        time.sleep(seconds)
        update(*args)

    updater._update_unit = slow


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def dcp_save(updater, me, path):
    """Save as torch does, while nothing else happens: in the form of checkpoints of format 2."""
    from manifests import hash_file

    from llama405b.checkpoint.state import state_to_save
    from llama405b.contract.checkpoints import DATA_FILE, MANIFEST, Manifest, step_of, write_manifest

    type(updater).wait(updater)
    torch.distributed.checkpoint.save(state_to_save(updater, me), checkpoint_id=path)
    if me.is_rank0:
        ranks = {each.name: DATA_FILE.fullmatch(each.name) for each in path.iterdir()}
        files = {name: hash_file(path / name, int(found[2]) if found else 0) for name, found in ranks.items()}
        (path / MANIFEST).write_bytes(write_manifest(Manifest(2, step_of(path), files, me.world_size))[0])
    torch.distributed.barrier()


def restore(path, module, updater, me, **how):
    """Load a checkpoint, as a resume does; returns its step."""
    from llama405b.checkpoint import resume
    from llama405b.checkpoint.format import CheckpointReader, open_manifest

    manifest, _ = open_manifest(path)
    resume.restore(CheckpointReader(path, manifest), module, updater, me, **how)
    return manifest.step


def save(store, step, updater):
    """Save as a run does, wait for it, and raise why it failed."""
    from llama405b.checkpoint.saving import CheckpointSaver
    from llama405b.contract.checkpoints import RunIdentity, TrainedSoFar

    saving = CheckpointSaver(store)
    saving.begin(step, updater, RunIdentity(*IDENTITY), TrainedSoFar(step * 12))
    outcome = saving.finish()
    saving.thread.shutdown()  # when older checkpoints are deleted, too
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def data_file(step, rank=0, kind="*"):
    """The largest of the files that a rank wrote into a checkpoint: which of its threads wrote what, changes."""
    return max(step.glob(f"{kind}-{rank}-*.safetensors"), key=lambda path: path.stat().st_size)


def flip(path):
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
