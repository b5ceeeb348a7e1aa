"""Long texts that are cut: no more is tokenized than is kept, and the tokens are those of the whole text."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_tokenizers
import tokenizers
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from quire.text import prompts
from quire.text.offload import TextOffload
from quire.text.partial import LONG_CHARACTERS, SpecialTokens, parts
from quire.text.prompts import Tokenization
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import read_tokenizer
from quire.text.workers.wire import Cut

WORDS = (
    "the", "capital", "of", "France,", "Grüße", "你好世界", "12", "345", "don't", "café", "🙂", "x_y", "<tool>", "naïve", "A.B",
    "Привет", "<s>", "[SEP]", "", "(a)\n\n\t",
)  # fmt: skip


def bert_like() -> tokenizers.Tokenizer:
    tokenizer = tiny_tokenizers.word_piece()
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return tokenizer


KINDS = {
    "byte_level": tiny_tokenizers.byte_level,
    "sentencepiece": tiny_tokenizers.sentencepiece,
    "sentencepiece without a prefix": lambda: tiny_tokenizers.sentencepiece(prefix=False),
    "unigram": tiny_tokenizers.unigram,
    "word_piece": bert_like,
}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return read_tokenizer(tiny_tokenizers.save(tmp_path, KINDS[request.param]()))


def long_text(seed: int, words: int = 30000) -> str:
    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) for _ in range(words))


@pytest.mark.parametrize("right", [True, False])
def test_the_kept_tokens_equal_those_of_the_whole_text(tokenizer: Tokenizer, right: bool) -> None:
    assert tokenizer.words_apart
    template = tokenizer.template
    for seed in range(3):
        text = long_text(seed)
        whole = tokenizer.encode(text)
        for keep in (8, 100, 2000):
            cut = Cut(1 << 40, keep, right, len(template.before), len(template.after))
            part = next(parts(text, cut))
            assert len(part.text) < len(text) / 2
            ids = tokenizer.encode(part.text)
            assert len(ids) >= keep + len(tokenizer.encode(part.lead, add_special_tokens=False))
            assert cut.of(ids)[1] == cut.of(whole)[1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_python_calls_are_cut_the_same_way(tokenizer: Tokenizer, side: Any, monkeypatch: Any) -> None:
    how = Tokenization(truncate_prompt_tokens=60, truncation_side=side)
    text = long_text(5)
    cut = how.apply(tokenizer, text, 1000)
    monkeypatch.setattr(prompts, "encode_end", lambda *_: None)
    assert len(cut) == 60 and cut == how.apply(tokenizer, text, 1000)


def test_special_tokens_stay_around_what_is_kept() -> None:
    for right, kept in ((True, [1, 10, 11, 2]), (False, [1, 13, 14, 2])):
        assert Cut(99, 4, right, 1, 1).of([1, 10, 11, 12, 13, 14, 2]) == (7, kept)
    assert Cut(99, 2, True, 1, 1).of([1, 10, 11, 2]) == (4, [1, 2])
    assert Cut(99, 4, True, 1, 1).of([1, 10, 11, 2]) == (4, [1, 10, 11, 2])


def with_offload(directory: Path, text: str, cut: Cut) -> tuple[tuple[int, list[int] | None], list[int]]:
    """The tokens, and how long the texts were that the tokenizer was given."""
    config: Any = SimpleNamespace(
        args=SimpleNamespace(tokenizer=None, tokenizer_revision=None),
        facts=SimpleNamespace(files=SimpleNamespace(path=directory)),
    )
    tokenizer = read_tokenizer(directory)
    lengths: list[int] = []
    encode = tokenizer._backend.encode

    def counted(given: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(given))
        return encode(given, add_special_tokens)

    tokenizer._backend.encode = counted  # type: ignore[method-assign]
    offload = TextOffload(config, tokenizer)
    try:
        return asyncio.run(offload.encode(text, True, cut)), lengths
    finally:
        offload.stop()


def test_a_long_text_costs_what_is_kept_of_it(tmp_path: Path) -> None:
    directory = tiny_tokenizers.save(tmp_path, bert_like())
    cut = Cut(512, 512, True, 1, 1)
    costs = []
    for size in (10_000, 3_000_000):
        text = "the capital of Germany is a gathering " * (size // 38)
        (count, ids), lengths = with_offload(directory, text, cut)
        assert ids is not None and len(ids) == 512 and count > 512
        costs.append(sum(lengths))
    assert costs[1] <= costs[0]


def test_a_text_without_spaces_is_tokenized_whole(tmp_path: Path) -> None:
    directory = tiny_tokenizers.save(tmp_path, tiny_tokenizers.byte_level())
    text = "的" * (2 * LONG_CHARACTERS)
    cut = Cut(1 << 40, 16, True)
    (count, ids), lengths = with_offload(directory, text, cut)
    assert (count, ids) == cut.of(read_tokenizer(directory).encode(text))
    assert max(lengths) == len(text)


def test_tokenizers_whose_tokens_span_words_are_told_apart() -> None:
    vocab = {piece: i for i, piece in enumerate(["a", "b", " ", "a "])}
    spanning = tokenizers.Tokenizer(models.BPE(vocab, [("a", " ")]))
    assert not _words_apart(spanning)
    looking = tiny_tokenizers.byte_level()
    looking.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\w+(?=.*z)| ?\w+|\s+"), "isolated")
    assert not _words_apart(looking)


def _words_apart(tokenizer: tokenizers.Tokenizer) -> bool:
    from quire.text.partial import tokenizes_words_apart

    return tokenizes_words_apart(tokenizer)


@pytest.mark.parametrize("kind", ["word_piece", "byte_level"])
def test_pairs_are_joined_as_the_tokenizer_joins_them(kind: str, tmp_path: Path) -> None:
    fast = KINDS[kind]()
    tokenizer = read_tokenizer(tiny_tokenizers.save(tmp_path, fast))
    first, second = "the capital of France", "a quire is a gathering of pages; the pages are gathered"
    for most in (1000, 24, 12, 7):
        ids = [fast.encode(text, add_special_tokens=False).ids for text in (first, second)]
        lengths = tokenizer.template.fit(len(ids[0]), len(ids[1]), most)
        joined, segment = tokenizer.template.join(ids[0][: lengths[0]], ids[1][: lengths[1]])
        fast.enable_truncation(most)
        expected = fast.encode(first, second)
        fast.no_truncation()
        assert joined == expected.ids
        if kind == "word_piece":
            assert segment == expected.type_ids.index(1)


def test_templates_of_probes(tmp_path: Path) -> None:
    template = read_tokenizer(tiny_tokenizers.save(tmp_path, bert_like())).template
    cls, sep = template.before[0], template.after[0]
    assert template == SpecialTokens((cls,), (sep,), (cls,), (sep,), (sep,), 1)
