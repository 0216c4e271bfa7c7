"""Conversations: what the template makes of them, what of that is learnt, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from llama405b.contract.errors import UserError
from llama405b.data import tokens
from llama405b.data.chat_template import ChatTemplate, UnusableChatError
from llama405b.data.encode import DOCUMENT_START, MARKS, NOT_TRAINED
from llama405b.formats.conversation import Chat
from llama405b.formats.corpus import check_template
from llama405b.formats.document import ALPACA, Text, parse_document
from llama405b.settings.schema import Data

# In the form of Llama 3: a header with the role, two newlines, the text without blanks at its ends, an end of turn.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n\n{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
)
# In the form of Mistral: a system message joins the first question; only an answer has an end.
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% if (loop.index0 % 2) == 1 %}{{ raise_exception('roles must alternate') }}{% endif %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
LAST_ONLY = "{% for m in messages %}{{ m['role'] }}:{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": " two "},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture
def tokenizer(demo):
    found = AutoTokenizer.from_pretrained(demo)
    found.chat_template = HEADERS
    return found


def learnt(tokenizer, messages, learn=("assistant",)):
    [segments] = ChatTemplate(tokenizer, Data(train_on=learn)).render_documents(Chat(tuple(messages))).documents
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "".join(text for text, _ in segments) == whole
    return [text for text, is_learnt in segments if is_learnt]


def test_answers_are_learnt_with_their_end_and_without_their_header(tokenizer):
    assert learnt(tokenizer, TALK) == ["two<|end|>", "four<|end|>"]
    assert learnt(tokenizer, TALK[:4]) == ["two<|end|>"]
    assert learnt(tokenizer, TALK[:2]) == []
    tokenizer.chat_template = INSTRUCTIONS
    assert learnt(tokenizer, TALK[1:]) == [f"  two {tokenizer.eos_token}", f" four{tokenizer.eos_token}"]


def test_other_roles_and_weights(tokenizer):
    assert learnt(tokenizer, TALK, learn=("user",)) == ["one?<|end|>", "three?<|end|>"]
    assert learnt(tokenizer, TALK, learn=("assistant", "tool", "system"))[1:] == ["two<|end|>", "four<|end|>"]
    assert learnt(tokenizer, TALK, learn=("last",)) == ["four<|end|>"]
    assert learnt(tokenizer, TALK[:4], learn=("last", "user")) == ["one?<|end|>", "two<|end|>", "three?<|end|>"]
    unlearnt = [*TALK[:2], TALK[2] | {"weight": 0}, *TALK[3:]]
    assert learnt(tokenizer, unlearnt) == ["four<|end|>"]


@pytest.mark.parametrize("first", ["a greeting", " Hello ", ""])
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_what_a_template_writes_before_the_first_message_is_not_learnt(tokenizer, first, role):
    tokenizer.chat_template = HEADERS.replace("{{ bos_token }}", "{{ bos_token }}<|system|>\n\nToday is a day.<|end|>")
    said = learnt(tokenizer, [{"role": role, "content": first}, *TALK[1:3]], learn=(role,))
    assert said[0] == f"{first.strip()}<|end|>"


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (INSTRUCTIONS, [TALK[1], TALK[1]], r"the chat template refuses it \(roles must alternate\)"),
        ("{{ messages[0]['content'].nothing() }}", TALK, "the chat template refuses it"),
    ],
)
def test_what_the_template_cannot_do_is_said(tokenizer, template, messages, words):
    tokenizer.chat_template = template
    with pytest.raises(UnusableChatError, match=words):
        ChatTemplate(tokenizer, Data()).render_documents(Chat(tuple(messages)))


def test_forms_of_records():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "tool", "value": "c"}]
    chat = parse_document({"conversations": turns})
    assert [(m["role"], m["content"]) for m in chat.messages] == [("user", "a"), ("assistant", "b"), ("tool", "c")]
    assert parse_document({"prompt": "a", "completion": "b"}) == Text("a", "b")
    assert parse_document({"text": "a", "more": 1}) == Text("", "a")


@pytest.mark.parametrize(
    ("record", "document"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, Text(ALPACA[1].format("Add.", "1 2"), "3")),
        ({"instruction": "Sing.", "input": "", "output": "la"}, Text(ALPACA[0].format("Sing."), "la")),
        ({"instruction": "Sing.", "input": None, "output": "la", "text": "all"}, Text(ALPACA[0].format("Sing."), "la")),
        ({"question": "q", "answer": "a", "id": 3}, Text("q\n\n", "a")),
        ({"prompt": "q", "response": "a"}, Text("q\n\n", "a")),
        ({"content": "c"}, Text("", "c")),
        ({"body": "c", "text": "t"}, Text("", "t")),
    ],
)
def test_common_forms_are_known_by_the_names_of_their_fields(record, document):
    assert parse_document(record) == document


def test_fields_of_other_names_are_read_as_it_was_said():
    names = ("prompt=q", "completion=a")
    assert parse_document({"q": "x", "a": "y", "text": "t"}, names) == Text("x", "y")
    assert parse_document({"text": "t"}, names) == Text("", "t")
    assert parse_document({"q": "x", "text": "t"}, names) is None
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_document({"talk": [{"role": "user", "content": parts}]}, ("messages=talk",)) == Chat(
        ({"role": "user", "content": "ab"},)
    )


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_documents_with_crlf_are_counted_and_told(demo, tmp_path, name):
    text = "one\r\ntwo\r\n"
    (tmp_path / name).write_bytes(text.encode() if name == "a.txt" else json.dumps({"text": text}).encode())
    (tmp_path / f"b{name}").write_text("none" if name == "a.txt" else '{"text": "none"}\r\n')
    found, lines = tokenised(f"{tmp_path}/*a.*", demo, tmp_path / "cache")
    assert lines[-1].endswith("; 1 document has CRLF line endings, kept as they are")
    assert text in AutoTokenizer.from_pretrained(demo).decode(found & ~MARKS)


def with_template(demo, to, template):
    shutil.copytree(demo, to)
    (to / "chat_template.jinja").write_text(template)
    return to


def tokenised(path, demo, cache, **more):
    lines = []
    report = tokens.ProgressReport(lambda *_: None, lambda: None, lines.append)
    made = tokens.load_or_tokenize(Data(paths=(str(path),), **more), demo, cache, report)
    return np.fromfile(cache / made.name, np.uint32), lines


def test_a_file_of_conversations_becomes_tokens(tokenizer, demo, tmp_path):
    demo = with_template(demo, tmp_path / "model", HEADERS)
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"messages": TALK[:n]}) for n in (3, 5)) + '\n{"text": "plain"}\n'
    )
    found, lines = tokenised(tmp_path / "a.jsonl", demo, tmp_path / "cache")
    documents = np.split(found, np.flatnonzero(found & DOCUMENT_START)[1:])
    parts = [tokenizer.decode((each[(each & NOT_TRAINED) == 0]) & ~MARKS) for each in documents]
    assert parts[:2] == ["two<|end|>", "two<|end|>four<|end|>"]
    assert tokenizer.decode(documents[1] & ~MARKS) == tokenizer.apply_chat_template(TALK, tokenize=False)
    n_learnt = int(((found & NOT_TRAINED) == 0).sum())
    share = 100 * n_learnt / len(found)
    said = f"data: 3 documents, 2 of them conversations, {len(found):,} tokens, {n_learnt:,} trained on ({share:.0f}%)"
    assert lines[-1] == said
    again, lines = tokenised(tmp_path / "a.jsonl", demo, tmp_path / "cache")
    assert np.array_equal(again, found)
    assert lines == [said]  # and nothing was tokenized
    both, _ = tokenised(tmp_path / "a.jsonl", demo, tmp_path / "cache", train_on=("assistant", "user"))
    assert int(((both & NOT_TRAINED) == 0).sum()) > n_learnt


def test_bad_records_are_refused_or_counted(demo, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n\n{"txt": "b"}\nno json\n{"text": "c"}\n')
    with pytest.raises(
        UserError, match=r"a\.jsonl:3: not \{\"text\": …\}.*; correct it, or leave such records out with --data"
    ):
        tokenised(file, demo, tmp_path / "cache")
    _, lines = tokenised(file, demo, tmp_path / "cache", bad_records="skip", bad_records_limit=50.0)
    assert lines[-1].startswith("data: 2 documents, ")
    assert f"; 2 records left out: 1 like {file}:3: not " in lines[-1]
    with pytest.raises(UserError, match=r"skip leaves out 2 records of 4 \(50%\), first .*a\.jsonl:3: .*which is 5%$"):
        tokenised(file, demo, tmp_path / "cache", bad_records="skip")
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": TALK}))
    with pytest.raises(
        UserError, match=r"b\.jsonl:1: is a conversation, but the tokenizer has no chat template; name a file"
    ):
        tokenised(tmp_path / "b.jsonl", demo, tmp_path / "cache", bad_records="skip")
    odd = with_template(demo, tmp_path / "model", LAST_ONLY)
    with pytest.raises(UserError, match=r"b\.jsonl:1: the chat template changes earlier messages"):
        tokenised(tmp_path / "b.jsonl", odd, tmp_path / "cache", turns="joint")
    with pytest.raises(UserError, match=r"--data\.chat_template: none\.jinja: cannot be read \(No such file"):
        check_template(Path("none.jinja"))


def test_a_conversation_of_which_the_template_writes_nothing_is_a_bad_record(demo, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(demo)
    tokenizer.chat_template = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UnusableChatError, match="the chat template renders it as an empty text"):
        ChatTemplate(tokenizer, Data()).render_documents(Chat(({"role": "system", "content": "a"},)))


@pytest.mark.timeout(60)
def test_a_template_that_never_ends_is_refused_with_the_conversation(demo, tmp_path, monkeypatch):
    monkeypatch.setattr("llama405b.data.encode.MAX_RENDER_S", 0.3)
    monkeypatch.setattr("llama405b.data.chat_template.MAX_RENDER_S", 0.3)
    shutil.copytree(demo, tmp_path / "model")
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "model/chat_template.jinja").write_text(loops)
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": TALK}))
    config = Data(paths=(str(tmp_path / "d.jsonl"),), bad_records="skip")
    report = tokens.ProgressReport(lambda *_: None, lambda: None, lambda _: None)
    with pytest.raises(
        UserError, match=r"d\.jsonl:1: the chat template did not finish within 0 s for this conversation"
    ):
        tokens.load_or_tokenize(config, tmp_path / "model", tmp_path / "cache", report)
