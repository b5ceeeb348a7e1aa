"""How GGUF's byte-level BPE vocabularies cut a text into words before merging: `tokenizer.ggml.pre` names a row here.

Merges never cross a word border, so the right patterns are part of the vocabulary. They are the ones in the families'
own tokenizer.json files.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALLS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _gpt4(digits: str, marks: str = "") -> str:
    """`marks`: what else counts as a letter."""
    return rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"


def _gpt4o(digits: str, ending: str) -> str:
    """Words begin at capitals: "camelCase" is two."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{_CAPITALS}*{_SMALLS}+{ending}|{lead}{_CAPITALS}+{_SMALLS}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _characters(ranges: str) -> str:
    """The inside of a character class, from code points."""
    ends = (part.partition("-") for part in ranges.split())
    return "".join(chr(int(first, 16)) + (f"-{chr(int(last, 16))}" if last else "") for first, _, last in ends)


_CASED_LETTERS = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 "
    "3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 "
    "1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 "
    "1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 "
    "213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 "
    "A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 "
    "118A0-118DF 1E900-1E943"
)
_PUNCTUATION = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizing:
    patterns: tuple[str, ...]  # applied in order; matches and what lies between them are separate words
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token needs no merges to become it
    add_bos: bool = False  # if the file does not say

    def build(self) -> PreTokenizer:
        splits: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizing((_GPT2_WORDS,))
_GPT2_NFC = PreTokenizing((_GPT2_WORDS,), nfc=True)
_SINGLE_DIGITS = PreTokenizing((r"\p{N}", _GPT2_WORDS))
_SINGLE_DIGITS_NFC = PreTokenizing((r"\p{N}", _GPT2_WORDS), nfc=True)
_LLAMA3 = PreTokenizing((_gpt4(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizing((_gpt4(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizing((_gpt4(r"\p{N}"),), nfc=True)
_DEEPSEEK3 = PreTokenizing((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_WORDS))
_O200K = PreTokenizing((_gpt4o(r"\p{N}{1,3}", f"{_ENGLISH}?"),), ignore_merges=True)

PRE_TOKENIZERS: dict[str, PreTokenizing] = {
    "default": PreTokenizing((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0", "mellum"), _GPT2
    ),
    **dict.fromkeys(("olmo", "mpt"), _GPT2_NFC),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _SINGLE_DIGITS),
    **dict.fromkeys(("command-r", "exaone"), _SINGLE_DIGITS_NFC),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "kormo"), _QWEN2),
    "qwen35": PreTokenizing((_gpt4(r"\p{N}", marks=r"\p{M}"),), nfc=True),
    **dict.fromkeys(("hunyuan", "grok-2"), PreTokenizing((_gpt4(r"\p{N}"),))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-llm": PreTokenizing(
        (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", rf"\s?[{_PUNCTUATION}]+", r"\s+$", _EAST_ASIAN, r"\p{N}")
    ),
    "deepseek-coder": PreTokenizing((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "falcon": PreTokenizing((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "tekken": PreTokenizing((_gpt4o(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    "seed-coder": PreTokenizing((rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizing((_BLOOM,))),
    "viking": PreTokenizing((_BLOOM, r"\p{N}")),
}
