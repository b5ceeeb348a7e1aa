"""Tokenizers from GGUF metadata (a dict) and from Mistral's tekken.json, built with the `tokenizers` library.

    tokenizer.ggml.model   gpt2    byte-level BPE with its merges; `pre` names the word pattern
                           llama   SentencePiece BPE: no merges, the score of the merged token decides; byte fallback
                           bert    WordPiece; "▁" marks tokens that begin a word, where vocab.txt marks the others with "##"

Merges never cross a word border, so the word patterns are part of the vocabulary. They are the ones of the families' own
tokenizer.json files.

A tekken.json is a byte-level BPE whose merges follow from the ranks of its tokens. Chats are written like mistral-common
writes them, by one template for each version of the format.
"""

import base64
import binascii
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from quire.files.reading import read_object
from quire.text.backends import LibraryBackend, set_ends
from quire.text.tokenizer import Tokenizer
from quire.types.errors import ModelError

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
    add_bos: bool = False  # if the file has no such field

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


# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "seperator": "sep_token", "padding": "pad_token"}
SPACE = "▁"

_logger = logging.getLogger(__name__)


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str = "GGUF metadata") -> Tokenizer:
    """`source` is the file's name, for error messages."""
    vocabulary = _Vocabulary(metadata, source)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary), True
    elif kind == "bert":
        tokenizer = _wordpiece(vocabulary)
        return Tokenizer(LibraryBackend(tokenizer), special_tokens=vocabulary.named(), chat_templates=_chat_templates(metadata))
    else:
        raise ModelError(
            f"{source}: the tokenizer kind {kind!r} is not supported (gpt2, llama and bert are); "
            "pass tokenizer= with a directory or hub id that has the model's tokenizer.json"
        )
    tokenizer.add_tokens(vocabulary.added_tokens())
    start = vocabulary.end_tokens("bos", default=add_bos)
    end = vocabulary.end_tokens("eos", default=False)
    if start or end:
        set_ends(tokenizer, start, end)
    return Tokenizer(LibraryBackend(tokenizer), special_tokens=vocabulary.named(), chat_templates=_chat_templates(metadata))


class _Vocabulary:
    """The token lists of the metadata, checked."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source
        self.tokens: list[str] = self.array("tokens")
        count = len(self.tokens)
        self.types: list[int] = self.array("token_type", count) if self.get("token_type") is not None else [NORMAL] * count
        special = {self._id(name) for name in (*NAMED, "eot", "eom", "mask")}
        self.types = [CONTROL if i in special and kind != UNUSED else kind for i, kind in enumerate(self.types)]
        # an unused token is a hole in the vocabulary: it never comes out of a text and is never written into one
        self.ids = {token: i for i, token in enumerate(self.tokens) if self.types[i] != UNUSED}

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def array(self, key: str, count: int | None = None) -> list[Any]:
        value = self.get(key)
        if value is None or isinstance(value, str) or not hasattr(value, "__len__"):
            raise ModelError(f"{self.source}: the tokenizer has no tokenizer.ggml.{key}")
        items = value.tolist() if hasattr(value, "tolist") else list(value)
        if count is not None and len(items) != count:
            raise ModelError(f"{self.source}: tokenizer.ggml.{key} has {len(items)} entries for {count} tokens")
        return items

    def added_tokens(self) -> list[AddedToken]:
        """Tokens found in a text before any word is cut: special ones, and those a user of SentencePiece defined."""
        kinds = (UNKNOWN, CONTROL, USER_DEFINED)
        found = [(token, self.types[i]) for token, i in self.ids.items() if self.types[i] in kinds and token]
        return [AddedToken(token, normalized=False, special=kind != USER_DEFINED) for token, kind in found]

    def rename_runs_of_spaces(self) -> set[int]:
        """GGUF spells SentencePiece's user-defined "▁▁" as two spaces; undo that. Returns the lengths of the runs."""
        runs = [i for i, token in enumerate(self.tokens) if self.types[i] == USER_DEFINED and token and not token.strip(" ")]
        for i in runs:
            del self.ids[self.tokens[i]]
            self.tokens[i] = SPACE * len(self.tokens[i])
            self.ids[self.tokens[i]] = i
        return {len(self.tokens[i]) for i in runs}

    def end_tokens(self, name: str, default: bool) -> list[str]:
        token_id = self._id(name)
        asked = self.get(f"add_{name}_token")
        if asked and token_id is None:
            raise ModelError(
                f"{self.source}: every text shall get a {name} token, but tokenizer.ggml.{name}_token_id is missing"
            )
        add = default if asked is None else asked
        return [self.tokens[token_id]] if add and token_id is not None else []

    def named(self) -> dict[str, str]:
        ids = {name: self._id(key) for key, name in NAMED.items()}
        return {name: self.tokens[token_id] for name, token_id in ids.items() if token_id is not None}

    def token(self, name: str) -> str | None:
        token_id = self._id(name)
        return None if token_id is None else self.tokens[token_id]

    def _id(self, name: str) -> int | None:
        """Some files hold an id that is out of range where they mean "none"."""
        token_id = self.get(f"{name}_token_id")
        return int(token_id) if token_id is not None and 0 <= token_id < len(self.tokens) else None


