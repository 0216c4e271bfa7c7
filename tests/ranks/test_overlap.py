"""The update hidden under the next forward: bit for bit the sequential one, whatever comes in between."""

import collections
import functools
import sys
import threading
import time
import traceback
import weakref
from unittest import mock

import pytest
import torch

from ranks_rig import run_ranks
from update_rig import batch, bits, build, dcp_save, same, slow, take

STEPS = 9
SAVED, RESUMED, LOOKED = 3, 6, 4  # the step that is saved; after which it is resumed; how often a forward only looks
FORMS = {  # each with torch's AdamW between the steps first
    "all": [{"offload": "all", "overlap": False}, {"offload": "all", "overlap": True}],
    "optimizer": [{"offload": "none", "overlap": False}, {"offload": "optimizer", "overlap": True}],
}


def _train(me, directory, root, *, accumulation, overlap, **form):
    """Train with a save, a resume and forwards that only look; returns what was seen, and the bits at the end."""
    from update_rig import restore

    module, updater = build(me, directory, overlap=overlap, **form)
    if overlap:
        slow(updater)
    seen, saved, order, again = [], root / f"step-{SAVED:08d}", list(range(1, STEPS + 1)), True
    while order:
        step = order.pop(0)
        seen.append(take(me, module, updater, step, accumulation))
        if step % LOOKED == 0:
            with torch.no_grad():
                seen.append(float(module(input_ids=batch(0, me, 1)[0].ids_BS, use_cache=False).logits.sum()))
        if step == SAVED and again:
            dcp_save(updater, me, saved)
        if step == RESUMED and again:
            again = False
            assert restore(saved, module, updater, me) == SAVED
            order = list(range(SAVED + 1, STEPS + 1))
    return seen, bits(module, updater)


def _compare(me, directory, root, accumulation):
    forms = [{"offload": "none", "overlap": False}, *({"offload": name, "overlap": True} for name in FORMS)]
    runs = [
        _train(me, directory, root / form["offload"], accumulation=accumulation, numerics="fp32-master", **form)
        for form in forms
    ]
    clipped = sum(each[1] > 0.5 for each in runs[0][0] if isinstance(each, tuple))
    return [(run[0] == runs[0][0], same(run[1], runs[0][1])) for run in runs], clipped, len(runs[0][0])


@pytest.mark.parametrize(
    ("world", "accumulation"),
    [(2, 3), (3, 1), *(pytest.param(*case, marks=pytest.mark.soak) for case in [(1, 1), (1, 3), (2, 1), (3, 3)])],
)
def test_hidden_equals_sequential_bit_for_bit(tiny, tmp_path, world, accumulation):
    for equal, clipped, seen in run_ranks(world, _compare, tiny, tmp_path, accumulation):
        assert equal == [(True, True)] * 3
        assert 3 <= clipped < seen


def _otherwise(me, directory, form, more):
    outcomes = []
    for each in FORMS[form]:
        module, updater = build(me, directory, **each, **more)
        if each["overlap"]:
            slow(updater)
        seen = [take(me, module, updater, step) for step in range(1, 6)]
        outcomes.append((seen, bits(module, updater)))
    return outcomes[0][0] == outcomes[1][0] and same(outcomes[0][1], outcomes[1][1])


def test_so_it_does_with_tied_embeddings_and_bf16(tiny_tied):
    assert run_ranks(2, _otherwise, tiny_tied, "all", {"numerics": "pure-bf16"}) == [True, True]
    assert run_ranks(2, _otherwise, tiny_tied, "optimizer", {}) == [True, True]


def _sets(me, directory):
    """How many gradients of one parameter there were at most while the worker added slowly, and the order of the adds."""
    from llama405b.optim import offload

    module, updater = build(me, directory, overlap=True)
    made, most, added = collections.defaultdict(list), 0, []
    taken, add = offload._take_gradient, offload._add_gradients

    def watched(parameter):
        nonlocal most
        gradient = taken(parameter)
        of = made[id(parameter)]
        of.append(weakref.ref(gradient))
        most = max(most, sum(each() is not None for each in of))
        return gradient

    def slowly(sums, gradients):
        time.sleep(0.02)
        add(sums, gradients)
        added.append(sums[0][0].data_ptr())

    with mock.patch.multiple(offload, _take_gradient=watched, _add_gradients=slowly):
        take(me, module, updater, 1, accumulation=4)
        updater.wait()
    return most, len(added), len(updater.unit_states)


