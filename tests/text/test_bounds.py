"""How many characters a token may stand for; whatever could make it more is not bounded at all."""

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from quire.text.backends import COMPOSED, most_characters

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate([*BYTES, "Ġthe", "Ġlongest"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_the_longest_token_is_the_bound():
    tokenizer = byte_level()
    assert most_characters(tokenizer) == len("Ġlongest")
    tokenizer.add_special_tokens(["<|a long marker|>"])
    assert most_characters(tokenizer) == len("<|a long marker|>")
    tokenizer.normalizer = normalizers.NFC()
    assert most_characters(tokenizer) == COMPOSED * len("<|a long marker|>")


@pytest.mark.parametrize(
    "normalizer",
    [normalizers.Strip(), normalizers.StripAccents(), normalizers.Replace("ab", "c"), normalizers.Replace(Regex(" +"), " ")],
)
def test_normalizers_that_leave_something_out(normalizer):
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizer])
    assert most_characters(tokenizer) is None


def test_other_ways_to_leave_something_out():
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    assert most_characters(tokenizer) is None
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True)])  # with any number of spaces behind it
    assert len(tokenizer.encode("<end>" + " " * 500).ids) == 1 and most_characters(tokenizer) is None
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    assert len(words.encode("x" * 500).ids) == 1 and most_characters(words) is None
    unknown = Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True))
    assert len(unknown.encode("☃" * 500).ids) == 1 and most_characters(unknown) is None
