"""Render conversations with the chat template, as segments that are trained on or not. Knows no files.

An answer is trained on in the context that inference gives the model: after the template's rendering of the earlier messages with
``add_generation_prompt``, and up to the answer's end. If that context is a prefix of the rendered conversation for every answer, one
document holds all answers; otherwise each answer becomes a document.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
import jinja2.sandbox
from transformers import PreTrainedTokenizerBase

from llama405b.contract.errors import UserError
from llama405b.formats.conversation import Chat
from llama405b.settings.schema import LAST, Data

Segment = tuple[str, bool]  # text, and whether it is trained on
Span = tuple[int, int]  # of a text
MOST_S = 10.0  # CPU time to render one conversation, which takes milliseconds
TODAY = "strftime_now"  # by which a template asks for the date
OTHERWISE = "the chat template changes earlier messages when later ones follow"
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # tags of transformers, around an answer
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception")  # to every template
REASONING = ("reasoning_content", "reasoning", "thinking")  # of an answer, beside its content


class UnusableError(ValueError):
    """The template cannot render this conversation exactly."""


class RefusedError(UnusableError):
    """The template raised an error for these messages."""


class EndlessError(Exception):
    """The template did not finish in time."""


class Rendered(NamedTuple):
    """A rendered conversation."""

    documents: list[list[Segment]]  # each as its pieces
    n_chars: int  # of one document with all messages
    omitted: str = ""  # what an answer says and the template does not write


class Template:
    """Render conversations with the tokenizer's chat template, and mark what is trained on.

    Raises:
        UserError: ``data.template_arguments`` names a variable that the template does not use.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: Data) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self.arguments = arguments_of(settings, tokenizer)
        self.clock = clock_of(settings.template_date) if settings.template_date else ""

    def rendered(self, chat: Chat) -> Rendered:
        """Render a conversation as one document with all answers if that is exact, else as one per answer.

        A message of weight 0 is not trained on.

        Raises:
            UnusableError: The template cannot be used for it.
            EndlessError: The template does not end.
        """
        whole = self.render(chat)
        if not whole:
            raise UnusableError("the chat template renders it as an empty text")
        learnt = self._learnt(chat)
        own = {i: self._own(chat, i, whole) for i in learnt}
        joint = _pieces(whole, [self._span(chat, whole, i, own) for i in learnt])
        if joint and self.settings.turns != "per-answer":
            return Rendered([joint], len(whole), _omitted(chat, learnt, [joint]))
        if self.settings.turns == "joint":
            raise UnusableError(OTHERWISE)
        found, waiting = list[list[Segment]](), list[int]()
        for i in learnt:
            waiting.append(i)
            if parts := own[i]:
                text, part = "".join(parts), dataclasses.replace(chat, messages=chat.messages[: i + 1])
                pieces = _pieces(text, [self._span(part, text, k, own) for k in waiting if k == i or not own[k]])
                if not pieces:
                    raise UnusableError(OTHERWISE)
                found.append(pieces)
                waiting = []
        if waiting:
            raise UnusableError(OTHERWISE)
        found = found or [[(whole, False)]]
        return Rendered(found, len(whole), _omitted(chat, learnt, found))

    def _learnt(self, chat: Chat) -> list[int]:
        """Return the indices of the messages that are trained on."""
        roles, kept = self.settings.train_on, [i for i, m in enumerate(chat.messages) if m.get("weight") != 0]
        last = [i for i in kept if chat.messages[i]["role"] == "assistant"][-1:]
        return [i for i in kept if chat.messages[i]["role"] in roles or (LAST in roles and i in last)]

    def _own(self, chat: Chat, i: int, whole: str) -> tuple[str, str] | None:
        """Return message ``i`` as inference has it, prompt and answer; None if the template refuses these."""
        before = None
        try:
            after = self.render(chat, i + 1) if i + 1 < len(chat.messages) else whole
            if i and chat.messages[i]["role"] == "assistant":
                with contextlib.suppress(RefusedError):
                    before = self.render(chat, i, prompt=True)
            if before is None:
                before = self._beginning(chat, i, i + 1)
        except RefusedError:
            return None
        if after.startswith(before):
            return before, after[len(before) :]
        if after.startswith(self.render(chat, i)):
            return before, self._begun(chat, i, before, after)
        return before, after[self._continues(chat, i, before) :]

    def _begun(self, chat: Chat, i: int, before: str, after: str) -> str:
        """Return an answer whose opening, like ``<think>``, is in the template's prompt but not in its rendering."""
        role, content = chat.messages[i]["role"], str(chat.messages[i]["content"])
        begins = self._beginning(chat, i, i + 1)
        opening, written = before[len(begins) :], after[len(begins) :]
        end = self._end(chat, i)
        said = written.removesuffix(end)
        if not (content.startswith(opening) and content.rstrip().endswith(said.strip())):
            raise UnusableError(
                f"message {i + 1} ({role}): the chat template's prompt for it ends with {opening!r}, but the "
                "message does not begin with it; write the "
                "answer's thinking into its content"
            )
        return content[len(opening) :].rstrip() + end

    def _continues(self, chat: Chat, i: int, before: str) -> int:
        """Return where an answer begins if the prompt renders the earlier messages in another way."""
        begin, asked = self._beginning(chat, i, i + 1), str(chat.messages[i - 1]["content"]).strip()
        tail = before[before.rfind(asked) :] if asked and asked in before else ""
        if not tail or tail not in begin:
            raise UnusableError(OTHERWISE)
        return begin.rfind(tail) + len(tail)

    def _span(self, chat: Chat, whole: str, i: int, own: Mapping[int, tuple[str, str] | None]) -> Span | None:
        """Return the range of message ``i`` in a full rendering; None if it is rendered differently there."""
        if parts := own[i]:
            return (len(parts[0]), len(parts[0] + parts[1])) if whole.startswith("".join(parts)) else None
        begin = len(self._beginning(chat, i, len(chat.messages)))
        answers = [k for k, parts in own.items() if parts and k < len(chat.messages)]
        end = self._end(chat, answers[0]) if answers else ""  # as one has it that can be rendered by itself
        at = whole.find(end, begin) if end else -1
        return (begin, at + len(end)) if at >= 0 else None

    def _end(self, chat: Chat, i: int) -> str:
        """Return the text after message ``i``: the common suffix of renderings that differ in its content."""
        text = "b" if str(chat.messages[i].get("content")).strip().endswith("a") else "a"
        both = (self.render(chat, i + 1)[::-1], self.render(_saying(chat, i, text), i + 1)[::-1])
        return os.path.commonprefix(both)[::-1]  # noqa: RUF071  (of texts)

    def _beginning(self, chat: Chat, i: int, n_messages: int) -> str:
        """Return header and all before message ``i``: the common prefix of renderings that differ in it."""
        text = "b" if str(chat.messages[i].get("content")).strip().startswith("a") else "a"
        both = (self.render(chat, n_messages), self.render(_saying(chat, i, text), n_messages))
        return os.path.commonprefix(both)  # noqa: RUF071  (of texts)

    def render(self, chat: Chat, n_messages: int | None = None, *, prompt: bool = False) -> str:
        """Return the first ``n_messages`` as text; ``prompt``: with the header of an answer.

        Raises:
            RefusedError: The template refuses them.
            EndlessError: The template does not end.
        """
        messages: Sequence[object] = [dict(message) for message in chat.messages[:n_messages]]
        try:
            with _ending_in_time():
                return str(
                    self.tokenizer.apply_chat_template(
                        messages,
                        chat_template=self.clock + self.tokenizer.get_chat_template(tools=chat.tools),
                        tools=chat.tools,
                        tokenize=False,
                        add_generation_prompt=prompt,
                        # A conversation's arguments override data.template_arguments.
                        **{**self.arguments, **chat.arguments},
                    )
                )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RefusedError(f"the chat template refuses it ({' '.join(str(error).split())})") from None


