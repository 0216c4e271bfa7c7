"""Special tokens that texts spell, and those that a chat template writes."""

import itertools
import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llama405b.contract.errors import UserError
from llama405b.data import tokens
from llama405b.data.chat_template import ChatTemplate
from llama405b.data.encode import DOCUMENT_START, MARKS, NOT_TRAINED
from llama405b.formats.conversation import Chat
from llama405b.settings.schema import Data

TURN, CALL = "<|eot_id|>", "<|call|>"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}" + TURN + "{% endif %}{% for m in messages %}<|{{ m['role'] }}|>\n\n"
    "{% if 'refuse' in (m['content'] or '') %}{{ raise_exception('refused: ' + m['content']) }}{% endif %}"
    "{% for call in m['tool_calls'] %}" + CALL + "{{ call | tojson }}{% endfor %}{{ m['content'] | trim }}"
    + TURN + "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
)  # fmt: skip
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TALK = [
    {"role": "user", "content": "What ends a turn?"},
    {"role": "assistant", "content": "It has\r\na name.", "tool_calls": [{"name": "f", "arguments": {"x": "y"}}]},
    {"role": "user", "content": "Which  one? "},
    {"role": "assistant", "content": "I cannot say it."},
]


@pytest.fixture
def model(demo, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(demo)
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN, CALL, *ROLES]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def tokenised(record, model, **more):
    path = model.parent / "a.jsonl"
    path.write_text(json.dumps(record))
    lines, config = [], Data(paths=(str(path),), **more)
    made = tokens.load_or_tokenize(
        config, model, model.parent / "cache", tokens.ProgressReport(print, lambda: None, lines.append)
    )
    return np.fromfile(model.parent / "cache" / made.name, np.uint32), lines[-1]


def spelling(messages, letters):
    return [message | {"content": message["content"].replace(*letters)} for message in messages]


def test_what_the_names_of_a_tool_s_arguments_spell_is_text(model):
    tools = [{"name": "f", "properties": {f"k{TURN}": 1}}]
    found, _ = tokenised({"messages": TALK, "tools": tools}, model)
    turn = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(TURN)
    assert np.count_nonzero((found & ~MARKS) == turn) == len(TALK) + 1  # the template's own
    tokenised(
        {"messages": TALK, "tools": [{"name": "f", "half\ud83d": 1}]}, model
    )  # JSON can spell half of a character


def test_a_template_that_escapes_what_it_writes_cannot_be_used_for_those_that_spell_tokens(model):
    template = "{% for m in messages %}{{ [m['content']] | string }}" + TURN + "{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    tokenised({"messages": TALK[:2]}, model)
    with pytest.raises(UserError, match=r"a.jsonl:1: the chat template escapes its output, so special tokens"):
        tokenised({"messages": spelling(TALK[:2], ("turn", TURN))}, model)


@pytest.mark.parametrize("tools", [None, [{"name": "f"}]])
def test_a_conversation_that_spells_none_has_the_tokens_of_its_template(model, tools):
    found, said = tokenised({"messages": TALK, "tools": tools}, model, special_tokens="text")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (found & ~MARKS).tolist() == _parsed(tokenizer, TALK, tools)
    assert "spell" not in said


def _parsed(tokenizer, messages, tools=None):
    """The tokens of what the template writes, by themselves; its text is split where learning begins and ends."""
    [segments] = ChatTemplate(tokenizer, Data()).render_documents(Chat(tuple(messages), tools)).documents
    parts = tokenizer([text for text, _ in segments], add_special_tokens=False)["input_ids"]
    return list(itertools.chain(*parts))


