"""Conversations into tokens and masks, through the tokenizer's chat template.

What is trained is what a policy would sample: after the prompt that the template makes of the messages before a turn, up to and with the
token that ends the turn. This is verified on the ids: the prompt of every trained turn must be a prefix of the whole. Where the template
rewrites earlier turns (Qwen3 drops their thinking) the conversation becomes several examples, each exactly as an engine would see it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_rl.batch import BoolArray, IntArray
from surogate_rl.data.convert import Conversation, Message
from surogate_rl.data.report import DataError, UnusableRow
from surogate_rl.data.tokens import Tokens, shared_beginning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_rl.rollouts.types import Task

Tools = list[dict[str, Any]] | None

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# how much of the end of an answer must be seen in the rendering
SHOWN_CHARACTERS = 24
EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")
OPENED_THINKING = re.compile(r"<think>\s*$")


@dataclass(frozen=True)
class Example:
    """Tokens [n] and which of them are trained, as something to predict: never the first.

    Masks are made by position, never from ids, so that a pad token that equals eos means nothing.
    """

    tokens: IntArray
    mask: BoolArray

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def trained(self) -> int:
        return int(self.mask.sum())

    def cut(self, length: int) -> Example:
        return Example(self.tokens[:length], self.mask[:length])


def make_example(tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> Example:
    """An example that trains ``tokens[a:b]`` of every span (a, b)."""
    mask = np.zeros(len(tokens), dtype=np.bool_)
    for start, end in spans:
        mask[start:end] = True
    mask[:1] = False
    return Example(np.asarray(tokens, dtype=np.int32), mask)


@dataclass(frozen=True)
class _Span:
    """Characters of a rendered text that the assistant's turn `turn` owns.

    Where `marked`, they also hold some of the turn's header, and only the template's own marks tell where it ends.
    """

    turn: int
    start: int
    end: int
    marked: bool = False


@dataclass(frozen=True)
class Rendering:
    """The conversation up to and with turn `last`, and the turns that are trained in it."""

    last: int
    text: str
    spans: tuple[_Span, ...]


class ChatTemplate:
    """Renders with a tokenizer's chat template.

    Raises (all methods):
        DataError: the tokenizer has no chat template.
        UnusableRow: the template refuses the messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def source(self) -> str:
        """The Jinja text used where there are no tools."""
        require_chat_template(self.tokenizer)
        return self.tokenizer.get_chat_template()

    @cached_property
    def marks_generation(self) -> bool:
        return bool(GENERATION.search(self.source))

    def render(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool, **options: Any) -> str:
        require_chat_template(self.tokenizer)
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=_schemas(tools), tokenize=False, add_generation_prompt=generation_prompt, **options
            )
        except Exception as error:  # templates raise what they like: jinja's errors, TypeError on a missing key
            raise UnusableRow(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
        assert isinstance(text, str)
        bos = self.tokenizer.bos_token
        while isinstance(bos, str) and bos and text.startswith(bos + bos):
            text = text[len(bos) :]
        return text

    def assistant_marks(self, messages: Sequence[Message], tools: Tools) -> tuple[list[int], list[bool]] | None:
        """Ids and the template's own mask ({% generation %}); None where it has none."""
        if not self.marks_generation:
            return None
        try:
            out = self.tokenizer.apply_chat_template(
                list(messages), tools=_schemas(tools), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception:  # slow tokenizers cannot do it; what they lack is derived
            return None
        assert not isinstance(out, str | list)
        return list(out["input_ids"]), [bool(flag) for flag in out["assistant_masks"]]


def _schemas(tools: Tools) -> list[dict[Any, Any] | Callable[..., Any]] | None:
    return None if tools is None else list(tools)


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise DataError(
            f"the rows are conversations but the tokenizer ({tokenizer.name_or_path or type(tokenizer).__name__}) has no chat template; "
            "set `chat_template` to Jinja text or a file, or use a model that has one"
        )


class ChatEncoder:
    """Encodes conversations in two passes, so that the texts between can be tokenised together: `plan`, then `encode`."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._template = ChatTemplate(tokens.tokenizer)

    # ---- first pass: text ----

    def plan(self, conversation: Conversation, first_turn: int) -> list[Rendering]:
        """Renderings in which every assistant turn from message `first_turn` on is trained exactly once.

        Raises:
            UnusableRow: the template renders a turn in a way that no generation could give.
        """
        messages, tools = conversation.messages, conversation.tools
        # a turn that opens a conversation answers nothing, and one that says nothing teaches nothing: both stay context
        turns = [i for i, m in enumerate(messages) if i >= max(first_turn, 1) and m["role"] == "assistant" and _says_something(m)]
        prompts: dict[int, list[str]] = {}
        ends: dict[int, str] = {}
        plan: list[Rendering] = []
        while turns:
            last = turns[-1]
            text = self._rendered(messages, last, tools, ends)
            spans, left = [], []
            for turn in turns:
                if turn not in prompts:
                    prompts[turn] = self._prompts(messages[:turn], tools)
                end = len(text) if turn == last else self._end(text, self._rendered(messages, turn, tools, ends))
                span = None if end is None else self._span(text, turn, end, prompts[turn], messages[turn])
                if span is None and turn == last:
                    span = self._by_content(text, messages[:last], messages[last], tools, prompts[last])
                if span is None:
                    left.append(turn)
                else:
                    spans.append(span)
            plan.append(Rendering(last, text, tuple(spans)))
            turns = left
        return plan[::-1]

    def _rendered(self, messages: Sequence[Message], turn: int, tools: Tools, known: dict[int, str]) -> str:
        if turn not in known:
            known[turn] = self._template.render(messages[: turn + 1], tools, generation_prompt=False)
        return known[turn]

    def _prompts(self, messages: Sequence[Message], tools: Tools) -> list[str]:
        """What an engine can be given before this turn, the longest first: as it is, and with thinking switched off or on."""
        made = [self._template.render(messages, tools, generation_prompt=True)]
        if "enable_thinking" in self._template.source:
            made += [self._template.render(messages, tools, generation_prompt=True, enable_thinking=flag) for flag in (False, True)]
        return sorted(set(made), key=len, reverse=True)

    def _end(self, text: str, turn: str) -> int | None:
        """Where the conversation up to a turn ends within the longer one; None: it is rendered otherwise there."""
        if text.startswith(turn):
            return len(turn)
        # some templates write an EOS behind the last message, whatever it is
        eos = self._tokens.tokenizer.eos_token
        shorter = turn.removesuffix(eos) if isinstance(eos, str) else turn
        return len(shorter) if text.startswith(shorter) else None

    def _span(self, text: str, turn: int, end: int, prompts: Sequence[str], message: Message) -> _Span | None:
        start = next((len(prompt) for prompt in prompts if text.startswith(prompt)), None)
        if start is None:
            return None
        # an empty thought is put there by the template, also where the prompt has opened it, and not said by the assistant
        opened = OPENED_THINKING.search(text, 0, start)
        empty = EMPTY_THINKING.match(text, opened.start() if opened else start, end)
        start = empty.end() if empty else start
        if start >= end:
            return None
        said = message["content"].rpartition("</think>")[2].strip()[-SHOWN_CHARACTERS:]
        if said not in text[start:end]:
            raise UnusableRow(f"the chat template does not show what the assistant says in message {turn}: {said!r} is missing")
        return _Span(turn, start, end)

    def _by_content(self, text: str, before: Sequence[Message], message: Message, tools: Tools, prompts: Sequence[str]) -> _Span:
        """The last turn where the template renders an answer after another header than it prompts with (as some that prompt with an opened
        thinking block): the answer must follow the part of the header that both share, word for word."""
        base = self._template.render(before, tools, generation_prompt=False)
        shared = max(shared_beginning(text, prompt) for prompt in prompts)
        if text.startswith(base) and shared >= len(base):
            content = message["content"].strip()
            start = shared + len(text[shared:]) - len(text[shared:].lstrip())
            if content and text.startswith(content, start):
                return _Span(len(before), start, len(text))
        if self._template.marks_generation:
            return _Span(len(before), shared, len(text), marked=True)
        raise UnusableRow(
            f"the chat template renders message {len(before)} in a way that generation could not give: it is prompted with "
            f"{prompts[0][-60:]!r}, but rendered as {text[max(0, shared_beginning(text, prompts[0]) - 20) :][:80]!r}; "
            "set a chat_template that renders what it prompts for, or one with {% generation %}"
        )

    # ---- second pass: tokens ----

    def encode(self, conversation: Conversation, plan: Sequence[Rendering]) -> list[Example]:
        """Examples of the renderings that `plan` made; more than those where a merge spans a turn's beginning."""
        examples: list[Example] = []
        for rendering in plan:
            examples.extend(self._encode(conversation, rendering))
        return examples

    def _encode(self, conversation: Conversation, rendering: Rendering) -> list[Example]:
        text, ids = rendering.text, self._tokens.ids(rendering.text)
        *earlier, last = rendering.spans
        marked = self._template.assistant_marks(conversation.messages[: rendering.last + 1], conversation.tools)
        marks = marked[1] if marked is not None and marked[0] == ids and _is_sane(marked[1]) else None
        start, end = self._tokens.cuts(text, ids, [last.start, last.end])
        if last.marked:
            if marks is None or start is None:
                raise UnusableRow(
                    f"neither the chat template's {{% generation %}} nor its generation prompt tells which tokens of message {last.turn} "
                    "the assistant says; set a chat_template that does"
                )
            start, end = _last_run(marks, start, ids, self._tokens.special_ids)
        elif start is None or end is None:
            # a merge spans the beginning of the turn: prompt and answer one by one, as when it is sampled
            first, rest = self._tokens.join(text[: last.start], text[last.start :])
            text, ids, marks, start, end = text[: last.start], [*first, *rest], None, len(first), len(first) + len(rest)
        known = ids if text is rendering.text else ids[:start]
        cuts = self._tokens.cuts(text, known, [position for span in earlier for position in (span.start, span.end)])
        spans: list[tuple[int, int]] = []
        made: list[Example] = []
        for span, first_token, end_token in zip(earlier, cuts[::2], cuts[1::2], strict=True):
            if first_token is None or end_token is None:
                alone = Rendering(span.turn, rendering.text[: span.end], (_Span(span.turn, span.start, span.end),))
                made.extend(self._encode(conversation, alone))
            else:
                spans.append(self._trained(ids, first_token, end_token))
        spans.append(self._trained(ids, start, end))
        tokens = list(ids[: spans[-1][1]])
        trained = [piece for span_start, span_end in spans for piece in _restrict(span_start, span_end, marks)]
        if tokens[-1] not in self._tokens.special_ids:
            trained.append((len(tokens), len(tokens) + 1))
            tokens.append(self._tokens.eos_id)
        return [*made, make_example(tokens, trained)]

    def _trained(self, ids: Sequence[int], start: int, end: int) -> tuple[int, int]:
        """The span without what the template writes behind the tokens that end the turn: no policy samples that."""
        special = self._tokens.special_ids
        found = end
        for position in range(end - 1, start - 1, -1):
            if ids[position] in special:
                # of special tokens with blanks between, the first ones end the turn
                if position + 1 == end or ids[position + 1] not in special:
                    found = position + 1
            elif not self._tokens.is_blank(ids[position]):
                break
        return start, found

    # ---- other masks ----

    def everything(self, conversation: Conversation) -> Example:
        """All tokens trained."""
        ids = self._tokens.ids(self._template.render(conversation.messages, conversation.tools, generation_prompt=False))
        return make_example(ids, [(0, len(ids))])

    def after_prompt(self, conversation: Conversation) -> Example:
        """All tokens trained that follow the prompt of a prompt/completion row.

        Raises:
            UnusableRow: the template renders the prompt otherwise once something follows.
        """
        messages, tools = conversation.messages, conversation.tools
        text = self._template.render(messages, tools, generation_prompt=False)
        prompts = self._prompts(messages[: conversation.completion_start], tools)
        prompt = next((p for p in prompts if text.startswith(p)), None)
        if prompt is None:
            raise UnusableRow("the chat template renders the prompt otherwise once a completion follows")
        first, rest = self._tokens.join(prompt, text[len(prompt) :])
        return make_example([*first, *rest], [(len(first), len(first) + len(rest))])


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _is_sane(marks: Sequence[bool]) -> bool:
    return any(marks) and not all(marks)


def _restrict(start: int, end: int, marks: Sequence[bool] | None) -> list[tuple[int, int]]:
    """The span where the template marks it for training, and always its last token, which ends the turn."""
    if marks is None or not any(marks[start:end]):
        return [(start, end)]
    return [*((i, i + 1) for i in range(start, end) if marks[i]), (end - 1, end)]


def _last_run(marks: Sequence[bool], first: int, ids: Sequence[int], special: frozenset[int]) -> tuple[int, int]:
    """The last run of marked tokens from `first` on, with the token that ends the turn where that lies just behind it."""
    end = max(i for i, flag in enumerate(marks) if flag) + 1
    start = end
    while start > first and marks[start - 1]:
        start -= 1
    if start == end:
        raise UnusableRow("the chat template marks nothing of the last turn for training")
    return start, end + (end < len(ids) and ids[end] in special)


def encode_prompt(task: Task, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that an engine is given for `task`: its messages and the template's generation prompt, or its plain text behind a BOS if the
    tokenizer adds one.

    Raises:
        DataError: messages without a chat template, or ones that it refuses.
    """
    tokens = Tokens(tokenizer)
    if task.messages is None:
        assert task.prompt is not None, "a task has messages or a prompt"
        prefix, text = tokens.plain(task.prompt)
        return [*prefix, *tokens.ids(text)]
    try:
        text = ChatTemplate(tokenizer).render(task.messages, task.tools, generation_prompt=True)
    except UnusableRow as error:
        raise DataError(f"task {task.index}: {error}") from error
    return list(tokens.ids(text))
