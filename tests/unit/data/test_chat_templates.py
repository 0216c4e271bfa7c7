"""Templates of the structure of published ones: what is trained on is what inference leaves to the model, token by token."""

import csv
import dataclasses
import datetime
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from llama405b import extend
from llama405b.contract.errors import UserError
from llama405b.data import tokens
from llama405b.data.chat_template import (
    DATE_FUNCTION,
    ChatTemplate,
    UnusableChatError,
    add_template_date,
    template_variables,
)
from llama405b.data.documents import Documents, detect_formats, list_file_ranges
from llama405b.data.encode import DOCUMENT_START, MARKS, NOT_TRAINED, SAME_CHAT, WITH_PREVIOUS, Encoder
from llama405b.data.sources import document_bounds, split_documents
from llama405b.formats.conversation import Chat
from llama405b.settings.schema import Data

TEMPLATES = Path("tests/data/chat_templates").resolve()
NAMES = sorted(path.stem for path in TEMPLATES.iterdir())
SPECIAL = [
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<start_of_turn>",
    "<end_of_turn>", "<|User|>", "<|Assistant|>",
]  # fmt: skip


AS_LLAMA_3 = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # how it parts texts
)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def thinking(text):
    return f"<think>\nso {text}\n</think>\n\n{text}"


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
]
CHATS = {
    "one answer": Chat((turn("user", "one?"), turn("assistant", thinking("two")))),
    "three answers": Chat(tuple(turn(r, c) for k in range(3) for r, c in (("user", f"{k}?"), ("assistant", thinking(f"n{k}"))))),
    "a system text": Chat(
        (turn("system", "Be."), turn("user", "1?"), turn("assistant", thinking("a")), turn("user", "2"), turn("assistant", thinking("b")))
    ),
    "a question last": Chat((turn("user", "1?"), turn("assistant", thinking("x")), turn("user", "2?"))),
    "calls": Chat(
        (
            turn("system", "Add."),
            turn("user", "1 + 2?"),
            turn("assistant", "", tool_calls=[CALL]),
            turn("tool", "3"),
            turn("assistant", "It is 3."),
            turn("user", "Sure?"),
            turn("assistant", "Yes."),
        ),
        TOOLS,
    ),
}  # fmt: skip
NO_CALLS = {"mistral", "olmo2", "gemma3", "deepseek-r1-distill"}
CASES = [(name, chat) for name in NAMES for chat in CHATS if not (chat == "calls" and name in NO_CALLS)]
JOINT = {"llama-3.1", "llama-3.2", "qwen2.5", "olmo2", "gemma3"}  # what follows changes nothing in these


@pytest.fixture(scope="module")
def tokenizer(demo):
    found = AutoTokenizer.from_pretrained(demo)
    found.add_special_tokens({"additional_special_tokens": SPECIAL})
    split = pre_tokenizers.Split(Regex(AS_LLAMA_3), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    return found


def template_of(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


def settings_of(tokenizer, name, **more):
    tokenizer.chat_template = template_of(name)
    return add_template_date(Data(**more), tokenizer, "2026-02-03")


@pytest.mark.parametrize(("name", "which"), CASES)
@pytest.mark.parametrize("turns", ["auto", "per-answer"])
def test_each_answer_follows_what_inference_gives_and_is_what_it_leaves(tokenizer, name, which, turns):
    chat, settings = CHATS[which], settings_of(tokenizer, name, turns=turns)
    n_answers = sum(message["role"] == "assistant" for message in chat.messages)
    template = ChatTemplate(tokenizer, settings)
    made = template.render_documents(chat)
    learnt, exact = list[str](), 0
    for segments in made.documents:
        for i, (text, is_learnt) in enumerate(segments):
            if not is_learnt:
                continue
            before = "".join(each for each, _ in segments[:i])
            [k] = [
                k
                for k in range(1, len(chat.messages))
                if chat.messages[k]["role"] == "assistant" and before == template.render(chat, k, prompt=True)
            ]
            whole = template.render(chat, k + 1)
            said = str(chat.messages[k]["content"])
            if before + text != whole:  # the template leaves out the thinking that it asks for
                left = {
                    "deepseek-r1-distill": said.removeprefix("<think>\n"),
                    "mistral": f" {said}",
                }  # or a system text
                assert text == left[name] + tokenizer.eos_token
            exact += 1
            learnt.append(text)
    assert (exact, len(made.documents)) == (n_answers, 1 if turns == "auto" and name in JOINT else len(made.documents))
    if turns == "per-answer":
        assert len(made.documents) == n_answers
    if which == "calls":
        assert all(word in learnt[0] for word in ("add", "1", "2"))
        assert "It is 3." in learnt[1]


@pytest.mark.parametrize(("name", "which"), CASES)
def test_so_do_the_tokens(tokenizer, tmp_path, name, which):
    chat, settings = CHATS[which], settings_of(tokenizer, name)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat.messages, "tools": chat.tools}))
    texts = Documents(list(detect_formats(list_file_ranges([str(tmp_path / "a.jsonl")]))))
    [found] = texts
    encoder = Encoder(tokenizer, settings, texts, lambda *_: None)
    n_answers = sum(message["role"] == "assistant" for message in chat.messages)
    assert encoder.count_exact_answers(found, found.document) == (n_answers, n_answers)


