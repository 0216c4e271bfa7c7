"""Conversations as text: through the tokenizer's chat template, in pieces of which some are learnt. Knows no files."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Collection, Iterator, Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from llama405b.contract.document import Chat

Segment = tuple[str, bool]  # text, and whether it is learnt
MOST_S = 10.0  # of this process's time, for the text of a conversation: it takes milliseconds


class UnusableError(ValueError):
    """A conversation that the template cannot be used for."""


class EndlessError(Exception):
    """The template does not end."""


class Template:
    """The tokenizer's chat template, and the roles whose messages are learnt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, learn: Collection[str]) -> None:
        self.tokenizer, self.learn = tokenizer, learn

    def segments(self, chat: Chat) -> list[Segment]:
        """Split a conversation where learning begins and ends: after the header of a message, and after the message's end.

        That is where its text is split at inference, too: a prompt ends with the header. A message of weight 0 is not learnt.

        Raises:
            EndlessError: The template does not end for it within ``MOST_S``.
            UnusableError: The template refuses it, writes nothing, or writes earlier messages in another way when later ones follow.
        """
        whole = self._rendered(chat, len(chat.messages))
        found, done = list[Segment](), 0
        for number, message in enumerate(chat.messages):
            if message["role"] not in self.learn or message.get("weight") == 0:
                continue
            answers = message["role"] == "assistant"
            before = self._rendered(chat, number, prompt=answers) if number else self._beginning(chat)
            after = self._rendered(chat, number + 1)
            if not (whole.startswith(after) and after.startswith(before) and done <= len(before)):
                raise UnusableError("the chat template changes earlier messages when later ones follow")
            found += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
            done = len(after)
        if not whole:
            raise UnusableError("the chat template writes nothing for it")
        return [(text, learnt) for text, learnt in (*found, (whole[done:], False)) if text]

    def _beginning(self, chat: Chat) -> str:
        """What precedes the text of the first message, its header with it: where two conversations part that have different ones."""
        first = chat.messages[0]
        text = "b" if str(first.get("content")).strip().startswith("a") else "a"
        other = dataclasses.replace(chat, messages=({**first, "content": text},))
        return os.path.commonprefix([self._rendered(chat, 1), self._rendered(other, 1)])  # noqa: RUF071  (of texts)

    def _rendered(self, chat: Chat, n_messages: int, *, prompt: bool = False) -> str:
        """The first messages as text; ``prompt``: and the header of an answer."""
        messages: Sequence[object] = [dict(message) for message in chat.messages[:n_messages]]
        try:
            with _ending_in_time():
                return str(
                    self.tokenizer.apply_chat_template(
                        messages, tools=chat.tools, tokenize=False, add_generation_prompt=prompt
                    )
                )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UnusableError(f"the chat template refuses it ({' '.join(str(error).split())})") from None


@contextlib.contextmanager
def _ending_in_time() -> Iterator[None]:
    """Raise EndlessError in the main thread, which this is, after ``MOST_S`` of computing: a template may loop without end."""

    def strike(*_: object) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGVTALRM, strike)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
