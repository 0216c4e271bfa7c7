"""FP32 masters, moments and sums in CPU memory: what they weigh, what crosses, and what other forms read of them."""

import sys
import time

import pytest
import torch

from ranks_rig import run_ranks
from update_rig import bits, build, dcp_save, same, slow, take


def _bytes(me, directory, moments):
    from llama405b.optim.updater import local_tensor

    module, updater = build(me, directory, overlap=True, offload="optimizer", moments=moments)
    for _ in range(2):
        take(me, module, updater, 1, accumulation=3, max_norm=0)  # clipping would pass over the gradients once more
        updater.wait()
        work = updater.work()
    masters = list(updater.master.parameters())
    states = [updater.optimizer.state[master] for master in masters]
    found = {
        "parameters": sum(local_tensor(master).numel() for master in masters),
        "shards": sum(local_tensor(weight).nbytes for weight in module.parameters()),
        "masters": sum(local_tensor(master).nbytes for master in masters),
        "moments": sum(local_tensor(state[name]).nbytes for state in states for name in ("exp_avg", "exp_avg_sq")),
        "sums": sum(buffer.flat_sum.nbytes for buffer in updater.grad_buffers.values()),
        "slot": updater.slot.nbytes,
        "stage": updater.stage.nbytes,
        "gradients": sum(weight.grad is not None for weight in module.parameters()),
    }
    return found, work


@pytest.mark.parametrize(("world", "moments", "each"), [(1, "fp32", 4), (3, "bf16", 2)])
def test_what_it_keeps_and_moves_is_what_it_says(tiny, world, moments, each):
    everyone = run_ranks(world, _bytes, tiny, moments)
    most = everyone[0][0]["parameters"]
    for found, work in everyone:
        n = found["parameters"]
        assert (found["shards"], found["masters"], found["moments"]) == (2 * n, 4 * n, 2 * each * n)
        assert found["gradients"] == 0
        assert found["sums"] == 4 * most  # FSDP pads each parameter to a multiple of the ranks
        assert found["slot"] == 2 * found["stage"] < found["sums"] / 2
        assert work.down_bytes == 3 * found["sums"]
        assert work.up_bytes == 2 * n
        assert work.update_bytes == (2 * (4 + 2 * each) + 4) * n
        assert work.update_s > 0


