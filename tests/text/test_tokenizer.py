import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from quire.files.resolve import ModelFiles
from quire.text.backends import TransformersBackend
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import load_tokenizer, read_tokenizer
from quire.types.errors import ModelError, NotSupported, RequestError
from text.tiny_tokenizers import byte_level, save, sentencepiece, sentencepiece_parts

TEXT = "The capital of France is Paris — 你好 🙂, don't <tool> <|end|> 12  x"


def test_encoding_and_decoding_follow_the_library(kinds: dict[str, Tokenizer]) -> None:
    for name, library in (
        ("byte_level", byte_level()),
        ("sentencepiece", sentencepiece()),
        ("no_prefix", sentencepiece(False)),
    ):
        tokenizer = kinds[name]
        for special in (True, False):
            ids = tokenizer.encode(TEXT, add_special_tokens=special)
            assert ids == library.encode(TEXT, add_special_tokens=special).ids
            assert tokenizer.decode(ids, special) == library.decode(ids, skip_special_tokens=special)


@given(st.lists(st.integers(0, 430), max_size=20))
def test_byte_level_decoding_equals_the_library_on_any_ids(ids: list[int]) -> None:
    library, tokenizer = _pair()
    assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False)


_made: list[tuple[tokenizers.Tokenizer, Tokenizer]] = []


def _pair() -> tuple[tokenizers.Tokenizer, Tokenizer]:
    from quire.text.backends import LibraryBackend

    if not _made:
        library = byte_level()
        _made.append((library, Tokenizer(LibraryBackend(library))))
    return _made[0]


def test_the_metaspace_decoder_drops_the_first_space_as_the_library_does(kinds: dict[str, Tokenizer]) -> None:
    ids = kinds["unigram"].encode("the capital of pages", add_special_tokens=False)
    assert kinds["unigram"].decode(ids) == "the capital of pages"
    assert kinds["unigram"].decode(ids[1:]) == "capital of pages"


def test_special_tokens_are_skipped_unless_wanted(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["byte_level"]
    ids = tokenizer.encode("a<|end|><tool>b")
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|><tool>b"
    assert tokenizer.all_special_tokens == ["<|end|>", "<|start|>"]
    assert tokenizer.all_special_ids == [0, 1]


def test_spaces_between_special_tokens_can_be_left_out(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["word_piece"]
    ids = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", "the", "page", "[SEP]"])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[CLS] [SEP] the page [SEP]"
    assert tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False) == "[CLS][SEP] the page [SEP]"


def test_ids_beyond_the_vocabulary_decode_to_nothing_and_impossible_ones_are_refused(kinds: dict[str, Tokenizer]) -> None:
    for tokenizer in kinds.values():
        first = tokenizer.encode("the", add_special_tokens=False)
        assert tokenizer.decode([5000, *first, 99_999]) == tokenizer.decode(first)
        assert tokenizer.token(99_999) == ""
        for bad in ([-1], [2**40], ["a"]):
            with pytest.raises(RequestError, match="token ids must be"):
                tokenizer.decode(bad)


def test_numpy_ids_and_single_ids_decode(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["byte_level"]
    ids = tokenizer.encode("gathering")
    assert tokenizer.decode(np.array(ids, dtype=np.int32)) == "gathering"
    assert tokenizer.decode(ids[0]) == tokenizer.decode([ids[0]])
    assert tokenizer.batch_decode([ids, []]) == ["gathering", ""]


def test_text_that_is_not_text_is_the_requests_error(kinds: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        kinds["byte_level"].encode("\ud83d alone")
    with pytest.raises(RequestError, match="got int"):
        kinds["byte_level"].encode(3)


def test_vocabulary_look_ups(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["sentencepiece"]
    vocab = tokenizer.get_vocab()
    assert len(tokenizer) == len(vocab) == tokenizer.vocab_size
    assert tokenizer.convert_ids_to_tokens([0, 1, len(vocab)]) == ["<unk>", "<s>", None]
    assert tokenizer.convert_ids_to_tokens([0, 3], skip_special_tokens=True) == ["<0x00>"]
    assert tokenizer.convert_tokens_to_ids(["</s>", "no such token"]) == [2, 0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (1, 2, 0, None)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token) == (
        "<s>",
        "</s>",
        "<unk>",
        None,
    )
    added = kinds["byte_level"]
    assert len(added) == added.vocab_size + 1  # <tool>


def test_calling_it_gives_ids_and_a_mask(kinds: dict[str, Tokenizer]) -> None:
    one = kinds["sentencepiece"]("pages")
    assert one["input_ids"] == one.input_ids == kinds["sentencepiece"].encode("pages")
    assert one.attention_mask == [1] * len(one.input_ids)
    assert kinds["sentencepiece"](["pages", ""]).input_ids == [one.input_ids, [1]]


def test_config_flags_overrule_what_tokenizer_json_adds(tmp_path: Path) -> None:
    plain = read_tokenizer(save(tmp_path / "a", byte_level(), bos_token="<|start|>", add_bos_token=True, eos_token="<|end|>"))
    assert plain.encode("a")[0] == 1
    assert plain.encode("a", add_special_tokens=False) == plain.encode("a")[1:]
    both = read_tokenizer(save(tmp_path / "b", sentencepiece(), eos_token="</s>", add_bos_token=False, add_eos_token=True))
    assert both.encode("a")[0] != 1
    assert both.encode("a")[-1] == 2


def test_tokens_only_the_config_knows_are_added(tmp_path: Path) -> None:
    entry = {"content": "<think>", "special": False, "normalized": False}
    tokenizer = read_tokenizer(
        save(
            tmp_path,
            byte_level(),
            added_tokens_decoder={"421": entry},
            additional_special_tokens=["<|extra|>"],
            eos_token={"content": "<|end|>", "__type": "AddedToken"},
        )
    )
    ids = tokenizer.encode("<think><|extra|><|end|>")
    assert [tokenizer.token(i) for i in ids] == ["<think>", "<|extra|>", "<|end|>"]
    assert tokenizer.decode(ids) == "<think>"
    assert tokenizer.eos_token == "<|end|>"


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), bos_token="<|start|>")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}, "bos_token": "x"}))
    tokenizer = read_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")


