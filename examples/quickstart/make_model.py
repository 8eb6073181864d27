"""Writes `tiny/`: the config and the character tokenizer of a model small enough to train from nothing in a minute. It holds no weights."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, PreTrainedTokenizerFast

CHARACTERS = "0123456789="
END = "<end>"
UNKNOWN = "<unk>"


def main(directory: Path = Path(__file__).parent / "tiny") -> None:
    vocabulary = {token: index for index, token in enumerate([END, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token=UNKNOWN).save_pretrained(directory)
    LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        initializer_range=0.05,
    ).save_pretrained(directory)


if __name__ == "__main__":
    main()
