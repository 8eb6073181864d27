"""The tokens of an episode of several turns: what was sampled stays as it was, and only what the chat template writes around it is encoded.

After a turn the whole conversation is rendered anew, and the text is compared with what the engine has seen: it must begin with the text of
the prompt, go on with what the policy said (white space aside, which templates trim) and then end the turn with the token that the policy
ended it with. If it does, the ids of the rest are the *delta* that follows the sampled ids, whether the tokenizer would have chosen the
same ids for the turn or not. If it does not, the template has rewritten history (as where it drops earlier thinking): then a new segment
begins with the whole rendering as its prompt. Either way the policy is trained on exactly the ids that it was given and has sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_rl.rollouts.types import Completion, Message, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_rl.data.template import ChatTemplate
    from surogate_rl.data.tokens import Tokens

Tools = list[dict[str, Any]] | None


class TemplateRefuses(Exception):
    """The chat template cannot render the conversation, or the tokenizer cannot encode what it renders."""


class Dialect:
    """Tokenizer and chat template of a run, shared by its conversations. Not thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from surogate_rl.data.template import ChatTemplate
        from surogate_rl.data.tokens import Tokens

        self.tokens: Tokens = Tokens(tokenizer)
        self.template: ChatTemplate = ChatTemplate(tokenizer)

    def prompt(self, messages: Sequence[Message], tools: Tools) -> str:
        """The conversation up to where the policy speaks.

        Raises:
            TemplateRefuses: naming the template's reason.
        """
        from surogate_rl.data.report import DataError, UnusableRow

        try:
            return self.template.render(messages, tools, generation_prompt=True)
        except (UnusableRow, DataError) as error:
            raise TemplateRefuses(str(error)) from error

    def ids(self, text: str) -> list[int]:
        """Raises TemplateRefuses where the tokenizer cannot encode `text`."""
        with _refused():
            return list(self.tokens.ids(text))

    def ids_from(self, text: str, position: int) -> list[int] | None:
        """Ids of ``text[position:]`` as they are within `text`; None where none spell it apart from what is before."""
        with _refused():
            return self._ids_from(text, position)

    def _ids_from(self, text: str, position: int) -> list[int] | None:
        ids = self.tokens.ids(text)
        cut = self.tokens.cuts(text, ids, [position])[0]
        if cut is not None:
            return ids[cut:]
        alone = self.tokens.ids(text[position:])
        return alone if self.tokens.decode(alone) == text[position:] else None

    def ids_after(self, before: str, text: str) -> list[int]:
        """Ids of plain `text` as the continuation of `before`."""
        from surogate_rl.data.report import UnusableRow

        if not text:
            return []
        with _refused():
            try:
                return self.tokens.join(before or "\n", text)[1]
            except UnusableRow:
                return list(self.tokens.ids(text))