def test_only_the_last_answer(tokenizer):
    made = ChatTemplate(tokenizer, settings_of(tokenizer, "qwen3", train_on=("last",))).render_documents(
        CHATS["three answers"]
    )
    [segments] = made.documents
    assert [text for text, learnt in segments if learnt] == ["<think>\nso n2\n</think>\n\nn2<|im_end|>\n"]


def test_joint_is_refused_where_it_is_not_exact(tokenizer):
    template = ChatTemplate(tokenizer, settings_of(tokenizer, "qwen3", turns="joint"))
    assert len(template.render_documents(CHATS["one answer"]).documents) == 1
    with pytest.raises(UnusableChatError, match="changes earlier messages when later ones follow"):
        template.render_documents(CHATS["three answers"])


def test_an_answer_without_the_thinking_that_the_prompt_begins_is_refused(tokenizer):
    template = ChatTemplate(tokenizer, settings_of(tokenizer, "deepseek-r1-distill"))
    with pytest.raises(
        UnusableChatError,
        match=r"message 2 \(assistant\): the chat template's prompt for it ends with '<think>\\n', but the",
    ):
        template.render_documents(Chat((turn("user", "a"), turn("assistant", "b"))))


def test_messages_that_the_template_refuses_by_themselves(tokenizer):
    """A system text alone (Qwen 3.5), tools without a question (Llama 3.1), a greeting before the first question."""
    both = settings_of(tokenizer, "qwen3.5", train_on=("user", "assistant"))
    chat = Chat((turn("system", "S"), turn("user", "Q"), turn("assistant", "A")))
    [segments] = ChatTemplate(tokenizer, both).render_documents(chat).documents
    assert [text for text, learnt in segments if learnt] == ["Q<|im_end|>\n", "\n</think>\n\nA<|im_end|>\n"]
    greeting = Chat((turn("system", "S"), turn("assistant", "Hello a"), turn("user", "Q"), turn("assistant", "A")))
    [segments] = ChatTemplate(tokenizer, settings_of(tokenizer, "qwen3.5")).render_documents(greeting).documents
    assert [text for text, learnt in segments if learnt] == ["Hello a<|im_end|>\n", "\n</think>\n\nA<|im_end|>\n"]
    longer = dataclasses.replace(greeting, messages=(*greeting.messages, turn("user", "R"), turn("assistant", "B")))
    made = ChatTemplate(tokenizer, settings_of(tokenizer, "qwen3.5")).render_documents(longer)
    assert [[text for text, learnt in segments if learnt] for segments in made.documents] == [
        ["Hello a<|im_end|>\n", "\n</think>\n\nA<|im_end|>\n"],
        ["\n</think>\n\nB<|im_end|>\n"],
    ]
    both = settings_of(tokenizer, "llama-3.1", train_on=("user", "assistant"))
    [segments] = ChatTemplate(tokenizer, both).render_documents(dataclasses.replace(chat, tools=TOOLS)).documents
    assert [text for text, learnt in segments if learnt] == ["Q<|eot_id|>", "A<|eot_id|>"]


