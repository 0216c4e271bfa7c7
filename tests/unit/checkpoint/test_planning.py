"""64 ranks' saves are planned once: the plans of 64 ranks, made in one process, take the way of torch's own collectives."""

import errno
import pickle
import types

import pytest
import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from llama405b.checkpoint import saving
from llama405b.checkpoint.verified import TensorPlanner, TensorReader
from llama405b.contract.errors import UserError

WORLD, COLUMNS = 64, 4


class Shard(torch.Tensor):
    """A rank's rows of a matrix, to torch's planner."""

    @classmethod
    def of(cls, rank, rows, value):
        shard = torch.full((rows, COLUMNS), value + rank).as_subclass(cls)
        shard.rank = rank
        return shard

    def __create_write_items__(self, name, _):
        rows = len(self)
        chunk = ChunkStorageMetadata(torch.Size((self.rank * rows, 0)), self.size())
        data = TensorWriteData(chunk, TensorProperties(self.dtype), torch.Size((WORLD * rows, COLUMNS)))
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _):
        return self.as_subclass(torch.Tensor)


class Frozen:
    """A state that nothing changes."""

    def plan(self, tensors):
        self.left = [*enumerate(tensors)]

    def read(self):
        while self.left:
            yield self.left.pop(0)

    def abandon(self):
        raise AssertionError("a write failed")


def state_of(rank, value, rows=3, own=()):
    """``own``: the ranks that have a tensor more, as where one alone has a GPU."""
    rng = {"cpu": torch.full((8,), value * rank)} | ({"cuda": torch.full((8,), value)} if rank in own else {})
    state = {"w": {"exp_avg": Shard.of(rank, rows, -value), "step": torch.tensor(value)}}
    return {"model": {"w": Shard.of(rank, rows, value)}, "optimizer": {"state": state}, "rng": {str(rank): rng}}


class Cluster:
    """Saves of 64 ranks by the trainer's own planner and writer, each rank's as in a process of its own."""

    def __init__(self, root, monkeypatch):
        self.root, self.called, self.planned, self.sent = root, [], 0, 0
        plan = default_planner.create_default_global_save_plan

        def planning(plans):
            self.planned += 1
            return plan(plans)

        monkeypatch.setattr(default_planner, "create_default_global_save_plan", planning)
        monkeypatch.setattr(saving.dcp, "save", lambda state, **more: self.called.append((state, more)))

    def save(self, name, **what):
        path, self.called, self.planned = self.root / name, [], 0
        path.mkdir()
        for rank in range(WORLD):
            store = types.SimpleNamespace(group=None)
            of_rank = types.SimpleNamespace(rank=types.SimpleNamespace(index=rank), store=store)
            saving.CheckpointSaver._write(of_rank, path, state_of(rank, **what), Frozen())
        local = [self._local_plan(rank, *each) for rank, each in enumerate(self.called)]
        self.sent = sum(map(len, local))
        planners, writers = zip(*((more["planner"], more["storage_writer"]) for _, more in self.called), strict=True)
        plans, metadata = planners[0].create_global_plan([pickle.loads(each) for each in local])
        plans = [pickle.loads(pickle.dumps(plan)) for plan in writers[0].prepare_global_plan(plans)]
        finished = [planner.finish_plan(plan) for planner, plan in zip(planners, plans, strict=True)]
        results = [writers[rank].write_data(plan, planners[rank]).wait() for rank, plan in enumerate(finished)]
        writers[0].finish(metadata, results)
        return path

    def _local_plan(self, rank, state, more):
        planner, writer = more["planner"], more["storage_writer"]
        planner._cached_plans_key = f"rank {rank}"  # torch keeps plans by process
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, index=rank, use_collectives=True)
        return pickle.dumps(writer.prepare_local_plan(planner.create_local_plan()))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    saving.clear_plan_caches()
    yield Cluster(tmp_path, monkeypatch)
    saving.clear_plan_caches()


def check(path, value, rows=3, own=()):
    """What is read is what all ranks saved, and each part of it is in the metadata once."""
    metadata = TensorReader(path).read_metadata()
    for name in ("model.w", "optimizer.state.w.exp_avg"):
        begins = [chunk.offsets[0] for chunk in metadata.state_dict_metadata[name].chunks]
        assert sorted(begins) == [rank * rows for rank in range(WORLD)]
    shards, others = 2 * WORLD, 1 + WORLD + len(own)
    assert len(metadata.storage_data) == shards + others
    whole = torch.arange(WORLD).repeat_interleave(rows)[:, None].expand(-1, COLUMNS).float()
    expected = {
        "model": {"w": value + whole},
        "optimizer": {"state": {"w": {"exp_avg": whole - value, "step": torch.tensor(value)}}},
        "rng": {str(rank): state_of(rank, value, rows, own)["rng"][str(rank)] for rank in range(WORLD)},
    }
    found = torch.utils._pytree.tree_map(torch.zeros_like, expected)
    saving.dcp.load(found, storage_reader=TensorReader(path), planner=TensorPlanner(), no_dist=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_second_save_of_64_ranks_makes_no_plan_and_is_whole(cluster):
    first = cluster.save("first", value=1.0)
    sent = cluster.sent
    assert cluster.planned == 1
    second = cluster.save("second", value=2.0)
    assert cluster.planned == 0
    assert cluster.sent < sent / 4
    check(first, 1.0)
    check(second, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("what", [{"rows": 5}, {"own": (63,)}])
def test_a_state_that_changed_is_planned_anew_and_then_kept(cluster, what):
    for name, planned, more in (("a", 1, {}), ("b", 1, what), ("c", 0, what), ("d", 1, {})):
        path = cluster.save(name, value=3.0, **more)
        assert cluster.planned == planned
        check(path, 3.0, **more)


@pytest.mark.slow
def test_a_save_that_failed_leaves_no_plan(cluster, monkeypatch):
    def full(*_, **__):
        raise saving.dcp.api.CheckpointException("write", {7: (OSError(errno.ENOSPC, "No space left on device"), [])})

    cluster.save("first", value=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(saving.dcp, "save", full)
        with pytest.raises(UserError, match="rank 7: No space left on device"):
            cluster.save("fails", value=2.0)
    check(cluster.save("third", value=3.0), 3.0)
    assert cluster.planned == 1
