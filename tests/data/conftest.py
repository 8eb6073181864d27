"""Tokenizers and chat templates made on the spot; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "What is the sum of two and three?",
    "The answer is five.",
    "Hello there, how are you today?",
    "I am fine, thank you!",
    "user assistant system tool",
    "Name a colour. Blue is a colour of the sky.",
    "\n\n### Instruction:\nSay it.\n\n### Response:\n",
    "because bye hi yes no 0 1 2 3 4 5 6 7 8 9\n\n\n",
]

SPECIAL = [
    "<|begin|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|header|>",
    "<|end_header|>",
    "<|eot|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# an author who marks what is trained, here without the token that ends the turn
CHATML_GENERATION = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|header|>' + m['role'] + '<|end_header|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
# keeps the thinking of the last answer only; an answer without thinking gets an empty block
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set parts = m['content'].split('</think>') %}{% set said = parts[-1].lstrip('\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ said + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# prompts with an opened thinking block, but renders answers without it
OPENED_THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>' + m['content'].split('</think>')[-1] + '<|eos|>' }}"
    "{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# no special token anywhere
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# <|role|>content<|end|>, thinking dropped unless last
TERSE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] if loop.last else m['content'].split('</think>')[-1]) + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


# Llama 3 keeps line breaks together whatever follows them, GPT-2 does not
LLAMA3_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def build_bpe(template: str | None, *, bos: bool, eos: str, prefix_space: bool) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    if template == LLAMA3:
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=1,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(LINES * 3, trainer)
    # as in Qwen3: recognised, but no control token
    core.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", core.token_to_id("<|begin|>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|begin|>", eos_token=eos, pad_token=eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """Byte-level BPE; pad equals eos, which must never matter."""

    def make(
        template: str | None = CHATML, *, bos: bool = False, eos: str = "<|im_end|>", prefix_space: bool = False
    ) -> PreTrainedTokenizerFast:
        return build_bpe(template, bos=bos, eos=eos, prefix_space=prefix_space)

    return make


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    return {
        "chatml": CHATML,
        "chatml_generation": CHATML_GENERATION,
        "llama3": LLAMA3,
        "qwen3": QWEN3,
        "opened_thinking": OPENED_THINKING,
        "plain": PLAIN,
        "terse": TERSE,
    }


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines and returns the path."""

    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