def test_what_a_template_leaves_out_of_an_answer_is_named(tokenizer, tmp_path):
    beside = Chat((turn("user", "1?"), turn("assistant", "I add.", tool_calls=[CALL])))
    assert (
        ChatTemplate(tokenizer, settings_of(tokenizer, "llama-3.1")).render_documents(beside).omission
        == "message 2 (assistant): its content"
    )
    assert not ChatTemplate(tokenizer, settings_of(tokenizer, "qwen3")).render_documents(beside).omission
    thought = Chat((turn("user", "1?"), turn("assistant", "2", reasoning_content="1 + 1")))
    words = "message 2 (assistant): its reasoning_content"
    assert ChatTemplate(tokenizer, settings_of(tokenizer, "qwen2.5")).render_documents(thought).omission == words
    assert not ChatTemplate(tokenizer, settings_of(tokenizer, "qwen3")).render_documents(thought).omission


def test_calls_and_tools_that_a_template_does_not_know_are_named(tokenizer):
    assert ChatTemplate(tokenizer, settings_of(tokenizer, "olmo2")).render_documents(CHATS["calls"]).omission == "tools"
    without = dataclasses.replace(CHATS["calls"], tools=None)
    assert (
        ChatTemplate(tokenizer, settings_of(tokenizer, "olmo2")).render_documents(without).omission
        == "message 3 (assistant): its tool_calls"
    )
    for name in ("qwen2.5", "qwen3", "qwen3.5", "llama-3.1"):
        assert not ChatTemplate(tokenizer, settings_of(tokenizer, name)).render_documents(CHATS["calls"]).omission
    for name in NAMES:  # thinking that a prompt begins is not left out
        assert (
            not ChatTemplate(tokenizer, settings_of(tokenizer, name)).render_documents(CHATS["three answers"]).omission
        ), name


def test_an_answer_may_begin_as_the_thinking_ends(tokenizer):
    chat = Chat((turn("user", "4?"), turn("assistant", "<think>\nso\n</think><answer>4</answer>")))
    [segments] = ChatTemplate(tokenizer, settings_of(tokenizer, "deepseek-r1-distill")).render_documents(chat).documents
    assert segments[-1] == (f"so\n</think><answer>4</answer>{tokenizer.eos_token}", True)


def test_questions_and_answers_as_conversations(demo, tmp_path):
    records = [
        {"instruction": "Add.", "input": "1 2", "output": "3", "system": "S", "history": [["a", "b"]]},
        {"prompt": "p", "completion": "c"},
        {"text": "alone"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    model = model_with(demo, tmp_path / "m", "qwen2.5")
    found, lines = tokenised(tmp_path / "a.jsonl", model, tmp_path / "cache", prompts="chat")
    text = AutoTokenizer.from_pretrained(demo).decode(found & ~MARKS)
    assert text.startswith(
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nAdd.\n1 2"
    )
    assert lines[-1].startswith("data: 3 documents, 2 of them conversations, ")
    plain, _ = tokenised(tmp_path / "a.jsonl", model, tmp_path / "cache")
    assert "### Instruction:" in AutoTokenizer.from_pretrained(demo).decode(plain & ~MARKS)


def model_with(demo, to, name):
    shutil.copytree(demo, to)
    (to / "chat_template.jinja").write_text(template_of(name))
    return to


def tokenised(path, model, cache, **more):
    lines = []
    made = tokens.load_or_tokenize(
        Data(paths=(str(path),), **more),
        model,
        cache,
        tokens.ProgressReport(lambda *_: None, lambda: None, lines.append),
    )
    return np.fromfile(cache / made.name, np.uint32), lines


def test_a_conversation_with_a_document_per_answer_is_counted_and_never_divided_for_evaluation(demo, tmp_path):
    records = [{"messages": [turn(r, f"{w} {i}") for w in "abc" for r in ("user", "assistant")]} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*records, {"text": "alone"}])))
    found, lines = tokenised(tmp_path / "a.jsonl", model_with(demo, tmp_path / "m", "qwen3"), tmp_path / "cache")
    assert lines[-1].startswith("data: 61 documents, 20 of them conversations, ")
    assert "; 20 conversations became 60 documents, one per answer, with 1" in lines[-1]
    assert "% more text (the chat template changes earlier messages when later ones follow)" in lines[-1]
    begins = found[document_bounds(found)[:-1]]
    assert [bool(begin & SAME_CHAT) for begin in begins] == [False, True, True] * 20 + [False]
    assert all(begin & DOCUMENT_START for begin in begins)
    conversation = dict(
        zip(document_bounds(found)[:-1].tolist(), np.cumsum(begins & SAME_CHAT == 0).tolist(), strict=True)
    )
    for seed in range(20):
        kept_N2, held_N2 = split_documents(found, len(found) // 10, np.random.default_rng(seed))
        kept, held = ({conversation[begin] for begin, _ in each.tolist()} for each in (kept_N2, held_N2))
        assert held
        assert not kept & held


def test_the_date_of_a_template_is_that_of_the_run(demo, tmp_path):
    model = model_with(demo, tmp_path / "m", "llama-3.2")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [turn("user", "a"), turn("assistant", "b")]}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    today, _ = tokenised(tmp_path / "a.jsonl", model, tmp_path / "cache")
    fixed, _ = tokenised(tmp_path / "a.jsonl", model, tmp_path / "cache", template_date="2024-02-29")
    assert datetime.date.today().strftime("Date: %d %b %Y") in tokenizer.decode(today & ~MARKS)
    assert "Date: 29 Feb 2024" in tokenizer.decode(fixed & ~MARKS)
    assert add_template_date(Data(), tokenizer, "2020-01-01").template_date == "2020-01-01"
    assert add_template_date(Data(template_date="2021-01-01"), tokenizer, "2020-01-01").template_date == "2021-01-01"
    tokenizer.chat_template = template_of("qwen3")
    assert add_template_date(Data(), tokenizer, "2020-01-01").template_date == ""
    with pytest.raises(UserError, match=r"--data\.template_date: the chat template asks for no date"):
        ChatTemplate(tokenizer, Data(template_date="2024-02-29"))


