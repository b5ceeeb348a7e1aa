"""Tiny tokenizers of every kind, trained here: nothing is downloaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The capital of France is Paris, and the capital of Germany is Berlin.",
    "A quire is a gathering of pages; the pages are gathered in the order of the text.",
    "def add(a, b):\n    return a + b  # adds 12 and 345",
    "Grüße aus München, 你好世界, привет мир, and a smile 🙂 for 100 €.",
    "don't stop, it's over; we've gone. They're here!",
] * 3

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
UNIGRAM_ALPHABET = "▁abcdefghijklmnopqrstuvwxyz.,!?'"


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<|end|>", "<|start|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def sentencepiece_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and merges of a Llama-like BPE: specials, all bytes, characters, words grown letter by letter."""
    words = ["▁the", "▁The", "▁capital", "▁of", "▁France", "▁is", "▁Paris", "▁pages", "▁a", "▁▁▁▁", "ing", "ered", "\n\n"]
    characters = sorted(set("".join(words)) | set("bcdefghijklmnopqrstuvwxyzGMB.,;:!?'()+#0123456789üß你好пр"))
    grown = dict.fromkeys(word[:n] for word in words for n in range(2, len(word) + 1))
    pieces = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *BYTES, *characters, *grown])}
    halves = [
        sorted(((word[:n], word[n:]) for n in range(1, len(word))), key=lambda pair: pieces.get(pair[0], 0)) for word in grown
    ]
    return pieces, [(left, right) for pairs in halves for left, right in pairs if left in pieces and right in pieces]


def sentencepiece(prefix: bool = True) -> tokenizers.Tokenizer:
    vocab, merges = sentencepiece_parts()
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    words = ["▁the", "▁capital", "▁of", "▁is", "▁quire", "▁pages", "ing", "er"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((word, -2.0) for word in words)]
    pieces += [(character, -5.0) for character in UNIGRAM_ALPHABET]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    parts = [".", ",", "!", "'", "n", "t", "s", "##s", "m", "the", "page", "don", "quire", "##ing", "ve"]
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *parts])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def save(directory: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


KINDS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], dict[str, Any]]] = {
    "byte_level": (byte_level, {"eos_token": "<|end|>", "bos_token": "<|start|>"}),
    "sentencepiece": (sentencepiece, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "no_prefix": (lambda: sentencepiece(prefix=False), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "unigram": (unigram, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}),
    "word_piece": (word_piece, {"unk_token": "[UNK]", "clean_up_tokenization_spaces": True}),
}