def _pieces(whole: str, spans: Sequence[Span | None]) -> list[Segment] | None:
    """Split a text into segments, marking these ranges as trained on; None if one is missing or they overlap."""
    found, done = list[Segment](), 0
    for span in spans:
        if span is None or span[0] < done:
            return None
        found += [(whole[done : span[0]], False), (whole[slice(*span)], True)]
        done = span[1]
    return [(text, learnt) for text, learnt in (*found, (whole[done:], False)) if text]


def _saying(chat: Chat, i: int, text: str) -> Chat:
    """Return the conversation with the content of message ``i`` replaced."""
    others = {**chat.messages[i], "content": text}
    return dataclasses.replace(chat, messages=(*chat.messages[:i], others, *chat.messages[i + 1 :]))


def _omitted(chat: Chat, learnt: Sequence[int], documents: Sequence[Sequence[Segment]]) -> str:
    """Name the first field of a conversation that the template drops, ignoring blanks; '' if there is none.

    The template may drop the thinking of answers that are not trained on.
    """
    text = "".join("".join(part.split()) for segments in documents for part, _ in segments)
    written = [("", "tools", tool.get("function", tool).get("name")) for tool in chat.tools or []]
    for i, message in enumerate(chat.messages[: learnt[-1] + 1] if learnt else ()):
        where = f"message {i + 1} ({message['role']}): its "
        written += [
            (where, "tool_calls", call.get("function", call)["name"]) for call in message.get("tool_calls") or []
        ]
        if i in learnt or message["role"] != "assistant":
            written += [(where, name, message.get(name)) for name in ("content", *REASONING)]
    return next((f"{where}{name}" for where, name, said in written if "".join(str(said or "").split()) not in text), "")


