"""Loading is exact: every rank's shard equals that slice of the files, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM

from llama405b.spec.tensors import compute_fingerprint, read_tensors, shard_range
from ranks_rig import run_program, run_ranks
from tiny_models import write_llama


def _read(directory):
    whole = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            whole |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return whole


def _load_and_compare(me, directory, numerics, checkpointing):
    from llama405b.model import llama
    from llama405b.model.llama import checkpoint_activations, strip_wrappers
    from llama405b.parallel import fsdp, load_weights
    from llama405b.settings.schema import Parallel

    whole, faults = _read(directory), []
    for how in ("rank0", "local"):
        config = llama.read_hf_config(directory)
        parallel = Parallel(numerics=numerics)
        module = llama.build_on_meta(config, "sdpa", fsdp.shard_dtype(parallel))
        fsdp.shard_model(module, parallel, me.device)
        if checkpointing:
            checkpoint_activations(module)
        calls = []
        load_weights.load(
            module, Path(directory), how, me, lambda done, total, calls=calls: calls.append((done, total))
        )
        assert calls[-1][0] == calls[-1][1] == sum(t.numel() * t.element_size() for t in whole.values())
        seen = set()
        for wrapped_name, parameter in module.named_parameters():
            name = strip_wrappers(wrapped_name)
            start, stop = shard_range(whole[name].shape[0], me.index, me.world_size)
            local = parameter.to_local()
            expected = whole[name][start:stop].to(local.dtype)
            if not torch.equal(local, expected):
                faults.append(f"{how} {name}")
            assert parameter.full_tensor().shape == whole[name].shape
            seen.add(name)
        assert seen == set(whole)
        reference = LlamaForCausalLM.from_pretrained(directory)
        assert torch.equal(module.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
        assert not any(t.is_meta for t in [*module.parameters(), *module.buffers()])
        if config.tie_word_embeddings:
            assert module.lm_head.weight is module.model.embed_tokens.weight
    return faults


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shards_equal_the_files(tiny, tiny_tied, world):
    for directory in (tiny, tiny_tied):
        assert run_ranks(world, _load_and_compare, directory, "fp32", True) == [[]] * world


def test_bf16_files_into_either_dtype(tmp_path):
    directory = write_llama(tmp_path / "bf16", dtype=torch.bfloat16)
    assert run_ranks(2, _load_and_compare, directory, "fp32-master", False) == [[], []]
    assert run_ranks(2, _load_and_compare, directory, "pure-bf16", False) == [[], []]


def _load_where_only_rank0_reads(me, directory, how):
    from llama405b.contract.errors import UserError
    from llama405b.model import llama
    from llama405b.parallel import fsdp, load_weights
    from llama405b.settings.schema import Parallel

    module = llama.build_on_meta(llama.read_hf_config(directory), "sdpa", torch.float32)
    fsdp.shard_model(module, Parallel(numerics="fp32"), me.device)
    mine = Path(directory) if me.is_rank0 else Path("/nonexistent")
    try:
        return load_weights.load(module, mine, how, me, lambda *_: None)
    except UserError as error:
        return str(error)


def test_auto_falls_back_to_rank0_and_local_is_refused(tiny):
    auto = run_ranks(2, _load_where_only_rank0_reads, tiny, "auto")
    assert auto == ["rank 0 read the weights and sent each rank its part"] * 2
    local = run_ranks(2, _load_where_only_rank0_reads, tiny, "local")
    assert all("rank 1 cannot read the same files" in words for words in local)


def _load_random_layers(me, directory, way):
    from llama405b.model import llama
    from llama405b.parallel import fsdp, load_weights
    from llama405b.settings.schema import Parallel
    from llama405b.spec import models

    load_weights.BLOCK_ELEMENTS = 1000  # so that blocks and rows do not agree
    module = llama.build_on_meta(llama.read_hf_config(directory, 1), "sdpa", torch.float32)
    fsdp.shard_model(module, Parallel(numerics="fp32"), me.device)
    calls = []
    how = load_weights.load(
        module, Path("/nonexistent"), way, me, lambda *c: calls.append(c), random_shape=models.read_llama(directory, 1)
    )
    assert calls[-1][0] == calls[-1][1]
    assert len(module.model.layers) == 1
    return how, {name: parameter.full_tensor().detach() for name, parameter in module.named_parameters()}


def test_random_weights_of_a_model_cut_short_are_the_same_for_any_number_of_ranks(tiny, tmp_path):
    config = json.loads((tiny / "config.json").read_text()) | {"initializer_range": 0.05}
    (tmp_path / "config.json").write_text(json.dumps(config))
    [(_, alone)] = run_ranks(1, _load_random_layers, tmp_path, "auto")
    assert 0.045 < alone["model.layers.0.mlp.up_proj.weight"].std() < 0.055
    assert alone["model.norm.weight"].unique().tolist() == [1]
    for way, said in (
        ("auto", "each rank made its own random weights"),
        ("rank0", "rank 0 made random weights and sent"),
    ):
        for how, found in run_ranks(3, _load_random_layers, tmp_path, way):
            assert said in how
            assert found.keys() == alone.keys()
            assert all(torch.equal(found[name], alone[name]) for name in alone)


def _part(model, to, first, last, world, chunks=1):
    """What push --shards would send to a host."""
    from llama405b.settings.axes import Axes
    from llama405b.spec.tensors import HostShard
    from llama405b_tools.agent.transfer import open_files

    source = open_files(model, HostShard(first, last, world if isinstance(world, Axes) else Axes(world), chunks))
    for name, _ in source.files:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(b"".join(source.read(name, 0)))
    return to


def _load_parts(me, model, cases):
    from llama405b.contract.errors import UserError
    from llama405b.model import llama
    from llama405b.parallel import fsdp, load_weights
    from llama405b.settings.schema import Parallel

    whole, found = _read(model), []
    for directories, how in cases:
        module = llama.build_on_meta(llama.read_hf_config(model), "sdpa", torch.float32)
        fsdp.shard_model(module, Parallel(numerics="fp32"), me.device)
        try:
            found.append(load_weights.load(module, directories[me.index], how, me, lambda *_: None))
        except UserError as error:
            found.append(str(error))
            continue
        for name, parameter in module.named_parameters():
            start, stop = shard_range(whole[name].shape[0], me.index, me.world_size)
            assert torch.equal(parameter.to_local(), whole[name][start:stop])
    return found


def test_each_rank_reads_the_part_that_its_host_has(tiny, tiny_tied, tmp_path):
    own, sent = "each rank read its own part", "rank 0 read the weights and sent each rank its part"
    for number, model in enumerate((tiny, tiny_tied)):
        there = tmp_path / str(number)
        one, two = _part(model, there / "a", 0, 1, 3), _part(model, there / "b", 2, 2, 3)
        _part(model, one, 0, 1, 2)  # of fewer ranks, before: it has all rows, perhaps of an older model
        cases = [([one, one, two], "auto"), ([model, model, two], "auto"), ([model, one, one], "auto")]
        assert run_ranks(3, _load_parts, model, cases) == [[own, own, sent]] * 3


def test_a_part_that_is_not_enough_is_refused_on_all_ranks(tiny, tmp_path):
    one, two = _part(tiny, tmp_path / "a", 0, 0, 2), _part(tiny, tmp_path / "b", 1, 1, 2)
    (two / "ranks-1-1-of-2/model.safetensors.index.json").unlink()  # it was not pushed to its end
    lacking = "rank 1 does not have its part of the same model there, and rank 0 cannot send the weights because it has only a part"
    cases = {
        "auto": lacking,
        "rank0": lacking,
        "local": f"--model.load: rank 1 cannot read the same files in {one} ({one}: has only parts of other ranks",
    }
    more = [([one, two], "auto"), ([one, tiny], "rank0")]
    for said in run_ranks(2, _load_parts, tiny, [*(([one, one], how) for how in cases), *more]):
        assert all(words in each for words, each in zip(cases.values(), said, strict=False)), said
        assert lacking in said[3]
        assert ": rank 0 cannot send the weights because it has only a part of them" in said[4]


def _last_row_changed(model, to):
    """The same model, but for the embedding of its last token."""
    shutil.copytree(model, to)
    info = read_tensors(to)["model.embed_tokens.weight"]
    with info.file.open("r+b") as file:
        file.seek(info.offset + info.n_bytes - 4)
        file.write(b"\0\0\0\0")
    return to


def test_rows_of_two_models_are_never_mixed(tiny, tmp_path):
    other = write_llama(tmp_path / "other", initializer_range=0.03)
    assert {name: info.shape for name, info in read_tensors(other).items()} == {
        name: info.shape for name, info in read_tensors(tiny).items()
    }
    model = _last_row_changed(tiny, tmp_path / "changed")
    assert compute_fingerprint(read_tensors(tiny)) != compute_fingerprint(read_tensors(model))
    one, old = _part(tiny, tmp_path / "a", 0, 0, 2), _part(other, tmp_path / "b", 1, 1, 2)
    torn = _part(tiny, tmp_path / "c", 1, 1, 2)
    file = sorted((torn / "ranks-1-1-of-2").glob("*.safetensors"))[0].name
    (torn / "ranks-1-1-of-2" / file).write_bytes((old / "ranks-1-1-of-2" / file).read_bytes())
    both = _part(other, tmp_path / "d", 0, 1, 2)  # an older push, when the host had more slots
    _part(tiny, both, 1, 1, 2)
    sent, lacking = (
        "rank 0 read the weights and sent each rank its part",
        "rank 1 does not have its part of the same model",
    )
    mixed = f"({torn}/ranks-1-1-of-2: has files of more than one model; push them again with --shards)"
    cases = [([one, old], "auto"), ([one, torn], "local"), ([tiny, old], "auto"), ([tiny, other], "auto")]
    for said in run_ranks(2, _load_parts, tiny, [*cases, ([one, both], "auto")]):
        assert lacking in said[0]
        assert mixed in said[1]
        assert said[2:] == [sent, sent, "each rank read its own part"]


def _refusal(me, directory):
    from llama405b.contract.errors import UserError
    from llama405b.model import llama
    from llama405b.parallel import fsdp, load_weights
    from llama405b.settings.schema import Parallel

    module = llama.build_on_meta(llama.read_hf_config(directory), "sdpa", torch.float32)
    fsdp.shard_model(module, Parallel(), me.device)
    load_weights.load(module, directory, "auto", me, lambda *_: None)
    load_weights.check_weights_finite(module, directory)
    if me.index == 1:
        shards = dict(module.named_parameters())
        shards["model.layers.2.mlp.up_proj.weight"].data.to_local()[3, 3] = torch.nan
        shards["lm_head.weight"].data.to_local()[0, 0] = torch.inf
    with pytest.raises(UserError) as refused:
        load_weights.check_weights_finite(module, directory)
    return str(refused.value)


def test_weights_that_are_not_finite_are_named_on_every_rank(tiny):
    for words in run_ranks(3, _refusal, tiny):  # on three, k_proj leaves one without any row
        assert words.startswith(f"{tiny}: model.layers.2.mlp.up_proj.weight has weights that are NaN or infinite; ")


def test_a_run_refuses_weights_that_are_not_finite(demo, corpus, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(demo, tmp_path / "model")
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    file = tmp_path / "model" / index["weight_map"]["model.norm.weight"]
    tensors = load_file(file)
    tensors["model.norm.weight"][5] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    flags = [
        "--model.path=model",
        f"--data.paths={corpus}",
        "--data.seq_len=32",
        "--training.max_steps=1",
        "--parallel.device=cpu",
    ]
    done = run_program("llama405b.train:run_and_exit", "--run-dir", "x", *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert "llama405b train: model: model.norm.weight has weights that are NaN or infinite; " in done.stderr
    assert "Traceback" not in done.stderr