def test_there_are_two_sets_of_gradients_at_most(tiny):
    """A third would be pinned within a backward, beside NCCL's kernels."""
    for most, added, parts in run_ranks(1, _sets, tiny):
        assert (most, added) == (2, 3 * parts)


@pytest.mark.parametrize("form", FORMS)
def test_so_it_does_with_other_units(tiny, form):
    for units in ({"fsdp_unit": "sublayer"}, {"fsdp_embedding": False}):
        assert run_ranks(1, _otherwise, tiny, form, units) == [True]


def _side_by_side(me, directory, form):
    """What was pending when a step returned; then when units were updated, and when the layers of the next forward ended."""
    module, updater = build(me, directory, **FORMS[form][1])
    gate, updates, forwards, update = threading.Event(), {}, [], updater._update_unit

    def timed(part, *args):
        gate.wait(20)
        time.sleep(0.05)
        update(part, *args)
        updates[part.name] = time.perf_counter()

    def ended(*_):
        forwards.append(time.perf_counter())

    updater._update_unit = timed
    for layer in module.model.layers:
        layer.register_forward_hook(ended)
    take(me, module, updater, 1)
    pending = [not part.pending_update.done() for part in updater.unit_states]
    forwards.clear()
    gate.set()
    with torch.no_grad():
        module(input_ids=batch(0, me, 1)[0].ids_BS, use_cache=False)
    updater.wait()
    layers = [updates[part.name] for part in updater.unit_states if ".layers." in part.name]
    beside = sum(ended < later for ended, later in zip(forwards, layers[1:], strict=False))
    return all(pending), list(updates) == [part.name for part in updater.unit_states], beside, len(layers)


@pytest.mark.parametrize("form", FORMS)
def test_all_units_are_pending_when_the_step_returns_and_updated_beside_the_forward(tiny, form):
    [(pending, in_order, beside, layers)] = run_ranks(1, _side_by_side, tiny, form)
    assert (pending, in_order) == (True, True)
    assert beside >= layers / 2  # whose forward had ended before the next one's update; a busy machine may be late


def _mutated(me, directory, root, form, mutate):
    """Whether the result still is the sequential one."""
    from update_rig import restore

    outcomes = []
    for each in FORMS[form]:
        module, updater = build(me, directory, **each)
        if each["overlap"]:
            slow(updater, 0.06)  # longer than what follows, on a busy machine, too
            mutate(updater)
        path = root / f"{each['overlap']}" / "step-00000001"
        seen = [take(me, module, updater, 1)]
        dcp_save(updater, me, path)
        seen += [take(me, module, updater, step) for step in (2, 3)]
        restore(path, module, updater, me)
        type(updater).wait(updater)
        outcomes.append((seen, bits(module, updater)))
    return outcomes[0][0] == outcomes[1][0] and same(outcomes[0][1], outcomes[1][1])


def _all_mutated(me, directory, root, form, mutations):
    return [_mutated(me, directory, root / f"{i}", form, mutate) for i, mutate in enumerate(mutations)]


def _nothing(_updater):
    pass


def _without_hook(number, updater):
    updater.hooks[number].remove()


def _without_waiting(updater):
    updater.wait = lambda: None


@pytest.mark.parametrize("form", FORMS)
def test_the_tests_see_a_wait_that_is_missing(tiny, tmp_path, form):
    hooks = [functools.partial(_without_hook, number) for number in (0, 2, -2)]  # of the embedding, a layer, the head
    found = run_ranks(1, _all_mutated, tiny, tmp_path, form, [_nothing, *hooks, _without_waiting])
    assert found == [[True, False, False, False, False]]


def _raises(me, directory, form):
    module, updater = build(me, directory, **FORMS[form][1])
    update, said = updater._update_unit, []

    def fail_in_the_third(part, *args):
        if part is updater.unit_states[2] and me.index == 0:
            raise MemoryError("no more memory")
        update(part, *args)

    updater._update_unit = fail_in_the_third
    take(me, module, updater, 1)
    for act in (updater.wait, functools.partial(module, input_ids=batch(0, me, 1)[0].ids_BS)):
        try:
            act()
        except MemoryError as error:
            said.append("fail_in_the_third" in "".join(traceback.format_exception(error)))
    return said


