"""Tokenizers out of GGUF metadata, built with the `tokenizers` library.

    tokenizer.ggml.model   gpt2    byte-level BPE with its merges; `pre` names the word pattern
                           llama   SentencePiece BPE: no merges, the score of the merged token decides; byte fallback

Knows nothing of files: metadata is a dict.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from quire.text.backends import LibraryBackend, set_ends
from quire.text.pretokenizers import PRE_TOKENIZERS, PreTokenizing
from quire.text.tokenizer import Tokenizer
from quire.types.errors import ModelError

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
    else:
        raise ModelError(
            f"{source}: the tokenizer kind {kind!r} is not supported (gpt2 and llama are); "
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
        wanted = default if asked is None else asked
        return [self.tokens[token_id]] if wanted and token_id is not None else []

    def named(self) -> dict[str, str]:
        ids = {name: self._id(key) for key, name in NAMED.items()}
        return {name: self.tokens[token_id] for name, token_id in ids.items() if token_id is not None}

    def _id(self, name: str) -> int | None:
        """Some files hold an id that is out of range where they mean "none"."""
        token_id = self.get(f"{name}_token_id")
        return int(token_id) if token_id is not None and 0 <= token_id < len(self.tokens) else None


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
