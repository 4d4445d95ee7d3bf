"""Tokenizer files of Hugging Face's package, made in tests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from farandole.protocol.run.manifest import TokenizerConfig

SEPARATOR = "<|endoftext|>"


def word_level(*words: str) -> bytes:
    """Return the content of a tokenizer file with these words for tokens."""
    model = {"type": "WordLevel", "vocab": {word: index for index, word in enumerate(words)}, "unk_token": words[0]}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    split = {"pre_tokenizer": {"type": "Whitespace"}}
    return json.dumps({"version": "1.0", **nothing, **split, "added_tokens": [], "model": model}).encode()


def write_words(folder: Path, *words: str) -> tuple[Path, TokenizerConfig]:
    """Write a tokenizer with these words for tokens."""
    path = folder / "tokenizer.json"
    path.write_bytes(word_level(*words))
    return path, config_of(path)


def config_of(path: Path) -> TokenizerConfig:
    return TokenizerConfig(kind="tokenizers", sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def write_bpe(folder: Path, *, has_decoder: bool = True) -> tuple[Path, TokenizerConfig]:
    """Write a small tokenizer as GPT-2's, of byte pairs over all bytes."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if has_decoder:
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=[SEPARATOR], show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the mat sat on the cat"] * 9, trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path, config_of(path)
