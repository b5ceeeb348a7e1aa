import pytest


@pytest.fixture(scope="session")
def make_tokenizer():
    """Return a maker of tokenizers of single characters, runs of newlines, and special tokens by attribute."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(*others, **named):
        special = ["<pad>", "<s>", "</s>", "<unk>", *named.values(), *others]
        letters = [chr(code) for code in range(32, 127)] + ["\n" * count for count in range(1, 6)]
        inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(special + letters)}, "<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[\s\S]"), "isolated")
        return PreTrainedTokenizerFast(
            tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
            extra_special_tokens=named, additional_special_tokens=list(others),
        )  # fmt: skip

    return make
