"""The update hidden under the next forward: bit for bit the sequential one, whatever comes in between."""

import functools
import threading
import time
import traceback

import pytest
import torch

from ranks_rig import run_ranks

STEPS, BATCH, SEQ, VOCABULARY = 50, 12, 16, 131
SAVED, RESUMED, LOOKED = 20, 31, 7  # the step that is saved; after which it is resumed; how often a forward only looks


def _batch(step, me, accumulation):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQ + 1), generator=generator)
    if step % 3:
        ids = (ids[:, :1] + torch.arange(SEQ + 1)) % VOCABULARY  # each token foretells the next
    each = BATCH // me.world
    mine = ids[me.rank * each :][:each]
    return [(part[:, :-1], part[:, 1:]) for part in mine.chunk(min(accumulation, each))]


def _build(me, directory, *, overlap, numerics="fp32", wrap=("LlamaDecoderLayer", "Embedding")):
    from llama405b import load
    from llama405b.contract.schema import Optimizer, Parallel
    from llama405b.model import llama
    from llama405b.optim.updater import build_updater
    from llama405b.parallel import fsdp2

    parallel = Parallel(numerics=numerics, cpu_offload=True, overlap=overlap, wrap=wrap)
    module = llama.build_on_meta(llama.read_hf_config(directory), "sdpa", fsdp2.kept_dtype(numerics))
    fsdp2.shard(module, parallel, me.device)
    load.load(module, directory, "rank0", me, lambda *_: None, offload=True)
    fsdp2.checkpoint_activations(module)
    return module, build_updater(module, Optimizer(lr=3e-3), parallel, me.device)


def _step(me, module, updater, step, accumulation=1, max_norm=0.5):
    from llama405b.optim.adamw import set_lr
    from llama405b.step import train_step

    set_lr(updater.optimizer, 3e-3 / (1 + step / 50))  # each step another, as a schedule has it
    micro = _batch(step, me, accumulation)
    result = train_step(module, updater, micro, max_norm=max_norm, dp_size=me.dp.size)
    return result.loss, result.grad_norm


def _bits(module, updater):
    """Weights and moments of this rank."""
    from llama405b.optim.norm import local

    updater.drain()
    found = {}
    for name, parameter in module.named_parameters():
        state = updater.optimizer.state[parameter]
        found[name] = [local(parameter), *(local(state[key]) for key in ("exp_avg", "exp_avg_sq", "step"))]
    return {name: [tensor.detach().clone() for tensor in tensors] for name, tensors in found.items()}


def _slow(updater, seconds=0.001):
    """Slow every update down, so that it would still run where nobody waited for it."""
    update = updater._update

    def slow(*args):
        time.sleep(seconds)
        update(*args)

    updater._update = slow


def _train(me, directory, root, *, overlap, accumulation):
    """Train 50 steps with a save, a resume and forwards that only look; returns what was seen, and the bits at the end."""
    from llama405b.checkpoint.snapshot import restore, state_to_save

    module, updater = _build(me, directory, overlap=overlap)
    if overlap:
        _slow(updater)
    seen, saved, order, again = [], root / f"step-{SAVED:08d}", list(range(1, STEPS + 1)), True
    while order:
        step = order.pop(0)
        seen.append(_step(me, module, updater, step, accumulation))
        if step % LOOKED == 0:
            with torch.no_grad():
                seen.append(float(module(input_ids=_batch(0, me, 1)[0][0], use_cache=False).logits.sum()))
        if step == SAVED and again:
            torch.distributed.checkpoint.save(state_to_save(module, updater, me), checkpoint_id=saved)
        if step == RESUMED and again:
            again = False
            assert restore(saved, module, updater, me) == SAVED
            order = list(range(SAVED + 1, STEPS + 1))
    return seen, _bits(module, updater)


def _same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def _compare(me, directory, root):
    outcomes = []
    for accumulation in (1, 3):
        runs = [
            _train(me, directory, root / f"{accumulation}-{overlap}", overlap=overlap, accumulation=accumulation)
            for overlap in (False, True)
        ]
        clipped = sum(each[1] > 0.5 for each in runs[0][0] if isinstance(each, tuple))
        outcomes.append((runs[0][0] == runs[1][0], _same(runs[0][1], runs[1][1]), clipped, len(runs[0][0])))
    return outcomes


@pytest.mark.parametrize("world", [1, 2, 3])
def test_hidden_equals_sequential_bit_for_bit(tiny, tmp_path, world):
    for outcomes in run_ranks(world, _compare, tiny, tmp_path):
        for same_numbers, same_bits, clipped, seen in outcomes:
            assert (same_numbers, same_bits) == (True, True)
            assert 10 <= clipped < seen


def _otherwise(me, directory, more):
    bits = []
    for overlap in (False, True):
        module, updater = _build(me, directory, overlap=overlap, **more)
        if overlap:
            _slow(updater)
        seen = [_step(me, module, updater, step) for step in range(1, 9)]
        bits.append((seen, _bits(module, updater)))
    return bits[0][0] == bits[1][0] and _same(bits[0][1], bits[1][1])


def test_so_it_does_with_tied_embeddings_and_bf16(tiny_tied):
    assert run_ranks(2, _otherwise, tiny_tied, {"numerics": "pure-bf16"}) == [True, True]


def test_so_it_does_with_other_units(tiny):
    for wrap in (("LlamaAttention", "LlamaMLP", "Embedding"), ("LlamaDecoderLayer",)):
        assert run_ranks(1, _otherwise, tiny, {"wrap": wrap}) == [True]