def test_truncation_and_padding_in_the_file_are_not_obeyed(tmp_path: Path) -> None:
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=50)
    assert len(read_tokenizer(save(tmp_path, library)).encode("gathering pages in order")) not in (2, 50)


def test_clean_up_is_for_other_vocabularies_than_bpe(tmp_path: Path, kinds: dict[str, Tokenizer]) -> None:
    tokenizer = read_tokenizer(save(tmp_path, byte_level(), clean_up_tokenization_spaces=True))
    ids = tokenizer.encode("a , b")
    assert tokenizer.decode(ids) == "a , b"
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=True) == "a, b"
    words = kinds["word_piece"].convert_tokens_to_ids(["page", "!"])
    assert kinds["word_piece"].decode(words) == "page!"
    assert kinds["word_piece"].decode(words, clean_up_tokenization_spaces=False) == "page !"


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer here"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: the `tokenizers` library"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        read_tokenizer(tmp_path)


def test_without_tokenizer_json_transformers_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(ModelError, match=r"only \['tokenizer.model'\], which needs `transformers`: pip install"):
        read_tokenizer(tmp_path)


class PythonTokenizer:
    """As much of a transformers tokenizer as is used."""

    added_tokens_decoder = {3: tokenizers.AddedToken("<e>", special=True)}  # noqa: RUF012
    all_special_ids = [3]  # noqa: RUF012
    vocab_size = 3

    def __len__(self) -> int:
        return 4

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return ["abc".index(c) for c in text] + [3] * add_special_tokens

    def decode(self, ids: list[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
        return (" " if spaces_between_special_tokens else "").join("abc"[i] for i in ids if i != 3 or not skip_special_tokens)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return ["a", "b", "c", "<e>"][token_id]

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1, "c": 2, "<e>": 3}


def test_a_tokenizer_written_in_python_serves_too() -> None:
    tokenizer = Tokenizer(TransformersBackend(PythonTokenizer()), special_tokens={"eos_token": "<e>"})
    assert tokenizer.encode("cab") == [2, 0, 1, 3]
    assert tokenizer.decode([2, 0, 3, 77], spaces_between_special_tokens=False) == "ca"
    assert (tokenizer.vocab_size, len(tokenizer), tokenizer.eos_token_id, tokenizer.token(77)) == (3, 4, 3, "")


def test_another_tokenizer_can_be_named(tmp_path: Path) -> None:
    files = ModelFiles("model", tmp_path / "model", "hf", ())
    save(files.path, byte_level(), eos_token="<|end|>")
    assert load_tokenizer(files).eos_token == "<|end|>"
    save(tmp_path / "other", sentencepiece(), eos_token="</s>")
    (tmp_path / "other" / "config.json").write_text("{}")
    assert load_tokenizer(files, tokenizer=str(tmp_path / "other")).eos_token == "</s>"


def test_a_chat_becomes_ids_without_a_second_bos(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ mood }}"
    save(tmp_path, sentencepiece(), bos_token="<s>", eos_token="</s>", chat_template=template)
    tokenizer = read_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "pages"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, mood="calm") == "<s>pages</s>calm"
    ids = tokenizer.apply_chat_template(messages)
    assert ids == [1, *tokenizer.encode("pages", add_special_tokens=False), 2]
    assert tokenizer.apply_chat_template(messages, return_dict=True)["attention_mask"] == [1] * len(ids)
    with pytest.raises(NotSupported, match="return_tensors"):
        tokenizer.apply_chat_template(messages, return_tensors="pt")


def test_templates_come_from_their_own_files_first(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "tools"}]
    save(tmp_path, byte_level(), chat_template=named)
    assert read_tokenizer(tmp_path).chat_template == {"default": "config", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert read_tokenizer(tmp_path).chat_template == {"default": "file", "tool_use": "tools", "rag": "rag"}
    save(tmp_path / "b", byte_level())
    assert read_tokenizer(tmp_path / "b").chat_template is None
    (tmp_path / "b" / "chat_template.json").write_text('{"chat_template": "json"}')
    tokenizer = read_tokenizer(tmp_path / "b")
    assert tokenizer.chat_template == "json"
    tokenizer.chat_template = "mine"
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == tokenizer.chat_template == "mine"


def test_no_torch_and_no_transformers_are_imported(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    code = (
        "import sys, pathlib; from quire.text.tokenizer_files import read_tokenizer; import quire.text.detokenizer;"
        f"read_tokenizer(pathlib.Path({str(tmp_path)!r})); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False"] * 2
    )


def test_the_tiny_sentencepiece_really_needs_its_bytes() -> None:
    assert "🙂" not in sentencepiece_parts()[0]
