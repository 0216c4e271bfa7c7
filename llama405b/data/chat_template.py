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
from llama405b.settings.schema import LAST_ANSWER, Data

Segment = tuple[str, bool]  # text, and whether it is trained on
TextRange = tuple[int, int]  # of a text
MAX_RENDER_S = 10.0  # CPU time to render one conversation, which takes milliseconds
DATE_FUNCTION = "strftime_now"  # by which a template asks for the date
REWRITES_EARLIER = "the chat template changes earlier messages when later ones follow"
GENERATION_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # tags of transformers, around an answer
STANDARD_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception")  # to every template
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of an answer, beside its content


class UnusableChatError(ValueError):
    """The template cannot render this conversation exactly."""


class TemplateRefusedError(UnusableChatError):
    """The template raised an error for these messages."""


class TemplateTimeoutError(Exception):
    """The template did not finish in time."""


class RenderedChat(NamedTuple):
    """A rendered conversation."""

    documents: list[list[Segment]]  # each as its pieces
    n_chars: int  # of one document with all messages
    omission: str = ""  # what an answer says and the template does not write


class ChatTemplate:
    """Render conversations with the tokenizer's chat template, and mark what is trained on.

    Raises:
        UserError: ``data.template_arguments`` names a variable that the template does not use.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: Data) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self.arguments = parse_template_arguments(settings, tokenizer)
        self.date_macro = format_date_macro(settings.template_date) if settings.template_date else ""

    def render_documents(self, chat: Chat) -> RenderedChat:
        """Render a conversation as one document with all answers if that is exact, else as one per answer.

        A message of weight 0 is not trained on.

        Raises:
            UnusableError: The template cannot be used for it.
            EndlessError: The template does not end.
        """
        full_text = self.render(chat)
        if not full_text:
            raise UnusableChatError("the chat template renders it as an empty text")
        trained_indices = self._trained_indices(chat)
        answer_parts = {i: self._split_answer(chat, i, full_text) for i in trained_indices}
        joint_segments = _mark_segments(
            full_text, [self._message_range(chat, full_text, i, answer_parts) for i in trained_indices]
        )
        if joint_segments and self.settings.turns != "per-answer":
            return RenderedChat(
                [joint_segments], len(full_text), _find_omission(chat, trained_indices, [joint_segments])
            )
        if self.settings.turns == "joint":
            raise UnusableChatError(REWRITES_EARLIER)
        documents, pending = list[list[Segment]](), list[int]()
        for i in trained_indices:
            pending.append(i)
            if parts := answer_parts[i]:
                text, prefix = "".join(parts), dataclasses.replace(chat, messages=chat.messages[: i + 1])
                segments = _mark_segments(
                    text,
                    [
                        self._message_range(prefix, text, k, answer_parts)
                        for k in pending
                        if k == i or not answer_parts[k]
                    ],
                )
                if not segments:
                    raise UnusableChatError(REWRITES_EARLIER)
                documents.append(segments)
                pending = []
        if pending:
            raise UnusableChatError(REWRITES_EARLIER)
        documents = documents or [[(full_text, False)]]
        return RenderedChat(documents, len(full_text), _find_omission(chat, trained_indices, documents))

    def _trained_indices(self, chat: Chat) -> list[int]:
        """Return the indices of the messages that are trained on."""
        roles, weighted_indices = (
            self.settings.train_on,
            [i for i, m in enumerate(chat.messages) if m.get("weight") != 0],
        )
        last = [i for i in weighted_indices if chat.messages[i]["role"] == "assistant"][-1:]
        return [
            i for i in weighted_indices if chat.messages[i]["role"] in roles or (LAST_ANSWER in roles and i in last)
        ]

    def _split_answer(self, chat: Chat, i: int, full_text: str) -> tuple[str, str] | None:
        """Return message ``i`` as inference has it, prompt and answer; None if the template refuses these."""
        prompt_text = None
        try:
            rendered_text = self.render(chat, i + 1) if i + 1 < len(chat.messages) else full_text
            if i and chat.messages[i]["role"] == "assistant":
                with contextlib.suppress(TemplateRefusedError):
                    prompt_text = self.render(chat, i, prompt=True)
            if prompt_text is None:
                prompt_text = self._message_prefix(chat, i, i + 1)
        except TemplateRefusedError:
            return None
        if rendered_text.startswith(prompt_text):
            return prompt_text, rendered_text[len(prompt_text) :]
        if rendered_text.startswith(self.render(chat, i)):
            return prompt_text, self._answer_after_opening(chat, i, prompt_text, rendered_text)
        return prompt_text, rendered_text[self._answer_offset(chat, i, prompt_text) :]

    def _answer_after_opening(self, chat: Chat, i: int, prompt_text: str, rendered_text: str) -> str:
        """Return an answer whose opening, like ``<think>``, is in the template's prompt but not in its rendering."""
        role, content = chat.messages[i]["role"], str(chat.messages[i]["content"])
        header = self._message_prefix(chat, i, i + 1)
        opening, rendered_answer = prompt_text[len(header) :], rendered_text[len(header) :]
        end = self._message_suffix(chat, i)
        body = rendered_answer.removesuffix(end)
        if not (content.startswith(opening) and content.rstrip().endswith(body.strip())):
            raise UnusableChatError(
                f"message {i + 1} ({role}): the chat template's prompt for it ends with {opening!r}, but the "
                "message does not begin with it; write the "
                "answer's thinking into its content"
            )
        return content[len(opening) :].rstrip() + end

    def _answer_offset(self, chat: Chat, i: int, prompt_text: str) -> int:
        """Return where an answer begins if the prompt renders the earlier messages in another way."""
        header, question = self._message_prefix(chat, i, i + 1), str(chat.messages[i - 1]["content"]).strip()
        tail = prompt_text[prompt_text.rfind(question) :] if question and question in prompt_text else ""
        if not tail or tail not in header:
            raise UnusableChatError(REWRITES_EARLIER)
        return header.rfind(tail) + len(tail)

    def _message_range(
        self, chat: Chat, full_text: str, i: int, answer_parts: Mapping[int, tuple[str, str] | None]
    ) -> TextRange | None:
        """Return the range of message ``i`` in a full rendering; None if it is rendered differently there."""
        if parts := answer_parts[i]:
            return (len(parts[0]), len(parts[0] + parts[1])) if full_text.startswith("".join(parts)) else None
        begin = len(self._message_prefix(chat, i, len(chat.messages)))
        answers = [k for k, parts in answer_parts.items() if parts and k < len(chat.messages)]
        suffix = (
            self._message_suffix(chat, answers[0]) if answers else ""
        )  # as one has it that can be rendered by itself
        suffix_begin = full_text.find(suffix, begin) if suffix else -1
        return (begin, suffix_begin + len(suffix)) if suffix_begin >= 0 else None

    def _message_suffix(self, chat: Chat, i: int) -> str:
        """Return the text after message ``i``: the common suffix of renderings that differ in its content."""
        text = "b" if str(chat.messages[i].get("content")).strip().endswith("a") else "a"
        renderings = (self.render(chat, i + 1)[::-1], self.render(_with_content(chat, i, text), i + 1)[::-1])
        return os.path.commonprefix(renderings)[::-1]  # noqa: RUF071  (of texts)

    def _message_prefix(self, chat: Chat, i: int, n_messages: int) -> str:
        """Return header and all before message ``i``: the common prefix of renderings that differ in it."""
        text = "b" if str(chat.messages[i].get("content")).strip().startswith("a") else "a"
        renderings = (self.render(chat, n_messages), self.render(_with_content(chat, i, text), n_messages))
        return os.path.commonprefix(renderings)  # noqa: RUF071  (of texts)

    def render(self, chat: Chat, n_messages: int | None = None, *, prompt: bool = False) -> str:
        """Return the first ``n_messages`` as text; ``prompt``: with the header of an answer.

        Raises:
            RefusedError: The template refuses them.
            EndlessError: The template does not end.
        """
        messages: Sequence[object] = [dict(message) for message in chat.messages[:n_messages]]
        try:
            with _time_limit():
                return str(
                    self.tokenizer.apply_chat_template(
                        messages,
                        chat_template=self.date_macro + self.tokenizer.get_chat_template(tools=chat.tools),
                        tools=chat.tools,
                        tokenize=False,
                        add_generation_prompt=prompt,
                        # A conversation's arguments override data.template_arguments.
                        **{**self.arguments, **chat.arguments},
                    )
                )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise TemplateRefusedError(f"the chat template refuses it ({' '.join(str(error).split())})") from None