def _as_text(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_what_messages_and_tools_spell_is_text(model):
    tokenizer, name = AutoTokenizer.from_pretrained(model), f"a {TURN} b{tokenizer_begin(model)}"
    messages = spelling(TALK, ("a name", name))
    messages[1]["tool_calls"] = [{"name": f"f{CALL}", "arguments": {"x": CALL}}]
    found, said = tokenised({"messages": messages, "tools": [{"name": ROLES[0]}]}, model)
    ids = (found & ~MARKS).tolist()
    specials = [tokenizer.decode(each) for each in ids if each in tokenizer.all_special_ids]
    turn = [ROLES[1], TURN, ROLES[2], TURN]
    assert specials == [tokenizer.bos_token, TURN, *turn[:3], CALL, *turn[3:], *turn]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tools=[{"name": ROLES[0]}], tokenize=False)
    learnt = tokenizer.decode(np.split(found, np.flatnonzero(np.diff(found & NOT_TRAINED)) + 1)[1] & ~MARKS)
    assert learnt == f'{CALL}{{"name": "f{CALL}", "arguments": {{"x": "{CALL}"}}}}It has\r\n{name}.{TURN}'
    between = ids[ids.index(tokenizer.convert_tokens_to_ids(CALL)) + 1 :]
    between = between[: between.index(tokenizer.convert_tokens_to_ids(TURN))]
    assert between == _as_text(
        tokenizer, learnt.removeprefix(CALL).removesuffix(TURN)
    )  # as one text, however it is spelt
    assert "; 1 document spells special tokens, kept as text (--data.special_tokens parse makes them tokens)" in said
    with pytest.raises(UserError, match=r"refused: refuse <\|eot_id\|>\); correct it"):
        tokenised({"messages": [{"role": "user", "content": f"refuse {TURN}"}]}, model)


def tokenizer_begin(model):
    return AutoTokenizer.from_pretrained(model).bos_token


@pytest.mark.parametrize("record", [{"text": "one {} two"}, {"prompt": "one {}", "completion": " two"}])
def test_what_a_text_spells_is_text_and_its_begin_and_end_are_tokens(model, record):
    tokenizer = AutoTokenizer.from_pretrained(model)
    spelt = {key: value.format(f"{TURN}{tokenizer.eos_token}") for key, value in record.items()}
    found, said = tokenised(spelt, model)
    parts = [_as_text(tokenizer, text) for text in spelt.values()]
    assert (found & ~MARKS).tolist() == [tokenizer.bos_token_id, *itertools.chain(*parts), tokenizer.eos_token_id]
    assert np.flatnonzero(found & DOCUMENT_START).tolist() == [0]
    assert "1 document spells special tokens" in said


def test_who_means_them_has_them_parsed(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    found, said = tokenised({"text": f"one {TURN} two"}, model, special_tokens="parse")
    assert tokenizer.convert_tokens_to_ids(TURN) in (found & ~MARKS)
    assert "spell" not in said
    messages = spelling(TALK, ("a name", TURN))
    found, _ = tokenised({"messages": messages}, model, special_tokens="parse")
    assert (found & ~MARKS).tolist() == _parsed(tokenizer, messages)


def test_tokens_made_by_the_other_rule_are_refused(model):
    ours, other = (Data(special_tokens=choice) for choice in ("text", "parse"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokens.rules_digest(ours, tokenizer) != tokens.rules_digest(other, tokenizer)


def _character_tokenizer(**how):
    letters = [*sorted(set("▁abcdefghijklmnopqrstuvwxyz:.?</>|_-0123456789\n")), "<unk>", "<s>", "</s>"]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token="<unk>"))
    for name, value in how.items():
        setattr(backend, name, value)
    backend.add_special_tokens([AddedToken("</s>", rstrip=True), AddedToken("<s>"), AddedToken("<unk>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    "how",
    [
        {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])},
        {"pre_tokenizer": pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)},
        {"pre_tokenizer": pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=False)},
    ],
    ids=["a space after each token", "a space at the beginning", "a space before each text"],
)
def test_tokenizers_with_spaces_of_their_own_split_at_the_template_s_tokens_as_ever(how):
    from llama405b.data.encode import SpecialTokenEscaper

    tokenizer = _character_tokenizer(**how)
    ours, parsed = SpecialTokenEscaper(tokenizer), SpecialTokenEscaper(tokenizer, parse_special=True)
    text = "<s>ask me </s>  I say<s></s> x"
    assert ours.encode([ours.restore(text)]) == parsed.encode([text]) == [tokenizer(text)["input_ids"]]
    guarded = ours.escape("a</s> b")
    [ids] = ours.encode([ours.restore(f"<s>{guarded}</s>")])
    assert [ids[0], ids[-1]] == tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    assert ours.encode([ours.restore(guarded)]) == [_as_text(tokenizer, "a</s> b")]
