import json
import logging
import random
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers

from quire.text.other_tokenizers import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_from_gguf,
)
from quire.types.errors import ModelError
from text.tiny_tokenizers import byte_level, sentencepiece, sentencepiece_parts

ALPHABET = [
    "the ",
    "capital",
    " of ",
    "  ",
    "   ",
    "\n\n",
    "12",
    "345 ",
    "ing",
    "Ü",
    "你",
    "好",
    "🙂",
    "don't",
    ".",
    "<s>",
    "▁",
    "é",
    "\t",
]


def texts() -> list[str]:
    pick = random.Random(0)
    return [
        "",
        " ",
        "The capital of France is Paris.",
        *("".join(pick.choices(ALPHABET, k=pick.randint(1, 9))) for _ in range(300)),
    ]


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    state = json.loads(byte_level().to_str())
    vocab = state["model"]["vocab"] | {token["content"]: token["id"] for token in state["added_tokens"]}
    kinds = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in state["added_tokens"]}
    tokens = [*sorted(vocab, key=vocab.__getitem__), "[PAD]"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*(kinds.get(i, NORMAL) for i in range(len(vocab))), UNUSED],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Scores say what the merges say: the earlier a piece is merged, the better."""
    vocab, merges = sentencepiece_parts()
    rank = {"".join(merge): i for i, merge in reversed(list(enumerate(merges)))}
    kinds = {0: UNKNOWN, 1: CONTROL, 2: CONTROL} | dict.fromkeys(range(3, 259), BYTE)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(vocab),
        "tokenizer.ggml.scores": np.array([-float(rank.get(piece, 1e6)) for piece in vocab], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([kinds.get(i, NORMAL) for i in range(len(vocab))], dtype=np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_byte_level_vocabularies_equal_their_tokenizer_json() -> None:
    library, tokenizer = byte_level(), tokenizer_from_gguf(byte_level_metadata())
    for text in [*texts(), "a<|end|>b<tool>c"]:
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies_equal_their_tokenizer_json(prefix: bool) -> None:
    """Merges are found again from the scores alone."""
    library, tokenizer = sentencepiece(prefix), tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=prefix))
    for text in texts():
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids)


def test_user_defined_runs_of_spaces_are_longest_first() -> None:
    metadata = sentencepiece_metadata(add_space_prefix=False)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for n in (2, 3, 4):
        i = tokens.index("▁" * n)
        tokens[i], kinds[i] = " " * n, USER_DEFINED
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("a" + " " * 7 + "the", add_special_tokens=False)
    assert [tokenizer.token(i) for i in ids] == ["a", "▁▁▁▁", "▁▁▁", "t", "h", "e"]
    assert tokenizer.decode(ids) == "a" + " " * 7 + "the"


def test_unused_tokens_are_holes() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    hole = len(tokenizer)
    assert "[PAD]" not in tokenizer.get_vocab()
    assert tokenizer.decode([hole]) == ""
    assert hole not in tokenizer.encode("[PAD]")


def test_named_tokens_are_special_whatever_their_type() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.token_type"][0] = NORMAL  # <|end|> is still the end of text
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("<|end|>") == [0]
    assert tokenizer.decode([0]) == ""
    assert (tokenizer.eos_token, tokenizer.bos_token_id) == ("<|end|>", 1)


@pytest.mark.parametrize(
    ("metadata", "first", "last"),
    [
        (byte_level_metadata(), None, None),
        (byte_level_metadata(add_bos_token=True, add_eos_token=True), 1, 0),
        (byte_level_metadata(pre="llama-bpe"), 1, None),
        (byte_level_metadata(pre="llama-bpe", add_bos_token=False), None, None),
        (sentencepiece_metadata(), 1, None),
        (sentencepiece_metadata(add_bos_token=False), None, None),
    ],
)
def test_what_is_added_to_a_text(metadata: dict[str, Any], first: int | None, last: int | None) -> None:
    tokenizer = tokenizer_from_gguf(metadata)
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [i for i in (first, *plain, last) if i is not None]


def words(pre: str, text: str) -> list[str]:
    """The words, readable again."""
    splits = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in splits]


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", ["Don", "'t", " pay", " 12345", "€", "\n"]),
        ("smollm", ["Don", "'t", " pay", " ", "1", "2", "3", "4", "5", "€", "\n"]),
        ("qwen2", ["Don", "'t", " pay", " ", "1", "2", "3", "4", "5", "€\n"]),
        ("llama-bpe", ["Don", "'t", " pay", " ", "123", "45", "€\n"]),
        ("deepseek-v3", ["Don", "'t", " pay", " ", "123", "45", "€\n"]),
        ("gpt-4o", ["Don't", " pay", " ", "123", "45", "€\n"]),
        ("tekken", ["Don", "'t", " pay", " ", "1", "2", "3", "4", "5", "€\n"]),
        ("falcon", ["Don", "'", "t", " pay", " ", "123", "45", "€", "\n"]),
        ("default", ["Don", "'", "t", " pay", " ", "123", "45", "€", "\n"]),
    ],
)
def test_words_are_cut_as_the_family_does(pre: str, cut: list[str]) -> None:
    assert words(pre, "Don't pay 12345€\n") == cut


def test_digits_are_split_off_before_or_after_the_words() -> None:
    assert words("smollm", "a  1") == ["a", "  ", "1"]
    assert words("falcon", "a  1") == ["a", " ", " ", "1"]


def test_every_pattern_compiles_and_loses_nothing() -> None:
    text = "Héllo wörld's 1234 你好 ひらがな 한국 $x_1 == y;\r\n\t🙂  end "
    for name, pre in PRE_TOKENIZERS.items():
        assert "".join(words(name, text)) == text, name
        for pattern in pre.patterns:
            pre_tokenizers.Split(Regex(pattern), "isolated")


def test_an_unknown_word_pattern_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"pre = 'novel' is unknown; known are .*qwen2.*tokenizer="):
        tokenizer_from_gguf(byte_level_metadata(pre="novel"), "model.gguf")


def test_a_missing_word_pattern_is_the_default_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level_metadata()
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING):
        tokenizer_from_gguf(metadata, "model.gguf")
    assert "tokenizer.ggml.pre is missing" in caplog.text


def test_what_cannot_be_built_is_named() -> None:
    with pytest.raises(ModelError, match=r"x\.gguf: the tokenizer kind 't5' is not supported"):
        tokenizer_from_gguf(sentencepiece_metadata(model="t5"), "x.gguf")
    with pytest.raises(ModelError, match=r"no tokenizer\.ggml\.tokens"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "gpt2"})
    with pytest.raises(ModelError, match="scores has 1 entries"):
        tokenizer_from_gguf(sentencepiece_metadata(scores=[0.0]))
    with pytest.raises(ModelError, match="merges do not fit"):
        tokenizer_from_gguf(byte_level_metadata(merges=["no such"]))
    with pytest.raises(ModelError, match="bos_token_id is missing"):
        tokenizer_from_gguf(byte_level_metadata(add_bos_token=True, bos_token_id=4_000_000_000))


def test_chat_templates_are_read() -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    assert tokenizer_from_gguf(metadata).chat_template == {"default": "one", "tool_use": "two"}


@pytest.mark.parametrize("lower", [True, False])
def test_wordpiece(lower):
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[unused0]",
        "paris",
        "is",
        "walk",
        "##ing",
        "##s",
        "!",
        ",",
        "a",
        "##a",
    ]
    words += [] if lower else ["Paris"]
    original = tokenizers.Tokenizer(tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    original.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower)
    original.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    original.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    stored = [word[2:] if word.startswith("##") else word if word.startswith("[") else f"▁{word}" for word in words]
    found = tokenizer_from_gguf({
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": stored,
        "tokenizer.ggml.token_type": [3 if i < 5 else 1 for i in range(len(words))],
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 3, "tokenizer.ggml.padding_token_id": 0,
    })  # fmt: skip
    for text in ("Paris is walking, aa!", "páris walks xyz", "", "is\u00a0a  walka"):
        assert found.encode(text) == original.encode(text).ids
    assert found.encode("walking", add_special_tokens=False) == [8, 9]
