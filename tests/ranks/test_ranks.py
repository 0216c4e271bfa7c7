"""What ranks tell each other."""

import hashlib

from ranks_rig import run_ranks


def _say(me):
    import torch.distributed as dist

    from llama405b.distributed import collectives

    gathered = []
    gather = dist.all_gather

    def note(into, *args, **more):
        gathered.append(sum(each.numel() for each in into))
        return gather(into, *args, **more)

    dist.all_gather = note
    known = {"tokenizer.json": "x" * 1000} if me.is_rank0 else {}
    said = collectives.broadcast_object(known, dict[str, str])
    return said, sum(gathered), collectives.all_gather_objects(me.index), sum(gathered)


def test_what_one_rank_says_is_not_gathered_from_all():
    for said, before, everyone, after in run_ranks(2, _say):
        assert said == {"tokenizer.json": "x" * 1000}
        assert everyone == [0, 1]
        assert before == 0 < after


def _found(me, root):
    import torch.distributed as dist

    from llama405b.checkpoint.store import Store
    from llama405b.contract.paths import RunDir

    store = Store(root, 2, me, run=RunDir(root / "r"))
    gathered, gather = [], dist.all_gather

    def note(into, *args, **more):
        gathered.append(max(each.numel() for each in into))
        return gather(into, *args, **more)

    dist.all_gather = note
    found = store.open_checkpoint(root / "step-00000001")
    return str(found)[:200], max(gathered), (root / "step-00000001/manifest.json").stat().st_size


def test_a_manifest_is_not_gathered_from_all(tmp_path):
    from llama405b.contract.checkpoints import INDEX, FileDigest, Manifest, write_manifest

    step = tmp_path / "step-00000001"
    step.mkdir()
    names = (INDEX, "weights-0-0.safetensors", *(f"weights-1-{i}.safetensors" for i in range(60)))
    for name in names:
        (step / name).touch()
    digests = {
        name: FileDigest(0, int(name.startswith("weights-1")), (hashlib.sha256(b"").hexdigest(),)) for name in names
    }
    (step / "manifest.json").write_bytes(write_manifest(Manifest(3, 1, digests, 2))[0])
    for found, longest, size in run_ranks(2, _found, tmp_path):
        assert found.startswith("CheckpointView("), found
        assert longest < size / 2
