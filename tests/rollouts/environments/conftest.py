"""Tokenizers with the chat templates of families, an engine that says what a test wants, and a runner around it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from surogate_rl.data import encode_prompt
from surogate_rl.rollouts.environments.calls import EnvironmentCalls
from surogate_rl.rollouts.episode import EpisodeRunner
from surogate_rl.rollouts.types import Completion, Episode, EpisodeLimits, GenerateRequest, SamplingParams, Task

TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# after the published template of Mistral-7B-Instruct-v0.3: turns must take turns, calls and results have ids of nine characters
MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for m in rest %}{%- if m["role"] == "user" or (m["role"] == "assistant" and m.tool_calls is not defined) %}
{%- if (m["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("roles must alternate user/assistant") }}{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
{%- if m["role"] == "user" %}
{%- if tools is not none and (m == users[-1]) %}{{- "[AVAILABLE_TOOLS] " + (tools | map(attribute="function") | list | tojson) }}
{{- "[/AVAILABLE_TOOLS]" }}{%- endif %}
{{- "[INST] " + m["content"] + "[/INST]" }}
{%- elif m.tool_calls is defined %}{{- "[TOOL_CALLS] [" }}
{%- for call in m.tool_calls %}{%- if call.id | length != 9 %}{{- raise_exception("ids have 9 characters") }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}{%- endfor %}
{%- elif m["role"] == "assistant" %}{{- " " + m["content"] | trim + eos_token }}
{%- elif m["role"] == "tool" %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception("unknown role") }}{%- endif %}{%- endfor %}"""
# the case of shared values: <|role|>content<|end|>, think text dropped unless last
TERSE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] if loop.last else m['content'].split('</think>')[-1]) + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# nothing but words, and no token that ends a turn
PLAIN_TEXT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

# template, bos, eos (what ends a turn), other control tokens, tokens that are marked but no control tokens
FAMILIES: dict[str, tuple[str, str | None, str, list[str], list[str]]] = {
    "qwen2_5": ("qwen2_5.jinja", None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"], ["<tool_call>", "</tool_call>"]),
    "qwen3": (
        "qwen3.jinja",
        None,
        "<|im_end|>",
        ["<|im_start|>", "<|endoftext|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    ),
    "llama3_1": (
        "llama3_1.jinja",
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"],
        [],
    ),
    "smollm2": (SMOLLM2, None, "<|im_end|>", ["<|im_start|>"], []),
    "mistral": (
        MISTRAL,
        "<s>",
        "</s>",
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        [],
    ),
    "terse": (TERSE, None, "<|end|>", ["<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"], ["<think>", "</think>"]),
    "plain_text": (PLAIN_TEXT, None, "<|end|>", [], []),
}

LINES = [
    "What is the sum of two and three? The answer is five. Hello there, how are you today?",
    "user assistant system tool because bye hi yes no 0 1 2 3 4 5 6 7 8 9\n\n\n",
    '{"name": "add", "arguments": {"a": 17, "b": 25}} {"type": "function", "parameters": {}}',
]


@functools.cache
def build(family: str) -> PreTrainedTokenizerFast:
    template, bos, eos, special, marked = FAMILIES[family]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    control = [token for token in (bos, eos, *special) if token is not None]
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        min_frequency=1,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(LINES * 3, trainer)
    core.add_tokens([AddedToken(token, normalized=False) for token in marked])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = (TRL_TEMPLATES / template).read_text() if template.endswith(".jinja") else template
    return tokenizer


@pytest.fixture(scope="session")
def family() -> Callable[[str], PreTrainedTokenizerFast]:
    return build


class Script:
    """An engine that says the given turns of one episode, one after the other (the last one again and again): text, or ids. Text is ended
    by the tokenizer's eos unless it is cut."""

    def __init__(self, tokenizer: Any, turns: Sequence[str | list[int]]) -> None:
        self.tokenizer = tokenizer
        self.turns = list(turns)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        turn = self.turns[min(len(self.requests), len(self.turns) - 1)]
        self.requests.append(request)
        stop_ids = request.params.stop_ids
        ids = list(turn) if isinstance(turn, list) else [*self.tokenizer(turn, add_special_tokens=False)["input_ids"], *stop_ids]
        cut = ids[: request.params.max_tokens]
        ended = bool(cut) and cut[-1] in stop_ids
        return Completion(cut, [-0.5] * len(cut), "stop" if ended else "length", [0] * len(cut))


@pytest.fixture
def play() -> Callable[..., tuple[Episode, Script]]:
    """Plays one episode: ``play(tokenizer, environment, turns, task=..., limits=...)``."""

    def run(
        tokenizer: Any,
        make: Callable[[], Any],
        turns: Sequence[str | list[int]],
        *,
        task: Task | None = None,
        limits: EpisodeLimits | None = None,
        timeout: float = 5.0,
        inline: bool = False,
        seed: int = 7,
        vocab: int | None = None,
    ) -> tuple[Episode, Script]:
        task = task or Task(0, [{"role": "user", "content": "hi"}], None, {})
        engine = Script(tokenizer, turns)

        async def main() -> Episode:
            runner = EpisodeRunner(
                engine=engine,  # type: ignore[arg-type]
                make_environment=make,
                tokenizer=tokenizer,
                encode=lambda task: encode_prompt(task, tokenizer),
                limits=limits or EpisodeLimits(512, 4096),
                calls=EnvironmentCalls(timeout),
                inline=inline,
                vocab=vocab,
            )
            params = SamplingParams(max_tokens=1, stop_ids=(tokenizer.eos_token_id,))
            return await runner.run(task, runner.encode(task), 0, seed, params)

        return asyncio.run(main()), engine

    return run
