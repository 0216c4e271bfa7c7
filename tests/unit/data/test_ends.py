"""Documents that end otherwise than what generates with the model: named before the hours are spent."""

import json
import shutil

import pytest

from llama405b.data import tokens
from llama405b.data.batches import batches_from_files, end_token_warnings
from llama405b.settings.schema import Data

TEXTS = [{"text": f"text number {n}"} for n in range(9)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]} for n in range(9)
]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + "<|end_of_text|>\n{% endfor %}"


@pytest.fixture
def warned(demo, tmp_path):
    def call(records, generation, config=None):
        files = tmp_path / "model"
        shutil.copytree(demo, files)
        (files / "chat_template.jinja").write_text(TEMPLATE)
        (files / "generation_config.json").unlink()
        if generation is not None:
            (files / "generation_config.json").write_text(json.dumps(generation))
        described = json.loads((files / "config.json").read_text())
        (files / "config.json").write_text(json.dumps(described | (config or {})))
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        data = Data(paths=(str(path),), seq_len=8)
        report = tokens.ProgressReport(lambda *_: None, lambda: None, lambda _: None)
        made = tokens.load_or_tokenize(data, files, tmp_path / "cache", report)
        found = end_token_warnings(data, batches_from_files(data, tmp_path / "cache", [made]), files)
        return [line.replace(str(path), "PATH") for line in found]

    return call


END = 1


@pytest.mark.parametrize(
    ("generation", "config"),
    [
        ({"eos_token_id": END}, {}),
        ({"eos_token_id": [300, END]}, {}),
        ({"eos_token_id": None}, {}),
        ({}, {"eos_token_id": 300}),  # generate then has none
        (None, {"eos_token_id": END}),
        (None, {"eos_token_id": None}),
    ],
)
def test_documents_that_end_as_generate_does(warned, generation, config):
    assert warned(TEXTS, generation, config) == []


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": 300}, {}, "300"),
        ({"eos_token_id": [300, 7]}, {}, "7, 300"),
        (None, {"eos_token_id": 300}, "300"),
    ],
)
def test_documents_that_end_otherwise(warned, generation, config, ends):
    [line] = warned(TEXTS, generation, config)
    assert line == (
        f"warning: documents of PATH end with token {END} ('<|end_of_text|>'), but the model's eos_token_id is {ends}: the model would not "
        "learn to stop; make them agree, in generation_config.json, or by --data.chat_template"
    )


def test_a_template_may_write_a_line_break_after_the_end(warned):
    assert warned(CHATS, {"eos_token_id": END}) == []


def test_one_document_ends_nowhere_in_particular(warned):
    assert warned([{"text": "a long text " * 9}], {"eos_token_id": 300}) == []
