"""How GGUF's byte-level BPE vocabularies cut a text into words before merging: `tokenizer.ggml.pre` names a row here.

Merges never cross a word border, so the right patterns are part of the vocabulary. They are the ones in the families'
own tokenizer.json files. `ends` says what is added to a text if the file does not say.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALLS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _gpt4(digits: str) -> str:
    return rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _gpt4o(digits: str, ending: str) -> str:
    """Words begin at capitals: "camelCase" is two."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{_CAPITALS}*{_SMALLS}+{ending}|{lead}{_CAPITALS}+{_SMALLS}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizing:
    patterns: tuple[str, ...] = ()  # applied in order; matches and what lies between them are separate words
    gpt2: bool = False  # GPT-2's own pattern, after the others
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token needs no merges to become it
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        splits: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizing(gpt2=True)
_GPT2_NFC = PreTokenizing(gpt2=True, nfc=True)
_SINGLE_DIGITS = PreTokenizing((r"\p{N}",), gpt2=True)
_SINGLE_DIGITS_NFC = PreTokenizing((r"\p{N}",), gpt2=True, nfc=True)
_LLAMA3 = PreTokenizing((_gpt4(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizing((_gpt4(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizing((_gpt4(r"\p{N}"),), nfc=True)
_DEEPSEEK3 = PreTokenizing((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_WORDS))
_O200K = PreTokenizing((_gpt4o(r"\p{N}{1,3}", f"{_ENGLISH}?"),), ignore_merges=True)

PRE_TOKENIZERS: dict[str, PreTokenizing] = {
    "default": PreTokenizing((r"[\p{P}\$\+<=>\^~\|]+", r"\p{N}+", "[0-9][0-9][0-9]"), gpt2=True),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0", "mellum"), _GPT2
    ),
    **dict.fromkeys(("olmo", "mpt"), _GPT2_NFC),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _SINGLE_DIGITS),
    **dict.fromkeys(("command-r", "exaone"), _SINGLE_DIGITS_NFC),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "kormo"), _QWEN2),
    **dict.fromkeys(("hunyuan", "grok-2"), PreTokenizing((_gpt4(r"\p{N}"),))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-llm": PreTokenizing(
        (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _EAST_ASIAN, r"\p{N}")
    ),
    "deepseek-coder": PreTokenizing((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "falcon": PreTokenizing((r"[\p{P}\$\+<=>\^~\|`]+", r"\p{N}+", "[0-9][0-9][0-9]"), gpt2=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "tekken": PreTokenizing((_gpt4o(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    "seed-coder": PreTokenizing((rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizing((_BLOOM,))),
    "viking": PreTokenizing((_BLOOM, r"\p{N}")),
}
