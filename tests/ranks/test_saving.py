"""Saving beside training: what lands is the state after the step, however slowly it is written."""

import errno
import shutil
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from llama405b.optim.step import NonFiniteError
from llama405b.parallel.passes import MicrobatchLoop
from llama405b.settings.schema import Config
from llama405b.training.loop import Trainer
from ranks_rig import run_ranks
from update_rig import IDENTITY, batch, bits, build, same, slow, take

SAVED, LAST = 3, 9
STEP_S, STEPS_A_SAVE = 0.2, 4
FORMS = {
    "none": {"offload": "none", "overlap": False, "numerics": "fp32"},
    "optimizer": {"offload": "optimizer", "overlap": True},
    "all": {"offload": "all", "overlap": True},
    "all, in turn": {"offload": "all", "overlap": False},
}


def _saving(me, root, staging=None):
    from llama405b.checkpoint.saving import CheckpointSaver
    from llama405b.checkpoint.store import Store
    from llama405b.contract.paths import RunDir

    store = Store(Path(root), 2, me, run=RunDir(Path(root).parent / "run"))
    store.acquire()
    return store, CheckpointSaver(store, staging)


def _identity():
    from llama405b.contract.checkpoints import RunIdentity

    return RunIdentity(*IDENTITY)


def _slow_disk(seconds_a_tensor):
    """Have this rank's threads write at a steady rate, one at a time."""
    from llama405b.checkpoint import saving as of_write

    add, disk = of_write.SafetensorsFile.add, threading.Lock()

    def slowly(*args):
        with disk:
            time.sleep(seconds_a_tensor)
        return add(*args)

    of_write.SafetensorsFile.add = slowly


def _train(me, directory, root, form, share=None):
    """Save after a step, and train on: beside the save, with staging for a share of the state; or after it (None)."""
    from llama405b.contract.checkpoints import TrainedSoFar

    module, updater = build(me, directory, **FORMS[form])
    if FORMS[form]["overlap"]:
        slow(updater, 0.01)  # so that updates are pending when the save begins
    torch.manual_seed(me.index)  # the checkpoint has its state
    tensors = [tensor for unit in updater.units() for tensor in unit.tensors]
    whole = sum(tensor.nbytes for tensor in tensors)
    store, saving = _saving(me, root, int(whole * (share or 0)))
    saving.plan(updater)
    for state in updater.optimizer.state.values():
        state["step"] = state["step"].clone()  # torch may move what it pads, in the first forward
    for step in range(1, SAVED + 1):
        began = time.monotonic()
        take(me, module, updater, step)
    step_s = STEP_S + time.monotonic() - began  # as long as this machine takes now
    if share is not None:
        _slow_disk(STEPS_A_SAVE * step_s / len(tensors))
    saving.begin(
        SAVED, updater, _identity(), TrainedSoFar(0), step_s if share == 1 else None
    )  # with room, what is late is copied ahead
    saved = saving.finish() if share is None else None
    seen, beside = [], 0
    for step in range(SAVED + 1, LAST + 1):
        time.sleep(STEP_S * (share is not None))  # the device computes
        seen.append(take(me, module, updater, step))
        beside += saving.is_busy
    saved = saved or saving.finish()
    store.close()
    return seen, bits(module, updater), saved, beside, whole


def _twice(me, directory, roots, form, share):
    return _train(me, directory, roots[0], form), _train(me, directory, roots[1], form, share)


def _content(path):
    from llama405b.checkpoint.format import CheckpointReader, open_manifest

    reader = CheckpointReader(path, open_manifest(path)[0])
    return {name: reader.read_whole(name) for name in reader.index.tensors}


@pytest.mark.parametrize(
    ("form", "share"),
    [
        *((form, 0.5) for form in FORMS if form != "all, in turn"),
        ("optimizer", 1),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [("all, in turn", 0.5), ("optimizer", 0)]),
    ],
)
def test_what_lands_is_the_state_after_the_step(tiny, tmp_path, form, share):
    roots = [tmp_path / name / "checkpoints" for name in ("in-turn", "beside")]
    for (losses, state, *_), (also, and_state, saved, steps, whole) in run_ranks(2, _twice, tiny, roots, form, share):
        assert losses == also
        assert same(state, and_state)
        assert steps >= 1 + (share > 0)  # without staging the first updates wait for all of it
        assert saved.stats.in_place_bytes > 0
        assert (saved.stats.staged_bytes > 0) == (share > 0)
        if share < 1:  # of whole: the rest, but for what was written straight
            assert saved.stats.wait_bytes > 0
            assert saved.blocked_s >= saved.stats.wait_s > 0
        assert saved.stats.in_place_bytes + saved.stats.staged_bytes >= whole
    one, other = (_content(root / f"step-{SAVED:08d}") for root in roots)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert sum(name.startswith("model.") for name in one) > 10
    assert {float(count) for name, count in one.items() if name.endswith(".step")} == {SAVED}


