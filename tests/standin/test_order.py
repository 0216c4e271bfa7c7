"""Copies between a GPU and its host, each in order with what it reads and writes, without the loop, which waits for the device."""

import torch

from standin_rig import FOUND, NOTHING, counts, in_fork

N = 1 << 20


def test_it_is_copied_after_its_update_and_before_the_next(standin):
    content, found = in_fork(_snapshot)
    assert content == 1.0
    assert found == NOTHING


def _snapshot():
    from llama405b.checkpoint.copy_on_update import CopyOnUpdate, Staging
    from llama405b.optim.updater import UpdateUnit

    weight = torch.zeros(N, device="cuda")
    weight.add_(1)
    state = CopyOnUpdate(
        [UpdateUnit([weight], None)], [weight], Staging([weight.nbytes], 1 << 30, weight.device, lambda *_: None)
    )
    state.before_update([weight])
    weight.add_(1)
    [content] = [float(tensor.mean()) for _, tensor in state.read()]
    torch.cuda.synchronize()
    return content, {kind: counts()[kind][0] for kind in FOUND}


def test_weights_go_up_after_what_wrote_their_memory_before(standin, tiny):
    right, found = in_fork(_sync_weights, tiny)
    assert right
    assert found == NOTHING


def _sync_weights(directory):
    from llama405b.distributed import ranks
    from llama405b.model import llama
    from llama405b.optim.build_updater import build_updater
    from llama405b.optim.optimizer import master_model, master_pairs
    from llama405b.optim.updater import local_tensor
    from llama405b.parallel import fsdp, load_weights
    from llama405b.settings.schema import Optimizer, Parallel

    me, parallel = ranks.join_process_group("cuda", 60), Parallel(offload="optimizer", numerics="fp32-master")
    module = llama.build_on_meta(llama.read_hf_config(directory), "eager", fsdp.shard_dtype(parallel))
    fsdp.shard_model(module, parallel, me.device)
    master = master_model(module, parallel)
    load_weights.materialize(module, me)
    load_weights.load(master, directory, "local", me, lambda *_: None, offload=True)
    updater = build_updater(module, Optimizer(), parallel, me.device, master=master)
    torch.cuda.synchronize()
    for weight in module.parameters():
        local_tensor(weight.data).zero_()
    updater.sync_weights()
    torch.cuda.synchronize()
    right = all(
        torch.equal(local_tensor(w.data).cpu().float(), local_tensor(m.data).bfloat16().float())
        for w, m in master_pairs(module, master)
    )
    return right, {kind: counts()[kind][0] for kind in FOUND}


def test_one_part_of_a_file_is_read_while_the_one_before_it_is_copied(standin):
    assert in_fork(_copies_under_way) == [0, 1, 1, 1]


def _copies_under_way():
    """Copies to the device that are not done as each part of four is read."""
    from llama405b.distributed import host_memory

    host_memory.STAGE_BYTES, waits, found = N, [], []
    copy, read = host_memory.async_copy, host_memory.DeviceStager._read

    def noted_copy(pairs, stream):
        waits.append(wait := copy(pairs, stream))
        return wait

    def noted_read(*args):
        found.append(sum(not wait.__self__.query() for wait in waits))
        read(*args)

    host_memory.async_copy, host_memory.DeviceStager._read = noted_copy, noted_read
    target = torch.empty(4 * N, dtype=torch.uint8, device="cuda")
    host_memory.DeviceStager(target.device).copy_to_device(target, [(0, torch.ones(4 * N, dtype=torch.uint8))])
    return found