def _side_by_side(me, directory):
    """What was pending when a step returned; then when units were updated, and when the layers of the next forward ended."""
    module, updater = _build(me, directory, overlap=True)
    gate, updates, forwards, update = threading.Event(), {}, [], updater._update

    def timed(part, *args):
        gate.wait(20)
        time.sleep(0.05)
        update(part, *args)
        updates[part.name] = time.perf_counter()

    def ended(*_):
        forwards.append(time.perf_counter())

    updater._update = timed
    for layer in module.model.layers:
        layer.register_forward_hook(ended)
    _step(me, module, updater, 1)
    pending = [not part.pending.done() for part in updater.parts]
    forwards.clear()
    gate.set()
    with torch.no_grad():
        module(input_ids=_batch(0, me, 1)[0][0], use_cache=False)
    updater.drain()
    layers = [updates[part.name] for part in updater.parts if ".layers." in part.name]
    beside = sum(ended < later for ended, later in zip(forwards, layers[1:], strict=False))
    return all(pending), list(updates) == [part.name for part in updater.parts], beside, len(layers)


def test_all_units_are_pending_when_the_step_returns_and_updated_beside_the_forward(tiny):
    [(pending, in_order, beside, layers)] = run_ranks(1, _side_by_side, tiny)
    assert (pending, in_order) == (True, True)
    assert beside >= layers / 2  # whose forward had ended before the next one's update; a busy machine may be late


def _mutated(me, directory, root, mutate):
    """Whether the result still is the sequential one."""
    from llama405b.checkpoint.snapshot import restore, state_to_save

    outcomes = []
    for overlap in (False, True):
        module, updater = _build(me, directory, overlap=overlap)
        if overlap:
            _slow(updater, 0.02)
            mutate(updater)
        path = root / f"{overlap}" / "step-00000001"
        seen = [_step(me, module, updater, 1)]
        torch.distributed.checkpoint.save(state_to_save(module, updater, me), checkpoint_id=path)
        seen += [_step(me, module, updater, step) for step in (2, 3)]
        restore(path, module, updater, me)
        type(updater).drain(updater)
        outcomes.append((seen, _bits(module, updater)))
    return outcomes[0][0] == outcomes[1][0] and _same(outcomes[0][1], outcomes[1][1])


def _nothing(_updater):
    pass


def _without_hook(number, updater):
    updater.hooks[number].remove()


def _without_waiting(updater):
    updater.drain = lambda: None


@pytest.mark.parametrize(
    ("mutate", "same"),
    [
        (_nothing, True),
        (functools.partial(_without_hook, 0), False),  # of the embedding
        (functools.partial(_without_hook, 2), False),  # of a layer
        (functools.partial(_without_hook, -2), False),  # of norm and head
        (_without_waiting, False),
    ],
)
def test_the_tests_see_a_wait_that_is_missing(tiny, tmp_path, mutate, same):
    assert run_ranks(1, _mutated, tiny, tmp_path, mutate) == [same]


def _raises(me, directory):
    module, updater = _build(me, directory, overlap=True)
    update, said = updater._update, []

    def fail_in_the_third(part, *args):
        if part is updater.parts[2] and me.rank == 0:
            raise MemoryError("no more memory")
        update(part, *args)

    updater._update = fail_in_the_third
    _step(me, module, updater, 1)
    for act in (updater.drain, functools.partial(module, input_ids=_batch(0, me, 1)[0][0])):
        try:
            act()
        except MemoryError as error:
            said.append("fail_in_the_third" in "".join(traceback.format_exception(error)))
    return said


def test_an_error_of_the_worker_is_raised_in_the_training_thread_with_its_traceback(tiny):
    assert run_ranks(1, _raises, tiny) == [[True, True]]


def _not_finite(me, directory):
    from llama405b.step import NonFiniteError

    outcomes = []
    for overlap in (False, True):
        module, updater = _build(me, directory, overlap=overlap)
        _step(me, module, updater, 1, 3)
        before = _bits(module, updater)
        poison = module.lm_head.register_forward_hook(lambda *args: args[2] * float("nan"))
        with pytest.raises(NonFiniteError):
            _step(me, module, updater, 2, 3)
        poison.remove()
        unchanged = _same(before, _bits(module, updater))
        outcomes.append((unchanged, _step(me, module, updater, 3, 3)))
    return outcomes


def test_a_norm_that_is_not_finite_changes_nothing(tiny):
    [sequential, hidden] = run_ranks(1, _not_finite, tiny)[0]
    assert sequential == hidden
    assert hidden[0]


def _long_wait(me, directory):
    module, updater = _build(me, directory, overlap=True)
    heard, gate, update = [], threading.Event(), updater._update

    def gated(*args):
        gate.wait(20)
        update(*args)

    def waits(now):
        heard.append(now)
        gate.set()

    updater._update, updater.waits = gated, waits
    import llama405b.optim.updater as of_updater

    of_updater.LONG_WAIT_S = 0.05
    for step in (1, 2):
        _step(me, module, updater, step)
    return heard


def test_a_long_wait_for_an_update_is_told_while_it_lasts(tiny):
    assert run_ranks(1, _long_wait, tiny) == [[True, False]]


def _backlog(me, directory):
    import llama405b.optim.updater as of_updater

    module, updater = _build(me, directory, overlap=True)
    add, submit, most, adding = of_updater._add, updater.worker.submit, [], []

    def slow_add(*args):
        time.sleep(0.01)
        add(*args)

    def counted(act, *args):
        adding.append(submit(act, *args))
        most.append(sum(not each.done() for each in adding))
        return adding[-1]

    of_updater._add, updater.worker.submit = slow_add, counted
    _step(me, module, updater, 1, accumulation=12)
    return max(most), len(updater.parts)


def test_gradients_that_wait_to_be_added_do_not_pile_up(tiny):
    [(most, parts)] = run_ranks(1, _backlog, tiny)
    assert most <= parts