def _full_bytes(me, directory):
    """Bytes that each unit's all-gathers read, as FSDP made them, beside what the updater counted."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as of_group

    gathered, gather = [], of_group.foreach_all_gather

    def counted(params, *args):
        gathered.append(sum(param.sharded_param.to_local().nbytes for param in params))
        return gather(params, *args)

    of_group.foreach_all_gather = counted
    module, updater = build(me, directory, overlap=True, offload="all")
    take(me, module, updater, 1, accumulation=3)
    updater.wait()
    return sum(gathered), sum(p.to_local().nbytes for p in module.parameters()), updater.work()


def test_what_fsdp_moves_with_full_offload_is_counted(tiny):
    for gathered, n_bytes, work in run_ranks(2, _full_bytes, tiny):
        assert work.up_bytes == gathered
        assert work.down_bytes == 3 * n_bytes


def _rounded(me, directory, form, root):
    from update_rig import restore

    outcomes = []
    for overlap in (False, True):
        module, updater = build(me, directory, overlap=overlap, moments="bf16", **form)
        if overlap:
            slow(updater)
        path, seen = root / f"{overlap}" / "step-00000003", []
        for number in range(1, 7):
            seen.append(take(me, module, updater, number, 2))
            if number == 3:
                dcp_save(updater, me, path)
        restore(path, module, updater, me)
        seen += [take(me, module, updater, number, 2) for number in range(4, 7)]
        assert seen[6:] == seen[3:6]
        dtypes = {state["exp_avg"].dtype for state in updater.optimizer.state.values()}
        outcomes.append((seen, bits(module, updater), dtypes))
    exact = build(me, directory, overlap=True, **form)
    losses = [take(me, *exact, number, 2)[0] for number in range(1, 7)]
    return (
        outcomes[0][0] == outcomes[1][0],
        same(outcomes[0][1], outcomes[1][1]),
        outcomes[1][2],
        outcomes[1][0],
        losses,
    )


@pytest.mark.parametrize("form", [{"offload": "optimizer"}, {"offload": "all", "numerics": "fp32-master"}])
def test_bf16_moments_are_the_same_hidden_or_not(tiny, tmp_path, form):
    for same_numbers, same_bits, dtypes, seen, exact in run_ranks(2, _rounded, tiny, form, tmp_path):
        assert (same_numbers, same_bits, dtypes) == (True, True, {torch.bfloat16})
        rounded = [loss for loss, _ in seen[:6]]
        assert rounded != exact
        assert rounded == pytest.approx(exact, rel=0.02)


def _save(me, directory, root, forms):
    for name, form in forms.items():
        module, updater = build(me, directory, overlap=True, **form)
        for number in (1, 2, 3):
            take(me, module, updater, number)
        dcp_save(updater, me, root / name / "step-00000003")


def _go_on(me, directory, root, forms):
    from update_rig import restore

    outcomes = []
    for name in forms:
        for form in forms.values():
            module, updater = build(me, directory, overlap=True, **form)
            take(me, module, updater, 9)  # whatever it was before
            restore(root / name / "step-00000003", module, updater, me)
            outcomes.append((take(me, module, updater, 4), bits(module, updater)))
    return [outcome[0] == outcomes[0][0] and same(outcome[1], outcomes[0][1]) for outcome in outcomes]


@pytest.mark.parametrize(("saved_on", "read_on", "model"), [(2, 1, "tiny"), (1, 3, "tiny_tied")])
def test_checkpoints_are_the_same_wherever_the_states_are(request, tmp_path, saved_on, read_on, model):
    forms = {name: {"offload": name, "numerics": "fp32-master"} for name in ("none", "all", "optimizer")}
    directory = request.getfixturevalue(model)
    run_ranks(saved_on, _save, directory, tmp_path, forms)
    assert run_ranks(read_on, _go_on, directory, tmp_path, forms) == [[True] * 9] * read_on


def _other_layout(me, directory, change):
    module, updater = build(me, directory, overlap=True, offload="optimizer")
    landing = next(found for name, found in updater.grad_buffers.items() if ".layers." in name)
    change(landing)
    try:
        take(me, module, updater, 1)
    except RuntimeError as error:
        return str(error)
    return ""


def _swap(landing):
    one, other, *_ = landing.members.values()
    one.begin, other.begin = other.begin, one.begin


def _shorten(landing):
    landing.flat_sum = landing.flat_sum[:-1]


def test_gradients_that_fsdp_lays_out_otherwise_are_refused(tiny):
    for change in (_swap, _shorten):
        assert run_ranks(1, _other_layout, tiny, change) != [""]


def _waits(me, directory, offload):
    """What is counted where gradients are added, slowly, and nothing is updated."""
    module, updater = build(me, directory, overlap=True, offload=offload)
    of_updater = sys.modules[type(updater).__module__]
    add = of_updater._add_gradients

    def slow_add(*args):
        time.sleep(0.02)
        add(*args)

    of_updater._add_gradients, updater._update_unit = slow_add, lambda *_: None
    take(me, module, updater, 1, accumulation=3)
    updater.wait()
    return updater.work()


def _added_late(me, directory):
    """Whether gradients that are added late, from the one slot where they arrive, make the same sums."""
    outcomes = []
    for seconds in (0.0, 0.01):
        module, updater = build(me, directory, overlap=True, offload="optimizer")
        submit = updater._submit_add

        def late(unit, wait_for_copy, add, seconds=seconds, submit=submit):
            submit(unit, lambda: (time.sleep(seconds), wait_for_copy()), add)

        updater._submit_add = late
        seen = [take(me, module, updater, step, 3) for step in (1, 2)]
        updater.wait()
        outcomes.append((seen, bits(module, updater)))
    return outcomes[0][0] == outcomes[1][0] and same(outcomes[0][1], outcomes[1][1])


def test_no_gradient_arrives_before_the_one_before_it_is_added(tiny):
    assert run_ranks(2, _added_late, tiny) == [True, True]


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_adding_gradients_is_no_update(tiny, offload):
    [work] = run_ranks(1, _waits, tiny, offload)
    assert (work.update_s, work.update_bytes) == (0, 0)
    assert work.down_bytes > 0


def _other_moments(me, directory, root):
    from llama405b.optim.updater import local_tensor
    from update_rig import restore

    found = {}
    for saved in ("fp32", "bf16"):
        module, updater = build(me, directory, overlap=True, offload="optimizer", moments=saved)
        take(me, module, updater, 1)
        path = root / saved / "step-00000001"
        dcp_save(updater, me, path)
        before = bits(module, updater)
        for read in ("fp32", "bf16"):
            module, updater = build(me, directory, overlap=True, offload="optimizer", moments=read)
            restore(path, module, updater, me)
            after = bits(module, updater)
            dtype = torch.bfloat16 if "bf16" in (saved, read) else torch.float32
            same_weights = all(
                torch.equal(a, b) for n in before for a, b in zip(before[n][:2], after[n][:2], strict=True)
            )
            same_moments = all(
                torch.equal(a.to(dtype), b.to(dtype))
                for n in before
                for a, b in zip(before[n][2:], after[n][2:], strict=True)
            )
            master = {local_tensor(state["exp_avg"]).dtype for state in updater.optimizer.state.values()}
            found[saved, read] = (same_weights, same_moments, master)
    return found


def test_a_resume_may_keep_moments_in_another_dtype(tiny, tmp_path):
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for found in run_ranks(2, _other_moments, tiny, tmp_path):
        assert found == {(saved, read): (True, True, {dtypes[read]}) for saved in dtypes for read in dtypes}