@pytest.mark.slow
def test_tokens_that_were_made_another_day_keep_their_date(demo, tmp_path):
    model = model_with(demo, tmp_path / "m", "llama-3.2")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [turn("user", "a"), turn("assistant", "b")]}))
    config = Data(paths=(str(tmp_path / "a.jsonl"),), template_date="2024-02-29")
    made = tokens.tokenize(config, model, tmp_path / "out", 1, lambda *_: None)
    assert made.template_date == "2024-02-29"
    again = tokens.tokenize(dataclasses.replace(config, template_date=""), model, tmp_path / "out", 1, lambda *_: None)
    assert again == made
    report = tokens.ProgressReport(lambda *_: None, lambda: None, lambda _: None)
    used = tokens.load_or_tokenize(Data(paths=(str(tmp_path / "out"),)), model, tmp_path / "cache", report)
    assert used.n_tokens == made.n_tokens
    with pytest.raises(UserError, match=r"--data\.template_date: .*out was made with 2024-02-29; leave it out"):
        tokens.load_or_tokenize(
            Data(paths=(str(tmp_path / "out"),), template_date="2030-01-01"), model, tmp_path / "cache", report
        )


def test_arguments_reach_the_template_and_unknown_ones_are_refused(tokenizer):
    chat = Chat((turn("user", "a"), turn("assistant", "b")))
    [segments] = (
        ChatTemplate(tokenizer, settings_of(tokenizer, "qwen3", template_arguments=("enable_thinking=false",)))
        .render_documents(chat)
        .documents
    )
    assert [text for text, learnt in segments if learnt] == ["b<|im_end|>\n"]
    own = dataclasses.replace(chat, arguments={"enable_thinking": False})
    assert ChatTemplate(tokenizer, settings_of(tokenizer, "qwen3")).render_documents(own).documents == [segments]
    otherwise = settings_of(tokenizer, "qwen3", template_arguments=("enable_thinking=true",))
    assert ChatTemplate(tokenizer, otherwise).render_documents(own).documents == [segments]  # the record's own counts
    with pytest.raises(
        UserError, match=r"asks for no 'enable_thinkin'; it asks for content, enable_thinking, thought; correct it"
    ):
        ChatTemplate(tokenizer, settings_of(tokenizer, "qwen3", template_arguments=("enable_thinkin=false",)))
    settings_of(tokenizer, "llama-3.2")
    assert template_variables(tokenizer) > {"date_string", DATE_FUNCTION}
    [segments] = (
        ChatTemplate(tokenizer, Data(template_arguments=("date_string=May",), template_date="2024-02-29"))
        .render_documents(chat)
        .documents
    )
    assert "Date: May\n" in segments[0][0]
    tokenizer.chat_template = "{% generation %}{{ mode }}{% endgeneration %}{%- break %}"
    assert template_variables(tokenizer) == {"mode"}


