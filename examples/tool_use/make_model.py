"""Writes a model small enough to train from nothing in minutes: its config, a byte-level tokenizer trained on the demonstrations, and a
chat template that shows tools, calls and results. It holds no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

CONTROL = ["<|end|>", "<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TAGS = ["<tool_call>", "</tool_call>"]

TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties.keys() | join(', ') }}){{ '' if loop.last else ' ' }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '</tool_call>' }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(directory: Path, demonstrations: Path) -> None:
    rows = [json.loads(line) for line in demonstrations.read_text(encoding="utf-8").splitlines()]
    core = Tokenizer(models.BPE())
    # digits stay apart, so that numbers are copied and not memorised
    digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=CONTROL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator([message["content"] for row in rows for message in row["messages"]], trainer)
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=CONTROL[0], clean_up_tokenization_spaces=False)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.05,
    ).save_pretrained(directory)
