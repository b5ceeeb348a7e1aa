"""A text in the tokens of two vocabularies, as it grows, and back."""

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from quire.engine.draft_by_text import KEPT, TRIED, Retokenizer
from quire.text.backends import LibraryBackend
from quire.text.tokenizer import Tokenizer

TEXTS = ["one two three four five", "the quick brown fox jumps over the lazy dog"]


def make(texts, size, metaspace=False):
    library = Library(models.BPE())
    if metaspace:
        library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        alphabet = sorted({*"".join(texts), "▁", "\n", "é"})
    else:
        library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    return Tokenizer(LibraryBackend(library), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="module")
def tokenizers():
    return make(TEXTS, 320), make(TEXTS[:1], 270), make(TEXTS, 120, metaspace=True)


def test_a_text_is_read_as_it_grows(tokenizers):
    own, other, _ = tokenizers
    text = " ".join(TEXTS * 20)
    tokens, retokenizer = own.encode("<s>" + text), Retokenizer(own, other)
    for end in (1, 2, 3, 50, 51, 400, len(tokens)):
        ids = retokenizer.read(tokens[:end])
        assert other.decode(ids) == own.decode(tokens[:end])
    assert ids == other.encode(text) and len(retokenizer._tail) <= 2 * KEPT < len(text)


@pytest.mark.parametrize("text", ["漢字，漢字☃é。" * 400, "漢" * 3000, "one two " + "a" * 3000])
@pytest.mark.parametrize("kind", [1, 2])
def test_a_text_without_blanks_is_cut_elsewhere(tokenizers, text, kind):
    """Behind a mark, if there is one."""
    own, other = tokenizers[0], tokenizers[kind]
    text = (
        text if kind == 1 else text.replace("漢", "a").replace("字", "n").replace("，", "\n").replace("☃", "").replace("。", "")
    )
    tokens, retokenizer = own.encode(text), Retokenizer(own, other)
    for end in (1000, 1003, 1200, 4000, 4003, len(tokens)):
        ids = retokenizer.read(tokens[:end])
        if ids is not None:
            assert other.decode(ids) == own.decode(tokens[:end])
        assert len(retokenizer._tail) <= 4 * KEPT
    assert ids is not None and len(text) > 4 * KEPT


def test_tokens_that_the_other_model_does_not_have(tokenizers):
    own, other, _ = tokenizers
    retokenizer, last = Retokenizer(own, other, rows=len(other)), other.encode("one two", add_special_tokens=False)[-1]
    tokens = own.encode("one" * 600 + " two")
    assert retokenizer.read(tokens) is not None
    short = Retokenizer(own, other, rows=last)
    assert [short.read(own.encode(text)) is None for text in ("one", "one two")] == [False, True]
    assert Retokenizer(own, other, rows=5).read(tokens) is None  # of what is not encoded again, too


@pytest.mark.parametrize("text", ["one☃", "one two " * 900 + "☃" * 40 + " three" * 900])
def test_a_character_that_is_written_out_at_length(tokenizers, text):
    """Such a text is given up at once, and not encoded again with every token."""
    library = Library.from_str(tokenizers[1]._backend._tokenizer.to_str())
    library.normalizer, asked = normalizers.Replace("☃", "one two three " * 300), []
    other = Tokenizer(LibraryBackend(library), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    retokenizer, tokens = Retokenizer(tokenizers[0], other), tokenizers[0].encode(text)
    assert retokenizer.read(tokens) is None
    other.encode = asked.append
    assert retokenizer.read([*tokens, tokens[0]]) is None and not asked


@pytest.mark.parametrize("text", ["a" * 2000, "one two three" * 90 + "a" * 2000])
def test_little_is_written_before_it_is_given_up(tokenizers, text):
    library = Library.from_str(tokenizers[1]._backend._tokenizer.to_str())
    library.normalizer, written = normalizers.Replace("a", "x" * 20_000), []
    other = Tokenizer(LibraryBackend(library))
    encode, other.encode = other.encode, lambda *asked, **options: written.append(encode(*asked, **options)) or written[-1]
    assert Retokenizer(tokenizers[0], other).read(tokenizers[0].encode(text)) is None
    assert sum(map(len, written)) <= TRIED * 20_000 + len(text)


def test_within_a_character_nothing_is_said(tokenizers):
    own, other, _ = tokenizers
    tokens, retokenizer = own.encode("é☃"), Retokenizer(own, other)
    assert [retokenizer.read(tokens[:end]) is None for end in range(1, len(tokens) + 1)] == [True, False, True, True, False]


@pytest.mark.parametrize("own, other", [(0, 1), (1, 0), (0, 2), (2, 0)])
def test_what_comes_next_is_translated(tokenizers, own, other):
    """Behind a word, within one, and behind a blank line."""
    own, other = tokenizers[own], tokenizers[other]
    for text, more in (("the quick", " brown fox"), ("the qui", "ck brown"), ("one two", " three"), ("one two\n", "the")):
        retokenizer, tokens = Retokenizer(own, other), own.encode(text)
        ids = retokenizer.read(tokens)
        whole = other.encode(text + more)
        if whole[: len(ids)] == ids:  # as the other would go on
            drafts = retokenizer.translate(tokens, ids, whole[len(ids) :])
            assert own.decode([*tokens, *drafts]) == text + more
    assert retokenizer.translate(tokens, ids, []) == []