@contextmanager
def _refused() -> Iterator[None]:
    """Text that a tokenizer cannot encode costs its episode, not the run."""
    try:
        yield
    except Exception as error:  # tokenizers raise what they like: TypeError for what is no text, UnicodeEncodeError, their own
        raise TemplateRefuses(f"the tokenizer refuses the text: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Said:
    """One turn of the policy in words.

    Attributes:
        text: without control tokens: what people, rewards and environments read.
        raw: with them, but for the one that ended the turn: what the template is given and tool calls are read from.
        end: the text of the token that ended the turn, or None: a limit or a stop string did.
    """

    text: str
    raw: str
    end: str | None


class Conversation:
    """The token side of one episode.

    Args:
        dialect: makes a `Dialect`; asked for it only if the episode has more than one turn or its environment speaks first.
        messages: the task's, or None: plain text.
        text: the plain prompt where there are no messages.
        ids: the encoded prompt.
        tools: JSON schemas shown to the template.

    Attributes:
        segments: what has been sampled so far, with the prompts of it.
        messages: the conversation for people and rewards; the policy's turns without control tokens.
    """

    def __init__(self, dialect: Callable[[], Dialect], messages: Sequence[Message] | None, text: str, ids: list[int], tools: Tools) -> None:
        self._dialect = dialect
        self._tools = tools
        self._history: list[Message] | None = None if messages is None else list(messages)
        self._rendered: str | None = None  # the template's text of the present prompt; rendered when it is needed
        self._open: Segment | None = None
        self._pending = ids
        self._plain = text
        self._said = Said("", "", None)
        self.segments: list[Segment] = []
        self.messages: list[Message] = list(messages) if messages is not None else [{"role": "user", "content": text}]

    @property
    def context(self) -> list[int]:
        """The ids that the engine is given for the next turn."""
        return [*self._open.tokens, *self._pending] if self._open is not None else list(self._pending)

    def begin(self, appended: Sequence[Message]) -> None:
        """Puts what the environment says before the first turn behind the task's prompt.

        Raises:
            TemplateRefuses: the template cannot render it.
        """
        if not appended:
            return
        self.messages += appended
        if self._history is None:
            added = _contents(appended)
            self._pending = [*self._pending, *self._dialect().ids_after(self._plain, added)]
            self._plain += added
            return
        self._history += appended
        self._rendered = self._dialect().prompt(self._history, self._tools)
        self._pending = self._dialect().ids(self._rendered)

    def say(self, completion: Completion, said: Said, turn: int) -> None:
        """Takes the ids that the policy has sampled as its turn number `turn`, which spell `said`."""
        self._said = said
        self.messages.append({"role": "assistant", "content": said.text})
        sampled = len(completion.tokens)
        if self._open is None:
            self._open = Segment([], [], [], [])
            self.segments.append(self._open)
        segment, given = self._open, len(self._pending)
        segment.tokens += [*self._pending, *completion.tokens]
        segment.sampled += [False] * given + [True] * sampled
        segment.logps += [0.0] * given + completion.logps
        segment.versions += [-1] * given + completion.versions
        segment.turns += [-1] * given + [turn] * sampled
        self._pending = []

    def answer(self, parts: Message | None, appended: Sequence[Message]) -> None:
        """Puts the environment's answer behind the policy's turn, so that it can speak again.

        Args:
            parts: the turn as a message with its parts (tool calls), where the environment has taken it apart.
            appended: the environment's messages.

        Raises:
            TemplateRefuses: the template cannot render the conversation in any form.
        """
        self.close(parts, appended)
        said = self._said
        if self._history is None:
            added = _contents(appended)
            self._pending = self._dialect().ids_after(said.raw or self._plain, added)
            return
        dialect = self._dialect()
        before = self._rendered if self._rendered is not None else dialect.prompt(self._history, self._tools)
        whole: tuple[str, list[Message]] | None = None
        refusal: TemplateRefuses | None = None
        for turn in ([parts] if parts is not None else []) + [{"role": "assistant", "content": said.raw}]:
            history = [*self._history, turn, *appended]
            try:
                text = dialect.prompt(history, self._tools)
            except TemplateRefuses as error:
                refusal = refusal or error
                continue
            whole = whole or (text, history)
            position = end_of_turn(before, said, text)
            delta = dialect.ids_from(text, position) if position is not None else None
            if delta is not None:
                self._history, self._rendered, self._pending = history, text, delta
                return
        if whole is None:
            assert refusal is not None
            raise refusal
        self._rendered, self._history = whole
        self._open = None
        self._pending = dialect.ids(self._rendered)

    def close(self, parts: Message | None, appended: Sequence[Message]) -> None:
        """Notes what the environment says to the last turn, which the policy never sees."""
        if parts is not None:
            self.messages[-1] = parts
        self.messages += appended


def end_of_turn(before: str, said: Said, whole: str) -> int | None:
    """Where in `whole` the text begins that the policy has not seen and said itself; None if `whole` tells history otherwise.

    Args:
        before: the text of the prompt that `said` answered.
        whole: the rendering of the conversation with that turn and what follows it.
    """
    if not whole.startswith(before):
        return None
    position = _spelled(said.raw, whole, len(before))
    if position is None or said.end is None:
        return position
    start = position + len(whole[position:]) - len(whole[position:].lstrip())
    return start + len(said.end) if whole.startswith(said.end, start) else None


def _spelled(said: str, text: str, start: int) -> int | None:
    """The end of `said` in `text` from `start` on, white space aside; None if it is not there."""
    if text.startswith(said, start):
        return start + len(said)
    position = end = start
    for character in said:
        if character.isspace():
            continue
        while position < len(text) and text[position].isspace():
            position += 1
        if position >= len(text) or text[position] != character:
            return None
        position += 1
        end = position
    return end


def _contents(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)