class _Told:
    """A journal and a pulse that keep what they are told."""

    def __init__(self):
        self.events, self.phases, self.lines, self.planned = [], [], [], []

    def log(self, line):
        self.lines.append(line)

    def write_event(self, kind, *, step, detail="", path=None, request="", **_):
        self.events.append((str(kind), step, request, bool(path), detail))

    def enter_phase(self, phase):
        self.phases.append(str(phase))

    def record_save(self, every_s):
        pass


def _run(me, directory, root, every, fails_at=(), slow=0.0, steps=8, request_at=0, before_step=None):
    """Take steps as a trainer does; the disk is full while a step of ``fails_at`` is saved.

    ``slow``: how long each tensor of a save takes, of the time of a step.
    """
    from llama405b.checkpoint import saving as of_write
    from llama405b.contract.checkpoints import TrainedSoFar
    from llama405b.contract.errors import UserError
    from llama405b.contract.records import RequestKind, RunRequest
    from llama405b.distributed import collectives
    from llama405b.settings.schema import Checkpoint
    from llama405b.training.checkpointer import Checkpointer
    from llama405b.training.requests import AfterStepActions

    module, updater = build(me, directory, offload="optimizer", overlap=True)
    store, saving = _saving(me, root)
    told = _Told()
    context = types.SimpleNamespace(rank=me, journal=told, heartbeat=told)
    saver = Checkpointer(saving, updater, _identity(), Checkpoint(every=every), context, restart_s=1.0)
    add = of_write.SafetensorsFile.add

    def failing(*args):
        time.sleep(slow * step_s)
        if me.index == 1 and saver.saving_step in fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return add(*args)

    plan = of_write.plan_index

    def planning(holdings):
        told.planned.append(saver.saving_step)
        return plan(holdings)

    of_write.SafetensorsFile.add, of_write.plan_index = failing, planning
    error, step_s = "", 0.0
    for step in range(1, steps + 1):
        if before_step:
            before_step(me, Path(root), step)
        began = time.monotonic()
        take(me, module, updater, step)
        step_s = time.monotonic() - began
        while saving.is_busy and not slow:  # steps are longer than saves
            time.sleep(0.01)
        asked = [RunRequest("r", RequestKind.SAVE, "me", 0.0)] if step == request_at else []
        wishes = AfterStepActions(save=int(bool(asked) or saver.is_due(step)), still_saving=int(saving.is_busy))
        try:
            saver.after_step(
                step, collectives.all_reduce_max_fields(wishes), asked, TrainedSoFar(0), ending=step == steps
            )
        except UserError as refused:
            error = str(refused)
    store.close()
    return told, error, sorted(path.name for path in Path(root).iterdir() if path.is_dir())


def test_training_goes_on_after_a_save_that_failed(tiny, tmp_path):
    for told, error, there in run_ranks(2, _run, tiny, tmp_path / "c", "2", (4,)):
        kinds = [(kind, step) for kind, step, *_ in told.events]
        assert kinds == [("saved", 2), ("not saved", 4), ("saved", 6), ("saved", 8)]
        assert "rank 1: No space left on device" in told.events[1][-1]
        assert told.planned == [2]
        assert (error, there) == ("", ["step-00000006", "step-00000008"])


def _in_use_until_step_9(me, root, step):
    """What is deleted loses a file, and stays: as on NFS, while an export reads it."""
    from llama405b.checkpoint import store

    def in_use(path, ignore_errors=False):
        for file in [*path.glob("*.safetensors")][:1]:
            file.unlink()
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    if step == 1:
        store.shutil = types.SimpleNamespace(rmtree=in_use, copyfile=shutil.copyfile)
    if step == 9:
        store.shutil = shutil


def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(tiny, tmp_path):
    for told, error, there in run_ranks(2, _run, tiny, tmp_path / "c", "2", (), 0.0, 10, 0, _in_use_until_step_9):
        assert [(kind, step) for kind, step, *_ in told.events] == [("saved", step) for step in (2, 4, 6, 8, 10)]
        [said] = [line for line in told.lines if "deleted" in line]
        assert said.endswith(
            "c: an old checkpoint cannot be deleted (step-00000002: Directory not empty); retrying after the next save"
        )
        assert (error, there) == ("", ["step-00000008", "step-00000010"])