def test_what_is_before_a_text_is_what_the_tokenizer_puts_there(demo, tmp_path):
    model = shutil.copytree(demo, tmp_path / "m")
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    begin = AutoTokenizer.from_pretrained(demo).bos_token_id

    def first(**more):
        return tokenised(tmp_path / "a.jsonl", model, tmp_path / "cache", **more)[0][0] & ~MARKS

    assert (first(), first(bos="always")) == (begin, begin)
    assert first(bos="never") != begin
    file = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(file | {"post_processor": None}))
    assert first() != begin
    assert first(bos="always") == begin


@pytest.mark.parametrize("adds", [True, False])
def test_a_tokenizer_s_own_word_on_its_first_token_counts(demo, tmp_path, adds):
    """As Llama's class has it, whatever the file's post-processor says."""
    model = shutil.copytree(demo, tmp_path / "m")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": adds})
    )
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    found, _ = tokenised(tmp_path / "a.jsonl", model, tmp_path / "cache")
    begin = AutoTokenizer.from_pretrained(demo).bos_token_id
    assert bool(found[0] & ~MARKS == begin) is adds
    assert not found[1] & NOT_TRAINED


def test_tools_and_calls_have_the_same_tokens_in_every_form_of_file(demo, tmp_path):
    """Of records that differ, a table has the fields of all, null where a record lacks them, and one order."""
    city = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
    }
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": city}},
        {
            "type": "function",
            "function": {"name": "time", "description": "The time.", "parameters": {"type": "object"}},
        },
        {
            "function": {"description": "Adds.", "name": "add", "parameters": {"type": "object", "description": "two"}},
            "type": "function",
        },
    ]
    arguments = [{"city": "Oslo"}, {"zone": "CET"}, {"a": 1, "b": 2}]
    records = []
    for tool, given in zip(tools, arguments, strict=True):
        call = {"id": "1", "type": "function", "function": {"name": tool["function"]["name"], "arguments": given}}
        turns = [
            turn("user", "do"),
            turn("assistant", None, tool_calls=[call]),
            turn("tool", "3"),
            turn("assistant", "done"),
        ]
        records.append({"messages": turns, "tools": [tool]})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    in_json = [{name: json.dumps(value) for name, value in record.items()} for record in records]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(in_json), tmp_path / "texts.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ["messages", "tools"])
        rows.writeheader()
        rows.writerows(in_json)
    model = model_with(demo, tmp_path / "m", "qwen2.5")
    first, _ = tokenised(tmp_path / "a.jsonl", model, tmp_path / "cache")
    assert first.size > 300
    for name in ("a.parquet", "texts.parquet", "a.csv"):
        assert np.array_equal(tokenised(tmp_path / name, model, tmp_path / "cache")[0], first), name


TUPLES = """
READS = ("*.pairs",)


def documents(path):
    talk = [{"role": role, "content": f"{word} it"} for word in "ab" for role in ("user", "assistant")]
    yield {"messages": talk}, "second"
    yield "third", {"nothing": 1}
    yield "", "fourth"
    yield "fifth", "sixth"
"""


def test_documents_of_a_tuple_are_kept_or_left_out_together(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(extend, "_current", extend.Extension())
    (tmp_path / "own.py").write_text(TUPLES)
    (tmp_path / "a.pairs").touch()
    extend.use(str(tmp_path / "own.py"))
    model = model_with(demo, tmp_path / "m", "qwen3")  # one document per answer
    found, _ = tokenised(tmp_path / "a.pairs", model, tmp_path / "cache", bad_records="skip", bad_records_limit=50.0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    bounds = document_bounds(found).tolist()
    texts = [tokenizer.decode(found[begin:end] & ~MARKS) for begin, end in itertools.pairwise(bounds)]
    together = [bool(found[begin] & WITH_PREVIOUS) for begin in bounds[:-1]]
    last_words = [re.sub(r"<\|\w+\|>", " ", text).split()[-1:] for text in texts]
    assert [*itertools.chain(*last_words)] == ["it", "it", "second", "fourth", "fifth", "sixth"]
    assert sum(together) == (len(texts) - 3)
    assert len(document_bounds(found, joined=True)) == 4  # three groups
    short, _ = tokenised(
        tmp_path / "a.pairs", model, tmp_path / "short", bad_records="skip", bad_records_limit=50.0, max_bytes=1
    )
    assert np.array_equal(short, found[: document_bounds(found, joined=True)[1]])
