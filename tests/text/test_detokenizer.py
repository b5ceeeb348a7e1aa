import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.text.detokenizer import new_detokenizer
from quire.text.tokenizer import CleanUpStream, Tokenizer, clean_up
from text.tiny_tokenizers import KINDS

TEXTS = ["The capital of France is Paris.", "Grüße 你好 🙂🙃 привет ½ € end", " lead  double \n\n x", "don't, it's"]
settings.register_profile("text", max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
law = settings(settings.get_profile("text"))

tokens = st.lists(st.one_of(st.integers(0, 460), st.integers(0, 20)), max_size=24)  # beyond every vocabulary, and specials


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], prompt: list[int], **flags: bool) -> str:
    detokenizer = new_detokenizer(tokenizer, prompt=prompt, **flags)
    text, at = "", 0
    while at < len(ids):
        size = sizes[at % len(sizes)] if sizes else 1
        text += detokenizer.feed(ids[at : at + size])
        at += size
    return text + detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
@law
@given(ids=tokens, sizes=st.lists(st.integers(1, 4), max_size=3), skip=st.booleans(), spaces=st.booleans())
def test_without_a_prompt_the_stream_is_decode(
    kinds: dict[str, Tokenizer], kind: str, ids: list[int], sizes: list[int], skip: bool, spaces: bool
) -> None:
    flags = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    assert stream(kinds[kind], ids, sizes, [], **flags) == kinds[kind].decode(ids, **flags)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_piece"])
@law
@given(prompt=tokens, ids=tokens, skip=st.booleans())
def test_with_a_prompt_it_is_what_decode_adds(
    kinds: dict[str, Tokenizer], kind: str, prompt: list[int], ids: list[int], skip: bool
) -> None:
    tokenizer = kinds[kind]
    before = tokenizer.decode(prompt, skip)
    whole = tokenizer.decode(prompt + ids, skip)
    common = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole)))
    assert stream(tokenizer, ids, [], prompt, skip_special_tokens=skip) == whole[common:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_token_by_token_in_whole_characters(kinds: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = kinds[kind]
    ids = tokenizer.encode(text)
    detokenizer = new_detokenizer(tokenizer)
    parts = [detokenizer.feed([i]) for i in ids]
    assert detokenizer.finish() == "" or tokenizer.cleans_up
    if kind in ("byte_level", "sentencepiece", "no_prefix"):
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


def test_a_continuation_keeps_its_leading_space(kinds: dict[str, Tokenizer]) -> None:
    for kind, word in (("byte_level", " Paris"), ("sentencepiece", "Paris"), ("no_prefix", " Paris")):
        prompt = kinds[kind].encode("The capital of France is")
        output = kinds[kind].encode(word, add_special_tokens=False)
        assert stream(kinds[kind], output, [], prompt) == " Paris"
        assert stream(kinds[kind], output, [], []) == word


def test_after_a_prompt_without_text_the_first_space_is_dropped(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["sentencepiece"]
    bos, *ids = tokenizer.encode("Paris is")
    assert stream(tokenizer, ids, [], [bos]) == "Paris is"
    assert stream(tokenizer, ids, [], [bos], skip_special_tokens=False) == " Paris is"


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    return [tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in raw]


def test_a_character_is_told_with_its_last_byte_and_not_later(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["sentencepiece"]
    detokenizer = new_detokenizer(tokenizer)
    parts = [detokenizer.feed([i]) for i in byte_ids(tokenizer, "é🙂".encode())]
    assert parts == ["", "é", "", "", "", "🙂"]


def test_bad_bytes_do_not_stall_the_stream(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["sentencepiece"]
    detokenizer = new_detokenizer(tokenizer)
    assert [detokenizer.feed([i]) for i in byte_ids(tokenizer, b"\xff\xff\xe2A")] == ["\ufffd", "\ufffd", "", "\ufffdA"]
    assert detokenizer.feed(byte_ids(tokenizer, "\ufffd".encode())) == "\ufffd"
    assert detokenizer.feed(byte_ids(tokenizer, b"\xe2\x82")) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_character_begun_in_the_prompt_belongs_to_the_output(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["sentencepiece"]
    first, *rest = byte_ids(tokenizer, "€".encode())
    assert stream(tokenizer, rest, [], [*tokenizer.encode("a"), first]) == "€"
    assert stream(tokenizer, tokenizer.encode("a", False), [], [first]) == " a"  # the prompt's text ended with U+FFFD already


def test_a_long_prompt_costs_nothing(kinds: dict[str, Tokenizer]) -> None:
    class Prompt(list[int]):
        read = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            Prompt.read += 1
            return super().__getitem__(index)

        def __reversed__(self):  # type: ignore[no-untyped-def]
            return (self[i] for i in range(len(self) - 1, -1, -1))

    tokenizer = kinds["byte_level"]
    prompt = Prompt(tokenizer.encode("pages " * 1000))
    new_detokenizer(tokenizer, prompt=prompt)
    assert 0 < Prompt.read < 10


def test_clean_up_follows_a_run_of_quotes_from_its_beginning(kinds: dict[str, Tokenizer]) -> None:
    """Every second one is replaced, so the end of the text depends on where it began, far beyond any window."""
    tokenizer = kinds["word_piece"]
    quote = tokenizer.get_vocab()["'"]
    for length in range(40):
        assert stream(tokenizer, [quote] * length, [], []) == tokenizer.decode([quote] * length)


def test_ids_that_decode_leaves_out_take_no_part(kinds: dict[str, Tokenizer]) -> None:
    """However many there are, the text goes on after them as if they were not there."""
    tokenizer = kinds["word_piece"]
    vocab = tokenizer.get_vocab()
    pad, quote, don, unknown = vocab["[PAD]"], vocab["'"], vocab["don"], len(vocab)
    for ids in ([pad] * 8 + [quote] + [unknown] * 8, [don] + [unknown] * 20 + [don], [don] + [pad] * 20 + [don, quote]):
        for skip in (True, False):
            flags = {"skip_special_tokens": skip, "spaces_between_special_tokens": False}
            assert stream(tokenizer, ids, [], [], **flags) == tokenizer.decode(ids, **flags)


def test_of_a_prompt_only_what_comes_out_otherwise_is_told(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["word_piece"]
    vocab = tokenizer.get_vocab()
    prompt = [vocab["don"], vocab["'"]]
    assert stream(tokenizer, [vocab["t"]], [], prompt) == "'t"  # "don '" has become "don't"
    assert stream(tokenizer, [vocab["##s"]], [], prompt) == "'s"  # and "don 's" "don's"
    assert stream(tokenizer, [vocab["##ing"]], [], prompt) == "ing"  # but "don 'ing" keeps its space


@law
@given(parts=st.lists(st.text("a 'nt.msvre!", max_size=6)))
def test_a_text_cleaned_up_in_parts_is_the_text_cleaned_up(parts: list[str]) -> None:
    cleaner = CleanUpStream()
    assert "".join([cleaner.feed(part) for part in parts]) + cleaner.finish() == clean_up("".join(parts))


def test_clean_up_holds_back_what_may_still_be_cleaned(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["word_piece"]
    vocab = tokenizer.get_vocab()
    ids = [vocab[word] for word in ("don", "'", "t", ",", "the", "page", "##s", "!")]
    assert stream(tokenizer, ids, [], []) == tokenizer.decode(ids) == "don't, the pages!"