def arguments_of(settings: Data, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the variables of ``data.template_arguments``, parsed.

    Raises:
        UserError: The template does not use one of them, or no date although one is set.
    """
    asked = names_in(tokenizer)
    found: dict[str, Any] = {}
    for name, _, value in (argument.partition("=") for argument in settings.template_arguments):
        if name not in asked:
            others = ", ".join(sorted(asked)) or "none"
            raise UserError(
                f"--data.template_arguments: the chat template asks for no {name!r}; it asks for {others}; correct it"
            )
        found[name] = value
        with contextlib.suppress(ValueError):
            found[name] = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    if settings.template_date and TODAY not in asked:
        raise UserError(
            f"--data.template_date: the chat template asks for no date ({TODAY}); remove it, or see --data.template_arguments"
        )
    return found


def clock_of(date: str) -> str:
    """Return a Jinja macro that gives a template the date: a template cannot be given a function."""
    day = datetime.datetime.fromisoformat(date)
    forms = [f"%{flag}{letter}" for letter in "aAbBcdDeFGHIjmMnpSTuUVwWxXyYzZ" for flag in ("-", "")]
    replaced = "".join(f" | replace({form!r}, {day.strftime(form)!r})" for form in forms)
    return f"{{% macro {TODAY}(form) %}}{{{{ form{replaced} }}}}{{% endmacro %}}\n"


def names_in(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the variables that the chat template reads, without messages, tools and special tokens."""
    templates = tokenizer.chat_template or ""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    found = set[str]()
    for text in templates.values() if isinstance(templates, Mapping) else [templates]:
        with contextlib.suppress(jinja2.TemplateError):  # rendering a conversation reports it
            tree = environment.parse(GENERATION.sub("", text))
            found |= jinja2.meta.find_undeclared_variables(tree)
    return found - {*GIVEN, *environment.globals, *tokenizer.special_tokens_map}


def dated(settings: Data, tokenizer: PreTrainedTokenizerBase, before: str = "") -> Data:
    """Set the template's date if it uses one: ``before`` when a run resumes, else today."""
    if settings.template_date or TODAY not in names_in(tokenizer):
        return settings
    return dataclasses.replace(settings, template_date=before or datetime.date.today().isoformat())


@contextlib.contextmanager
def _ending_in_time() -> Iterator[None]:
    """Raise EndlessError in the main thread after ``MOST_S`` of CPU time, as a template may loop forever."""

    def strike(*_: object) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGVTALRM, strike)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