def test_a_last_save_that_fails_is_an_error(tiny, tmp_path):
    for told, error, there in run_ranks(2, _run, tiny, tmp_path / "c", "4", (8,)):
        assert "could not be written (rank 1: No space left on device); free up space there" in error
        assert [name for name in there if not name.endswith(".tmp")] == ["step-00000004"]
        assert told.events[-1][:2] == ("not saved", 8)


def _perils(me, root, step):
    """Step 2 is removed while it is written; step 4 rank 1 does not see, as where a mount is gone; then the directory is removed."""
    from llama405b.checkpoint import saving

    write, write_parts = saving.CheckpointSaver._write, saving.write_parts

    def removed(self, partial, *args):
        digests = write(self, partial, *args)
        if me.is_rank0 and partial.name.startswith("step-00000002"):
            shutil.rmtree(partial)
        return digests

    def unseen(path, rank, *args):
        is_unseen = rank == 1 and path.name.startswith("step-00000004")
        return write_parts(root.with_name("elsewhere") / path.name if is_unseen else path, rank, *args)

    if step == 1:
        saving.CheckpointSaver._write, saving.write_parts = removed, unseen
    if step == 6 and me.is_rank0:
        root.rename(root.with_name("gone"))


def test_what_becomes_of_the_directory_meanwhile_costs_one_save(tiny, tmp_path):
    for told, error, there in run_ranks(2, _run, tiny, tmp_path / "c", "2", (), 0.0, 8, 0, _perils):
        first, second = (event[-1] for event in told.events if event[0] == "not saved")
        assert "step-00000002.run.tmp: cannot be written (its files have disappeared); it was removed" in first
        assert "(rank 1: No such file or directory); it was removed, or its filesystem is not mounted" in second
        assert [(kind, step) for kind, step, *_ in told.events[2:]] == [("saved", 6), ("saved", 8)]
        assert (error, there) == ("", ["step-00000006", "step-00000008"])
    assert not (tmp_path / "elsewhere").exists()


def test_a_save_that_is_due_during_another_is_put_off(tiny, tmp_path):
    for told, error, there in run_ranks(2, _run, tiny, tmp_path / "c", "1", (), 0.001, 12, 3):
        saved = [step for kind, step, *_ in told.events if kind == "saved"]
        assert saved[0] == 1
        assert saved[-1] == 12  # the last one is not put off
        assert 2 <= len(saved) < 12
        answered = [(step, request) for kind, step, request, *_ in told.events if kind == "answered"]
        assert len(answered) == 1
        assert answered[0][0] >= 3
        assert (error, len(there)) == ("", 2)


def test_a_save_under_way_is_finished_before_a_run_ends_at_a_loss_that_is_not_finite():
    finished = []

    def diverges(_):
        raise NonFiniteError("loss nan, gradient norm nan")

    trainer = types.SimpleNamespace(
        config=Config(),
        context=types.SimpleNamespace(journal=_Told(), heartbeat=_Told()),
        steps=range(5, 9),
        evaluator=None,
        run_step=diverges,
        checkpointer=types.SimpleNamespace(finish=lambda: finished.append(1)),
    )
    with pytest.raises(NonFiniteError):
        Trainer.run_steps(trainer)
    assert finished == [1]


def _after_a_masked_step(me, directory, root):
    """Train from the start, save after a first step without a target and train on; and resume from what was saved."""
    from llama405b.contract.checkpoints import TrainedSoFar
    from llama405b.data.batch import IGNORE_INDEX, Batch
    from llama405b.optim.step import train_step
    from update_rig import restore

    def losses(disturb):
        module, updater = build(me, directory, **FORMS["none"])
        disturb(module, updater)
        return [take(me, module, updater, step) for step in range(3)], bits(module, updater)

    def save_first(module, updater):
        masked = [Batch(each.ids_BS, torch.full_like(each.targets_BS, IGNORE_INDEX)) for each in batch(0, me, 1)]
        assert train_step(MicrobatchLoop(module, me.dp.size), updater, masked, max_norm=0.5) is None
        store, saving = _saving(me, root)
        saving.begin(1, updater, _identity(), TrainedSoFar(12))
        assert saving.finish().path.name == "step-00000001"
        store.close()

    def resume(module, updater):
        restore(Path(root) / "step-00000001", module, updater, me)

    return losses(lambda *_: None), losses(save_first), losses(resume)


def test_a_save_before_the_first_update_changes_no_loss(tiny, tmp_path):
    for undisturbed, saved, resumed in run_ranks(2, _after_a_masked_step, tiny, tmp_path / "c"):
        assert saved[0] == resumed[0] == undisturbed[0]
        assert same(saved[1], undisturbed[1])
        assert same(resumed[1], undisturbed[1])
