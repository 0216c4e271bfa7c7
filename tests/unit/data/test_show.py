"""``llama405b data show``: what is learnt is what is marked."""

import json
import re
import shutil

import numpy as np
import pytest

import llama405b.commands.data
from llama405b.contract.errors import UserError
from llama405b.data.batches import Batches
from llama405b.data.encode import DOCUMENT_START, NOT_TRAINED
from llama405b.data.preview import format_preview, preview_sequences
from llama405b.data.sources import Mixture, Source
from llama405b_tools.verbs import data


@pytest.fixture
def show(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def typed(*settings):
        assert data.main(["show", "--model.path", str(demo), *settings]) == 0
        return capsys.readouterr().out

    return typed


def test_what_is_learnt_is_marked_and_counted(show, tmp_path):
    records = [{"prompt": f"Say {n} \x1b[31m", "completion": f"number {n}"} for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    settings = ("--data.paths", "a.jsonl", "--data.seq_len", "64")
    text = show(*settings, "--sequences", "3")
    assert re.search(r"^data: 60 documents, [\d,]+ tokens, [\d,]+ trained on \(\d+%\)$", text, re.MULTILINE)
    assert re.search(r"^data: \d+ sequences of 64 tokens; whole documents, [\d.]+% padding$", text, re.MULTILINE)
    assert (
        len(
            re.findall(
                r"^sequence \d of \d+: \d+ documents?, \d\d tokens, \d+ targets? \(a\.jsonl \d+(-\d+)?.*\)$",
                text,
                re.MULTILINE,
            )
        )
        == 3
    )
    whole = re.findall(r"^<\|begin_of_text\|>Say (\d+) ·\[31m⟦number (\d+)<\|end_of_text\|>⟧$", text, re.MULTILINE)
    assert len(whole) > 3
    assert all(asked == answered for asked, answered in whole)
    assert "\x1b" not in text
    assert show(*settings, "--sequences", "0").startswith("data: 60 documents, ")  # not tokenized again
    assert "continued from another sequence" not in text
    assert "continued from another sequence" in show(*settings, "--data.documents", "split")


def test_a_run_s_log_has_the_ends_of_long_texts_and_the_first_documents():
    document_N = np.arange(2000, dtype=np.uint32) | np.where(np.arange(2000) % 200 == 0, DOCUMENT_START, 0).astype(
        np.uint32
    )
    batches = Batches(Mixture((Source(document_N, seq_len=1999),), seed=0, counts=(1,)))

    def lines(*, shorten):
        [preview] = preview_sequences(batches, [0], lambda ids_N: "".join(f"{i:04}" for i in ids_N), shorten=shorten)
        return list(format_preview(preview, 1))

    assert (
        lines(shorten=False)[0]
        == lines(shorten=True)[0]
        == "sequence 1 of 1: 10 documents, 1,999 tokens, 1,990 targets"
    )
    assert lines(shorten=False)[-1] == f"⟦{''.join(f'{i:04}' for i in range(1800, 1999))}⟧"
    assert len(lines(shorten=True)) == 1 + 2 * 4 + 1
    text = "".join(f"{i:04}" for i in range(200))
    assert lines(shorten=True)[2] == f"⟦{text[:200]} [… 400 characters …] {text[-200:]}⟧"
    assert lines(shorten=True)[-1].endswith("(and 6 more documents)")


def test_of_a_long_conversation_the_log_has_the_first_and_last_turns():
    turns_N = np.arange(500, dtype=np.uint32) | np.where(np.arange(500) // 10 % 2, 0, NOT_TRAINED).astype(np.uint32)
    batches = Batches(Mixture((Source(turns_N, seq_len=499),), seed=0, counts=(1,)))
    [preview] = preview_sequences(batches, [0], lambda ids_N: f"{ids_N[0]};")
    [document] = preview.documents
    assert [part.text for part in document.parts] == ["0;", "10;", "20;", "30;", " [… 44 parts …] ", "480;", "490;"]
    assert [part.is_trained for part in document.parts] == [False, True, False, True, False, False, True]


def test_a_file_s_name_breaks_no_line_and_needs_no_utf_8(show, tmp_path):
    (tmp_path / "a\nstep 9\udce9.txt").write_text("some text " * 200)
    text = show("--data.paths", "*.txt", "--data.seq_len", "64", "--sequences", "1")
    assert re.search(r"^sequence 1 of .* targets \(a\\nstep 9\\xe9\.txt 1\)$", text, re.MULTILINE)


@pytest.mark.slow
def test_tokens_are_made_for_sequences_that_a_run_would_refuse_and_that_is_said(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 2000)
    for length, is_said in ((1024, False), (1025, True)):
        settings = ("--model.path", str(demo), "--data.paths", "a.txt", "--data.seq_len", str(length))
        assert data.main(["tokenize", *settings, "--out", f"tokens-{length}", "--workers", "1"]) == 0
        said = "1024 positions; lower it for a run; the tokens do not depend on it"
        assert (said in capsys.readouterr().out) is is_said


def test_bad_input(show, tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match=r"--data\.paths: .* tokens are fewer than one sequence of 512"):
        show("--data.paths", "a.txt", "--data.seq_len", "512")
    with pytest.raises(UserError, match="--sequences: -1 is too small; use 0 or more"):
        show("--data.paths", "a.txt", "--sequences", "-1")
    with pytest.raises(UserError, match=r"--data\.pats"):
        show("--data.pats", "a.txt")


def test_a_sequence_beyond_the_model_s_positions_is_refused(show, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 2000)
    with pytest.raises(UserError, match=r"--data\.seq_len: 1025 exceeds the model's limit of 1024 positions; lower it"):
        show("--data.paths", "a.txt", "--data.seq_len", "1025")


def test_the_demo_s_model_is_made_where_there_is_none(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llama405b.commands.data, "make_demo", lambda to: shutil.copytree(demo, to))
    (tmp_path / "a.txt").write_text("some text " * 2000)
    assert data.main(["show", "--preset", "demo", "--data.paths", "a.txt"]) == 0
    assert capsys.readouterr().out.startswith("making the demo's model and tokenizer in models/demo\n")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"q": "x", "a": "y"},
            r"not \{.*\}, but its fields are 'q', 'a'; say which fields to read, like --data\.fields ",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            r"the chat template refuses it \(no\); name another template ",
        ),
    ],
    ids=["fields", "template"],
)
def test_leaving_out_every_record_is_refused_with_what_to_do(show, tmp_path, record, words):
    (tmp_path / "a.jsonl").write_text((json.dumps(record) + "\n") * 1160)
    (tmp_path / "no.jinja").write_text("{{ raise_exception('no') }}")
    settings = ("--data.paths", "a.jsonl", "--data.bad_records", "skip", "--data.chat_template", "no.jinja")
    for _ in range(2):  # the second time, of tokens that are there
        with pytest.raises(UserError, match=rf"skip leaves nothing of 1,160 records; first a\.jsonl:1: {words}"):
            show(*settings, "--data.seq_len", "64")