@pytest.mark.parametrize("form", FORMS)
def test_an_error_of_the_worker_is_raised_in_the_training_thread_with_its_traceback(tiny, form):
    assert run_ranks(1, _raises, tiny, form) == [[True, True]]


def _not_finite(me, directory, form):
    from llama405b.optim.step import NonFiniteError

    outcomes = []
    for each in FORMS[form]:
        module, updater = build(me, directory, **each)
        take(me, module, updater, 1, 3)
        before = bits(module, updater)
        poison = module.lm_head.register_forward_hook(lambda *args: args[2] * float("nan"))
        with pytest.raises(NonFiniteError):
            take(me, module, updater, 2, 3)
        poison.remove()
        unchanged = same(before, bits(module, updater))
        outcomes.append((unchanged, take(me, module, updater, 3, 3)))
    return outcomes


@pytest.mark.parametrize("form", FORMS)
def test_a_norm_that_is_not_finite_changes_nothing(tiny, form):
    [sequential, hidden] = run_ranks(1, _not_finite, tiny, form)[0]
    assert sequential == hidden
    assert hidden[0]


def _refused(me, directory, form):
    """Take three steps, the second of which is refused; and the same without it."""
    found = []
    for each in FORMS[form]:
        for steps in ((1, 2, 3), (1, 3)):
            module, updater = build(me, directory, **each)
            for step in steps:
                take(me, module, updater, step, 3, refuses_loss=lambda _, step=step: step == 2)
            found.append(bits(module, updater))
    return [same(found[0], other) for other in found[1:]]


@pytest.mark.parametrize("form", FORMS)
def test_a_step_whose_loss_is_refused_leaves_no_trace(tiny, form):
    for alike in run_ranks(2, _refused, tiny, form):
        assert all(alike)


def _long_wait(me, directory):
    module, updater = build(me, directory, overlap=True)
    heard, gate, update = [], threading.Event(), updater._update_unit

    def gated(*args):
        gate.wait(20)
        update(*args)

    def waits(now):
        heard.append(now)
        gate.set()

    updater._update_unit, updater.on_long_wait = gated, waits
    from llama405b.optim import offload as of_updater

    of_updater.LONG_WAIT_S = 0.05
    for step in (1, 2):
        take(me, module, updater, step)
    return heard


def test_a_long_wait_for_an_update_is_told_while_it_lasts(tiny):
    assert run_ranks(1, _long_wait, tiny) == [[True, False]]


def _backlog(me, directory, form):
    """The most additions that wait at a time, and where each micro-batch's backward had ended among those that began."""
    module, updater = build(me, directory, **FORMS[form][1])
    of_updater = sys.modules[type(updater).__module__]
    add, submit, most, gathering, ended, asked = of_updater._add_gradients, updater.worker.submit, [], [], [], []
    accumulate, expect = updater.accumulate, updater.begin_microbatch

    def slow_add(*args):
        time.sleep(0.01)
        add(*args)

    def counted(act, *args):
        future = submit(act, *args)
        if act.__name__ == "wait_and_add":
            gathering.append(future)
            most.append(
                sum(not each.done() for each in gathering[len(updater.unit_states) :])
            )  # the first are not added to
        return future

    def backward_ended():
        ended.append(len(gathering))
        accumulate()

    def asked_for(*, is_last):
        asked.append(is_last)
        expect(is_last=is_last)

    of_updater._add_gradients, updater.worker.submit = slow_add, counted
    updater.accumulate, updater.begin_microbatch = backward_ended, asked_for
    take(me, module, updater, 1, accumulation=12)
    n_squares = [len(each.result()) for each in gathering]
    return max(most), len(updater.unit_states), ended, asked, n_squares


@pytest.mark.parametrize(("form", "late"), [("all", 1), ("optimizer", 0)])
def test_gradients_are_added_and_measured_as_they_land_and_do_not_pile_up(tiny, form, late):
    """``late``: gradients that FSDP still copies when the backward ends."""
    [(most, parts, ended, asked, n_squares)] = run_ranks(1, _backlog, tiny, form)
    assert most <= (parts if form == "all" else 1)  # those of optimizer have one slot
    assert ended == [parts * n - late for n in range(1, 13)]
    assert asked == [False] * 11 + [True]
    assert all(n == 0 for n in n_squares[:-parts])
    assert all(n > 0 for n in n_squares[-parts:])
