"""What people bring, trained on: the loss of the exported model on each answer, by transformers alone, is the run's own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from llama405b_tools.verbs import export
from ops_rig import metrics, settings, train

TEMPLATES = Path("tests/data/chat_templates").resolve()
SPECIAL = [
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<start_of_turn>",
    "<end_of_turn>", "<|User|>", "<|Assistant|>",
]  # fmt: skip
AS_LLAMA_3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
AS_QWEN = AS_LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2, 3]}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def turns(i, template):
    """A conversation of two questions, with the thinking that some templates want."""
    say = "<think>\nso {0}\n</think>\n\n{0}" if template in ("qwen3", "qwen3.5", "deepseek-r1-distill") else "{0}"
    return [
        {"role": "user", "content": f"What is {i} + 1?"},
        {"role": "assistant", "content": say.format(f"It is {i + 1}.")},
        {"role": "user", "content": "And twice?"},
        {"role": "assistant", "content": say.format(f"Then {2 * i + 2}!")},
    ]


def record_of(form, i, template):
    """A record, and the messages and tools that it means; of texts, prompt and completion."""
    messages = turns(i, template)
    match form:
        case "messages":
            return {"messages": messages}, (messages, None)
        case "system":
            lead = [{"role": "system", "content": "You add."}]
            return {"messages": lead + messages}, (lead + messages, None)
        case "sharegpt":
            names = {"user": "human", "assistant": "gpt"}
            return {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}, (
                messages,
                None,
            )
        case "trl":
            return {"prompt": messages[:1], "completion": messages[1:2]}, (messages[:2], None)
        case "tools":
            called = [
                messages[0],
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "3"},
            ]
            meant_call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, 3]}}}
            meant = [messages[0], {"role": "assistant", "content": "", "tool_calls": [meant_call]}, called[2]]
            return {"messages": [*called, messages[3]], "tools": json.dumps(TOOLS)}, ([*meant, messages[3]], TOOLS)
        case "prompt":
            return {"prompt": f"Add {i}: ", "completion": f"{i + 1}."}, (f"Add {i}: ", f"{i + 1}.")
        case "question":
            return {"Question": f"What is {i}?", "Answer": f"{i + 1}."}, (f"What is {i}?\n\n", f"{i + 1}.")
    return {"text": f"The text {i} of a file."}, ("", f"The text {i} of a file.")


def with_tokenizer(demo, to, kind):
    """The demo's model with a tokenizer of its own."""
    shutil.copytree(demo, to)
    if kind == "pieces":  # as SentencePiece's: blanks are letters, and one is put before each text
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        start = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        texts = [m["content"] for i in range(40) for m in turns(i, "qwen3")]
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=start[:3], initial_alphabet=[], show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.add_tokens(start[3:])
        found = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
        for path in to.glob("tokenizer*"):
            path.unlink()
    else:
        found = AutoTokenizer.from_pretrained(to)
        split = pre_tokenizers.Split(Regex({"llama": AS_LLAMA_3, "qwen": AS_QWEN}[kind]), "isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    found.add_special_tokens({"additional_special_tokens": SPECIAL})
    found.save_pretrained(to)
    return to


def nll(model, tokenizer, prompt, answer):
    """The sum over the answer's tokens, of a text that transformers tokenizes in one piece; and how many there are."""
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
    assert ids[: len(before)] == before
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    first = max(1, len(before))
    return -sum(float(logits[at - 1, ids[at]]) for at in range(first, len(ids))), len(ids) - first


CASES = [
    ("messages", "llama-3.1", "llama"), ("messages", "gemma3", "llama"), ("messages", "deepseek-r1-distill", "qwen"),
    ("messages", "olmo2", "llama"), ("system", "llama-3.2", "llama"), ("system", "mistral", "qwen"), ("sharegpt", "qwen2.5", "qwen"),
    ("trl", "qwen3.5", "qwen"), ("tools", "qwen3", "qwen"), ("prompt", "", "llama"), ("question", "", "qwen"), ("text", "", "pieces"),
]  # fmt: skip
MORE_CASES = [
    ("messages", "qwen3", "qwen"), ("messages", "mistral", "llama"), ("messages", "qwen3.5", "llama"), ("system", "qwen3", "llama"),
    ("system", "gemma3", "qwen"), ("sharegpt", "llama-3.1", "qwen"), ("trl", "llama-3.2", "llama"), ("tools", "qwen2.5", "llama"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "template", "kind"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_CASES)]
)
def test_the_loss_of_the_answers_is_the_run_s(demo, tmp_path, monkeypatch, form, template, kind):
    monkeypatch.chdir(tmp_path)
    model = with_tokenizer(demo, tmp_path / "m", kind)
    if template:
        shutil.copyfile(TEMPLATES / f"{template}.jinja", model / "chat_template.jinja")
    records = [record_of(form, i, template) for i in range(30)]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(record) for record, _ in records))
    dated = ["--data.template_arguments", "date_string=May"] if template.startswith("llama") else []
    train(
        tmp_path, "r", *settings(model, "d.jsonl", steps=1), *dated, "--data.seq_len", 256, "--data.documents", "whole",
        "--evaluation.paths", "d.jsonl", "--evaluation.every", 1, "--optimizer.lr", 1e-3, "--parallel.numerics", "fp32",
        "--checkpoint.every", 1, "--evaluation.max_sequences", 0, "--model.resize_vocabulary", "true",
    )  # fmt: skip
    assert export.main(["r", "out", "--dtype", "fp32"]) == 0
    exported, tokenizer = AutoModelForCausalLM.from_pretrained("out"), AutoTokenizer.from_pretrained("out")
    given = {"date_string": "May"} if template.startswith("llama") else {}
    sums = []
    for _, (one, two) in records:
        if not template:
            begin = tokenizer.bos_token if kind != "pieces" else ""
            sums.append(nll(exported, tokenizer, begin + one, two + tokenizer.eos_token))
            continue
        for k in range(1, len(one)):
            if one[k]["role"] == "assistant":
                asked = tokenizer.apply_chat_template(
                    one[:k], tools=two, tokenize=False, add_generation_prompt=True, **given
                )
                whole = tokenizer.apply_chat_template(one[: k + 1], tools=two, tokenize=False, **given)
                answer = whole[len(asked) :]
                if template == "deepseek-r1-distill":
                    answer = one[k]["content"].removeprefix("<think>\n") + tokenizer.eos_token
                elif template == "mistral":  # which drops a system text as soon as an answer follows
                    answer = f" {one[k]['content']}{tokenizer.eos_token}"
                sums.append(nll(exported, tokenizer, asked, answer))
    theirs = sum(loss for loss, _ in sums) / sum(n for _, n in sums)
    assert metrics(tmp_path, "r")[1]["evaluation_loss"] == pytest.approx(theirs, abs=1e-4)
