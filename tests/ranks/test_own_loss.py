"""A loss of the user's own: the same as the one it computes, on any number of ranks."""

import itertools
import json
import re

import mesh_rig
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from conftest import ROOT
from ranks_rig import run_program, run_ranks

DOCUMENTED = next(
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    if "class Loss:" in block
)

MODULE = """
import torch.nn.functional as F

def loss(logits_TV, targets_T):
    return F.cross_entropy(logits_TV, targets_T, ignore_index=-100, reduction="sum"{more})
"""


def _train(me, directory, module, settings):
    from llama405b import extend

    results = [mesh_rig.train(me, directory, steps=2, settings=settings)[0]]
    extend.use(str(module))
    return [*results, mesh_rig.train(me, directory, steps=2, settings=settings)[0]]


def _both(tmp_path, world, settings, more=""):
    directory, module = mesh_rig.write_model(tmp_path / "model"), tmp_path / "own.py"
    module.write_text(MODULE.format(more=more))
    return run_ranks(world, _train, directory, module, settings)


@pytest.mark.parametrize(("world", "settings"), [(3, {}), (2, {"pp": 2}), (2, {"cp": 2})], ids=["three", "pp", "cp"])
def test_cross_entropy_of_ones_own_is_cross_entropy(tmp_path, world, settings):
    for theirs, own in _both(tmp_path, world, settings):
        assert own == theirs


def test_another_loss_is_another(tmp_path):
    one, two = (_both(tmp_path / str(world), world, {}, ", label_smoothing=0.1") for world in (1, 2))
    assert two[0][1] == [pytest.approx(step, rel=1e-9) for step in one[0][1]]
    assert two[0][1] != two[0][0]


def _by_document(_, directory):
    """The loss of the documented class for one step, document by document."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="sdpa")
    losses, batch = [], mesh_rig.packed(0)
    for ids_S, targets_S, positions_S in zip(batch.ids_BS, batch.targets_BS, batch.positions_BS, strict=True):
        begins = [*(positions_S == 0).nonzero().flatten().tolist(), len(ids_S)]
        for begin, end in itertools.pairwise(begins):
            if (targets := targets_S[begin:end]).max() >= 0:
                losses.append(F.cross_entropy(model(input_ids=ids_S[None, begin:end]).logits[0], targets).item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        (3, {}),
        (2, {"pp": 2}),
        pytest.param(2, {"strategy": "hsdp", "dp_replicate": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_class_sees_the_documents_of_a_batch(tmp_path, world, settings):
    directory, module = mesh_rig.write_model(tmp_path / "model"), tmp_path / "own.py"
    module.write_text(DOCUMENTED)
    [right] = run_ranks(1, _by_document, directory)
    for (theirs, *_), ((loss, _), *_) in run_ranks(world, _train, directory, module, settings):
        assert loss == pytest.approx(right, rel=1e-7)  # norms compute in FP32 there
        assert abs(loss - theirs[0]) > 1e-4


PAIRS = """
import torch
import torch.nn.functional as F

READS = ("*.pairs",)


def documents(path):
    for number, line in enumerate(path.read_text().splitlines()):
        yield tuple(line.split("|")) if number % 3 else line


class Loss:
    def count(self, batch):
        return self._pairs(batch).sum()

    def loss(self, output, batch):
        ends, pairs = batch.document_ends.ends, self._pairs(batch)
        nll_T = F.cross_entropy(output.logits().flatten(0, 1), batch.targets_BS.flatten(), ignore_index=-100, reduction="none")
        document_T = torch.searchsorted(ends[1:], torch.arange(len(nll_T)), right=True)
        nll_N = torch.zeros(len(ends) - 1).scatter_add(0, document_T, nll_T)
        return (F.softplus(nll_N[:-1] - nll_N[1:]) * pairs).sum()

    def _pairs(self, batch):
        firsts = batch.ids_BS.flatten()[batch.document_ends.ends[:-1].long()]
        counted = torch.stack([part.max() >= 0 for part in batch.targets_BS.flatten().tensor_split(batch.document_ends.ends[1:-1].long())])
        return ((firsts[:-1] == CHOSEN) & (firsts[1:] == REJECTED) & counted[1:]).long()
"""


def test_pairs_of_documents_are_trained_on_together(tmp_path, demo):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    begins = {
        name: tokenizer(word, add_special_tokens=False)["input_ids"][0]
        for name, word in (("CHOSEN", "+"), ("REJECTED", "-"))
    }
    module, data = tmp_path / "own.py", tmp_path / "some.pairs"
    module.write_text(PAIRS + "".join(f"\n{name} = {token}" for name, token in begins.items()))
    rows = ["+ an answer that is good" + " indeed" * (n % 7) + "|- another one" * (n % 3 > 0) for n in range(90)]
    data.write_text("\n".join(rows))
    done = run_program(
        "llama405b.train:run_and_exit",
        *("--preset", "demo", "--model.path", demo, "--data.paths", data, "--data.seq_len", 48, "--data.bos", "never"),
        *(
            "--training.extend",
            module,
            "--training.global_batch_size",
            4,
            "--training.micro_batch_size",
            1,
            "--training.max_steps",
            3,
        ),
        *("--optimizer.warmup", 0, "--evaluation.every", 0, "--checkpoint.every", 0, "--parallel.device", "cpu"),
        *("--run-dir", tmp_path / "run"),
        cwd=tmp_path,
        world=2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert 0.3 < steps[0]["loss"] < 200  # per pair: the first is longer by up to 20 tokens
    assert all(step["step_tokens"] > 30 for step in steps)  # targets are tokens all the same


@pytest.mark.parametrize(
    ("module", "flags", "why"),
    [
        (DOCUMENTED, ("--parallel.cp", 2), "Loss needs whole sequences, which no rank has with cp; use cp 1"),
        (DOCUMENTED, ("--parallel.tp", 2), "Loss needs all logits, but no rank has them"),
        (MODULE.format(more=""), ("--parallel.tp", 2), "loss() needs all logits, but no rank has them"),
        (MODULE.format(more=""), ("--model.loss", "chunked"), "loss() needs all logits, but no rank has them"),
        (DOCUMENTED, ("--data.packing", "concatenated"), "Loss sees documents, which data.packing concatenated joins"),
        (DOCUMENTED, ("--data.documents", "split"), "Loss sees documents, which data.documents split cuts anywhere"),
    ],
)
def test_what_no_rank_has_is_refused_before_model_and_data_are_read(tmp_path, module, flags, why):
    own = tmp_path / "own.py"
    own.write_text(module)
    done = run_program(
        "llama405b.train:run_and_exit",
        *(
            "--model.path",
            tmp_path / "no model",
            "--data.paths",
            tmp_path / "no data",
            "--training.extend",
            own,
            *flags,
        ),
        *("--parallel.device", "cpu", "--run-dir", tmp_path / "run"),
        cwd=tmp_path,
        world=2,
    )
    assert done.returncode
    assert f"--extend: {why}" in done.stdout + done.stderr