def talk(*roles):
    return {"messages": [{"role": role, "content": "x " * 30} for role in roles]}


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_fields_that_are_not_read_and_conversations_without_an_answer_are_said(show, tmp_path):
    records = [
        talk("user", "assistant") | {"topic": "x"},
        talk("user", "assistant"),
        talk("system", "user"),
        talk("user"),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    text = show(
        "--data.paths", "a.jsonl", "--data.seq_len", "16", "--data.chat_template", "t.jinja", "--sequences", "0"
    )
    assert (
        "; nothing is trained on in 2 conversations: their roles are system, user; unused fields: 'topic' (a.jsonl)\n"
        in text
    )
    proof = "chat template: 1 of 1 answer of a.jsonl:1 follows the exact tokens that apply_chat_template(add_generation_prompt=True) gives"
    assert f"{proof} a model\n" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("records", "learn", "says"),
    [
        ([talk("user", "tool")] * 3, (), "nothing of 3 documents would be trained on: their roles are user, tool, and data.tr"),
        ([talk("user", "assistant")], ("--data.train_on", "system"), "their roles are user, assistant, and data.train_on is system"),
        ([talk("user", "critic")], (), "a.jsonl:1: message 2 has the role 'critic'; known roles are user, human, assistant, gpt, "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("what", ["show", "tokenize"])
def test_data_of_which_nothing_would_be_learnt_is_refused(demo, tmp_path, monkeypatch, records, learn, says, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    more = ["--out", "tokens"] if what == "tokenize" else []
    settings = [
        "--model.path",
        str(demo),
        "--data.paths",
        "a.jsonl",
        "--data.seq_len",
        "16",
        "--data.chat_template",
        "t.jinja",
    ]
    with pytest.raises(UserError) as refused:
        data.main([what, *settings, *learn, *more])
    assert says in str(refused.value)
