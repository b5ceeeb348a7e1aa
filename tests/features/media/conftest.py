import pytest


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer of single characters and the special tokens of all families."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(special + letters)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