def _mark_segments(full_text: str, spans: Sequence[TextRange | None]) -> list[Segment] | None:
    """Split a text into segments, marking these ranges as trained on; None if one is missing or they overlap."""
    segments, position = list[Segment](), 0
    for span in spans:
        if span is None or span[0] < position:
            return None
        segments += [(full_text[position : span[0]], False), (full_text[slice(*span)], True)]
        position = span[1]
    return [(text, is_trained) for text, is_trained in (*segments, (full_text[position:], False)) if text]


def _with_content(chat: Chat, i: int, text: str) -> Chat:
    """Return the conversation with the content of message ``i`` replaced."""
    message = {**chat.messages[i], "content": text}
    return dataclasses.replace(chat, messages=(*chat.messages[:i], message, *chat.messages[i + 1 :]))


def _find_omission(chat: Chat, trained_indices: Sequence[int], documents: Sequence[Sequence[Segment]]) -> str:
    """Name the first field of a conversation that the template drops, ignoring blanks; '' if there is none.

    The template may drop the thinking of answers that are not trained on.
    """
    text = "".join("".join(part.split()) for segments in documents for part, _ in segments)
    expected = [("", "tools", tool.get("function", tool).get("name")) for tool in chat.tools or []]
    for i, message in enumerate(chat.messages[: trained_indices[-1] + 1] if trained_indices else ()):
        label = f"message {i + 1} ({message['role']}): its "
        expected += [
            (label, "tool_calls", call.get("function", call)["name"]) for call in message.get("tool_calls") or []
        ]
        if i in trained_indices or message["role"] != "assistant":
            expected += [(label, name, message.get(name)) for name in ("content", *REASONING_FIELDS)]
    return next(
        (f"{label}{name}" for label, name, value in expected if "".join(str(value or "").split()) not in text), ""
    )