def _wordpiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    plain = {NORMAL, UNUSED}
    ids = {}
    for i, token in enumerate(vocabulary.tokens):
        special = vocabulary.types[i] not in plain or (token.startswith("[") and token.endswith("]") and len(token) > 2)
        ids[token if special else token[1:] if token.startswith(SPACE) else f"##{token}"] = i
    unknown, first, last = (
        next((name for name in (vocabulary.token(key), usual) if name in ids), None)
        for key, usual in (("unknown", "[UNK]"), ("cls", "[CLS]"), ("seperator", "[SEP]"))
    )
    if unknown is None or first is None or last is None:
        raise ModelError(f"{vocabulary.source}: the WordPiece vocabulary must have [UNK], [CLS] and [SEP]")
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=100))
    words = [token for i, token in enumerate(vocabulary.tokens) if vocabulary.types[i] in plain]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=all(token == token.lower() for token in words))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_tokens(vocabulary.added_tokens())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last], pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=[(first, ids[first]), (last, ids[last])],
    )  # fmt: skip
    return tokenizer


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    pre = _pre_tokenizing(vocabulary)
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.array("merges"))]
    tokenizer = _bpe(vocabulary, merges, ignore_merges=pre.ignore_merges)
    normalizer = pre.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _pre_tokenizing(vocabulary: _Vocabulary) -> PreTokenizing:
    name = vocabulary.get("pre")
    if name is None:
        _logger.warning(
            "%s: tokenizer.ggml.pre is missing (an old conversion): words are cut in the default way", vocabulary.source
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{vocabulary.source}: the word pattern tokenizer.ggml.pre = {name!r} is unknown; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Pass tokenizer= with a directory or hub id that has a tokenizer.json"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    runs = vocabulary.rename_runs_of_spaces()
    merges = [*_merges_of_runs(vocabulary, runs), *_merges_by_score(vocabulary)]
    unknown = vocabulary.named().get("unk_token")
    tokenizer = _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = bool(vocabulary.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _merges_of_runs(vocabulary: _Vocabulary, runs: set[int]) -> list[tuple[str, str]]:
    """User-defined runs of spaces come before all else, the longest first."""
    longest = max(runs, default=0)
    parts = [n for n in range(longest, 0, -1) if SPACE * n in vocabulary.ids]
    return [(SPACE * left, SPACE * right) for left in parts for right in parts if left + right in runs]


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first; of one token, the parts with the lowest ids first."""
    scores = vocabulary.array("scores", len(vocabulary.tokens))
    ids, names, types = vocabulary.ids, vocabulary.tokens, vocabulary.types
    made = [i for i in ids.values() if types[i] == NORMAL]
    merges: list[tuple[str, str]] = []
    for token_id in sorted(made, key=lambda i: (-scores[i], i)):
        token = names[token_id]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        if len(found) > 1:
            found.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += found
    return merges


def _bpe(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{vocabulary.source}: the tokenizer's merges do not fit its tokens: {error}") from None


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {key.removeprefix(f"{prefix}."): text for key, text in metadata.items() if key.startswith(f"{prefix}.")}
    if prefix in metadata:
        found["default"] = metadata[prefix]
    return {name: text for name, text in found.items() if isinstance(text, str) and text}


# ---- Mistral's tekken.json

BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"
# files without special_tokens have these
_CONTROL = (
    UNK, BOS, EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[IMG]", PAD, "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
_VERSIONS = ("v3", "v7", "v11", "v13")

_HEAD = """{%- set ns = namespace(first=-1, last=-1, system='') -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}
{%- if ns.first < 0 -%}{%- set ns.first = loop.index0 -%}{%- endif -%}{%- endif -%}
{%- if m.role == 'system' and not TAGGED -%}
{%- set ns.system = ns.system + m.content + '\\n\\n' -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{%- if TAGGED -%}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' -}}{%- endif -%}
{%- elif m.role == 'user' -%}
{%- if tools and loop.index0 == ns.TOOLS_AT -%}
{{- '[AVAILABLE_TOOLS][' -}}
{%- for t in tools -%}
{{- {'type': 'function', 'function': {'name': t.function.name, 'description': t.function.description or '',
    'parameters': t.function.parameters or {}}} | tojson -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
{%- endfor -%}
{{- '][/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST]' -}}{%- if loop.index0 == ns.last -%}{{- ns.system -}}{%- endif -%}{{- m.content + '[/INST]' -}}
{%- elif m.role == 'assistant' -%}
{{- m.content or '' -}}
{%- if m.tool_calls -%}CALLS{%- endif -%}
{{- eos_token -}}
{%- elif m.role == 'tool' -%}
RESULT
{%- endif -%}
{%- endfor -%}"""
_LISTED_CALLS = """{{- '[TOOL_CALLS][' -}}{%- for c in m.tool_calls -%}
{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson -}}
{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- ']' -}}"""
_CALLS = """{%- for c in m.tool_calls -%}
{{- '[TOOL_CALLS]' + c.function.name ID+ '[ARGS]' + (c.function.arguments | tojson) -}}{%- endfor -%}"""
_JSON_RESULT = "{{- '[TOOL_RESULTS]' + ({'content': m.content, 'call_id': m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' -}}"
_RESULT = "{{- '[TOOL_RESULTS]' ID+ m.content + '[/TOOL_RESULTS]' -}}"


def chat_template(version: str) -> str:
    """Return the template of a format: v3, v7, v11 or v13."""
    listed = version in ("v3", "v7")
    calls = _LISTED_CALLS if listed else _CALLS.replace("ID", "+ '[CALL_ID]' + c.id " if version == "v11" else "")
    result = _JSON_RESULT
    if version != "v3":
        result = _RESULT.replace("ID", "" if version == "v13" else "+ m.tool_call_id + '[TOOL_CONTENT]' ")
    text = _HEAD.replace("CALLS", calls, 1).replace("RESULT\n", result + "\n", 1)
    text = text.replace("TAGGED", str(version != "v3").lower())
    return text.replace("TOOLS_AT", "first" if version == "v13" else "last")


def read_tekken(path: Path) -> Tokenizer:
    content = read_object(path)
    if content is None:
        raise ModelError(f"{path}: no such file")
    config = content.get("config")
    if not isinstance(config, Mapping) or not isinstance(content.get("vocab"), list):
        raise ModelError(f"{path}: it is not a tekken.json: it has no config and vocab")
    version = str(config.get("version"))
    if version not in _VERSIONS:
        raise ModelError(
            f"{path}: version must be one of {', '.join(_VERSIONS)}; got {version}. Use the model's tokenizer.json"
        )
    specials = _specials(content, int(config["default_num_special_tokens"]))
    ranked = _ranked(path, content["vocab"], int(config["default_vocab_size"]) - len(specials))
    tokenizer = _library(specials, ranked, str(config["pattern"]))
    named = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNK, "pad_token": PAD}
    named = {name: token for name, token in named.items() if token in specials}
    return Tokenizer(
        LibraryBackend(tokenizer),
        special_tokens=named,
        chat_templates={"default": chat_template(version)},
        init_kwargs={"tokenizer_class": "Tekken", "version": version},
    )


def _specials(content: Mapping[str, Any], count: int) -> list[str]:
    """Return the special tokens by id. Ids without one have a filler."""
    given = content.get("special_tokens")
    names = {int(token["rank"]): str(token["token_str"]) for token in given} if given else dict(enumerate(_CONTROL))
    return [names.get(i, f"<SPECIAL_{i}>") for i in range(count)]


def _ranked(path: Path, vocab: list[Any], count: int) -> list[bytes]:
    """Return the bytes of the tokens by rank."""
    try:
        ranked = [base64.b64decode(token["token_bytes"], validate=True) for token in sorted(vocab, key=lambda t: t["rank"])]
    except (KeyError, TypeError, binascii.Error) as error:
        raise ModelError(f"{path}: its vocab cannot be read ({error!r})") from None
    if len(set(ranked[:count])) != count:
        raise ModelError(f"{path}: its vocab must have {count} different tokens; got {len(set(ranked[:count]))}")
    return ranked[:count]


def _library(specials: list[str], ranked: list[bytes], pattern: str) -> tokenizers.Tokenizer:
    letters = _letters()
    spelled = ["".join(letters[byte] for byte in token) for token in ranked]
    ids = {name: i for i, name in enumerate(specials)} | {name: len(specials) + i for i, name in enumerate(spelled)}
    known = dict(zip(spelled, range(len(spelled)), strict=True))
    merges = []
    for name in spelled:
        # any two tokens that make a third are merged, the third's rank decides when
        pairs = [(name[:i], name[i:]) for i in range(1, len(name)) if name[:i] in known and name[i:] in known]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (known[pair[0]], known[pair[1]]))
        merges += pairs
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), whole])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    if BOS in specials:
        set_ends(tokenizer, [BOS], [])
    return tokenizer


def _letters() -> list[str]:
    """Return the letter of each byte in a byte-level vocabulary: itself where it is visible, else one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (byte for byte in range(256) if byte not in visible)
    return [letter for _, letter in sorted([(b, chr(b)) for b in visible] + [(b, chr(256 + i)) for i, b in enumerate(hidden)])]