def parse_template_arguments(settings: Data, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the variables of ``data.template_arguments``, parsed.

    Raises:
        UserError: The template does not use one of them, or no date although one is set.
    """
    variables = template_variables(tokenizer)
    arguments: dict[str, Any] = {}
    for name, _, value in (argument.partition("=") for argument in settings.template_arguments):
        if name not in variables:
            choices = ", ".join(sorted(variables)) or "none"
            raise UserError(
                f"--data.template_arguments: the chat template asks for no {name!r}; it asks for {choices}; correct it"
            )
        arguments[name] = value
        with contextlib.suppress(ValueError):
            arguments[name] = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    if settings.template_date and DATE_FUNCTION not in variables:
        raise UserError(
            f"--data.template_date: the chat template asks for no date ({DATE_FUNCTION}); remove it, or see --data.template_arguments"
        )
    return arguments


def format_date_macro(date: str) -> str:
    """Return a Jinja macro that gives a template the date: a template cannot be given a function."""
    day = datetime.datetime.fromisoformat(date)
    forms = [f"%{flag}{letter}" for letter in "aAbBcdDeFGHIjmMnpSTuUVwWxXyYzZ" for flag in ("-", "")]
    replaced = "".join(f" | replace({form!r}, {day.strftime(form)!r})" for form in forms)
    return f"{{% macro {DATE_FUNCTION}(form) %}}{{{{ form{replaced} }}}}{{% endmacro %}}\n"


def template_variables(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the variables that the chat template reads, without messages, tools and special tokens."""
    templates = tokenizer.chat_template or ""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    names = set[str]()
    for text in templates.values() if isinstance(templates, Mapping) else [templates]:
        with contextlib.suppress(jinja2.TemplateError):  # rendering a conversation reports it
            tree = environment.parse(GENERATION_TAG.sub("", text))
            names |= jinja2.meta.find_undeclared_variables(tree)
    return names - {*STANDARD_VARIABLES, *environment.globals, *tokenizer.special_tokens_map}


def add_template_date(settings: Data, tokenizer: PreTrainedTokenizerBase, previous_date: str = "") -> Data:
    """Set the template's date if it uses one: ``previous_date`` when a run resumes, else today."""
    if settings.template_date or DATE_FUNCTION not in template_variables(tokenizer):
        return settings
    return dataclasses.replace(settings, template_date=previous_date or datetime.date.today().isoformat())


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise EndlessError in the main thread after ``MAX_RENDER_S`` of CPU time, as a template may loop forever."""

    def raise_timeout(*_: object) -> None:
        raise TemplateTimeoutError

    previous_handler = signal.signal(signal.SIGVTALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_RENDER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous_handler)
