"""Encoding and decoding with the `tokenizers` library, or with a `transformers` class where the library cannot do it.

Files, chat templates and named special tokens belong to `Tokenizer`. `most_characters` bounds the characters of one token, so
a text too long for the context is refused without being tokenized.

Most decoders replace characters token by token. A text is then the concatenation of its tokens' bytes (`TokenBytes`), read as
UTF-8; invalid parts become U+FFFD. Two things depend on the position: the first token of a text may lose the space that
SentencePiece put in front of it, and a character may be spread over several tokens.

    "▁Hello" "▁you" "<0xE2>" "<0x82>" "<0xAC>"   ->   b"Hello" b" you" b"\xe2" b"\x82" b"\xac"   ->   "Hello you€"

The `tokenizers` library differs: one bad byte turns a whole run of byte tokens into U+FFFD, so nothing of the run could be
returned before it ends. Here only the bad bytes become U+FFFD.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol, cast

import tokenizers
from tokenizers import models
from tokenizers.processors import TemplateProcessing

from quire.files.reading import error_summary
from quire.text.partial import stages, tokenizes_words_apart
from quire.text.regex_cost import growth_of, is_cheap, patterns_of
from quire.types.errors import ModelError, RequestError

# ---- tokens as bytes

LONGEST_CHARACTER = 4  # bytes of UTF-8


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 characters are themselves, the other bytes count up from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_level_alphabet()
_BYTES = str.maketrans({chr(i): "\uffff" for i in range(256)} | {character: chr(byte) for character, byte in BYTE_OF.items()})


@dataclass(frozen=True)
class PieceForm:
    """How a token's name is turned into bytes."""

    byte_level: bool = False  # every character stands for one byte
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False  # "<0xE2>" is the byte 0xE2
    first_without: str = ""  # this character is left out of the first token
    strip_first: bool = False  # one leading space is left out of the first token

    def spell(self, token: str, first: bool = False) -> bytes:
        if self.byte_level:
            try:
                return token.translate(_BYTES).encode("latin-1")
            except UnicodeEncodeError:  # an added token, spelled as it is
                return token.encode()
        return self._spell_replaced(token, first)

    def _spell_replaced(self, token: str, first: bool) -> bytes:
        if first and self.first_without:
            token = token.replace(self.first_without, "")
        for old, new in self.replace:
            token = token.replace(old, new)
        raw = self._fallback_byte(token)
        if raw is None:
            raw = token.encode()
        return raw.removeprefix(b" ") if first and self.strip_first else raw

    def _fallback_byte(self, token: str) -> bytes | None:
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                return None
        return None


def read_form(decoder: Mapping[str, Any]) -> PieceForm | None:
    """The form of a `tokenizers` decoder in its JSON spelling; None if its tokens depend on their neighbours."""
    stages = list(_flatten(decoder))
    kinds = [stage["type"] for stage in stages]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return PieceForm(byte_level=True)
    replace: list[tuple[str, str]] = []
    first_without, strip_first = "", False
    for i, stage in enumerate(stages):
        kind, before = stage["type"], set(kinds[:i])
        if kind == "Replace" and "String" in stage["pattern"] and not before & {"ByteFallback", "Fuse"}:
            replace.append((stage["pattern"]["String"], stage["content"]))
        elif kind == "Metaspace" and not before:
            replace.append((stage["replacement"], " "))
            first_without = stage["replacement"] if stage.get("prepend_scheme", "always") != "never" else ""
        elif kind == "Strip" and "Fuse" in before and (stage["content"], stage["start"], stage["stop"]) == (" ", 1, 0):
            strip_first = True
        elif kind not in ("ByteFallback", "Fuse"):
            return None
    return PieceForm(False, tuple(replace), "ByteFallback" in kinds, first_without, strip_first)


def _flatten(decoder: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for part in decoder["decoders"]:
        yield from _flatten(part)


class TokenBytes:
    """The bytes of every token of one vocabulary, spelled out when first asked for. An id without a token adds nothing."""

    def __init__(self, form: PieceForm, token: Callable[[int], str | None]) -> None:
        self._form = form
        self._token = token
        self._later = _Spellings(form, token)

    def first(self, token_id: int) -> bytes:
        """What the token adds at the start of a text."""
        return self._form.spell(self._token(token_id) or "", first=True)

    def spell_all(self, count: int) -> list[bytes]:
        """What each of the first `count` tokens adds within a text. Nothing of it is kept here."""
        return [self._form.spell(self._token(i) or "") for i in range(count)]

    def join(self, ids: Iterable[int], started: bool) -> tuple[bytes, bool]:
        """The bytes of `ids`, and whether the text has started after them."""
        later = self._later
        if started:
            return b"".join([later[i] for i in ids]), True
        rest = iter(ids)
        for token_id in rest:
            if later[token_id]:
                return self.first(token_id) + b"".join([later[i] for i in rest]), True
        return b"", False

    def decode(self, ids: Iterable[int], skip: frozenset[int]) -> str:
        return self.join((i for i in ids if i not in skip), started=False)[0].decode("utf-8", "replace")

    def context(self, ids: Sequence[int], skip: frozenset[int]) -> tuple[bytes, bool]:
        """The last bytes of a text (enough to hold the start of an unfinished character), and whether it has started."""
        tail = b""
        started = False
        for token_id in reversed(ids):
            if token_id not in skip and (piece := self._later[token_id]):
                started = True
                tail = piece + tail
                if len(tail) >= LONGEST_CHARACTER:
                    break
        return tail[-LONGEST_CHARACTER:], started


class _Spellings(dict[int, bytes]):
    def __init__(self, form: PieceForm, token: Callable[[int], str | None]) -> None:
        super().__init__()
        self._form = form
        self._token = token

    def __missing__(self, token_id: int) -> bytes:
        token = self._token(int(token_id))
        spelled = b"" if token is None else self._form.spell(token)
        self[token_id] = spelled
        return spelled


# ---- backends

SHORT_CHARS = 1 << 15
SHORT_GROWTH = 64  # a text of SHORT_CHARS that becomes longer than this is not short


class TokenizerBackend(Protocol):
    @property
    def special_ids(self) -> frozenset[int]: ...  # what skip_special_tokens leaves out
    @property
    def token_bytes(self) -> TokenBytes | None: ...  # None: tokens depend on their neighbours
    @property
    def may_clean_up(self) -> bool: ...  # clean_up_tokenization_spaces was made for this kind of vocabulary
    @property
    def short(self) -> int: ...  # characters that are tokenized in less than a tenth of a second; 0: any text may take long
    @property
    def characters_per_token(self) -> int | None: ...  # at most; None: it cannot be said
    @property
    def words_apart(self) -> bool: ...  # words with a space between them are tokenized independently of each other
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]: ...  # token ids, segment ids
    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str: ...
    def token(self, token_id: int) -> str | None: ...
    def id(self, token: str) -> int | None: ...
    def vocab(self) -> dict[str, int]: ...
    def size(self, with_added: bool) -> int: ...


class LibraryBackend:
    """A `tokenizers.Tokenizer`. Its vocabulary must not change any more."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        form = None if tokenizer.decoder is None else read_form(json.loads(tokenizer.decoder.__getstate__()))
        self.token_bytes = None if form is None else TokenBytes(form, self.token)
        self.may_clean_up = not isinstance(tokenizer.model, tokenizers.models.BPE)
        self.short = SHORT_CHARS if _takes_linear_time(tokenizer) else 0

    @cached_property
    def characters_per_token(self) -> int | None:
        return most_characters(self._tokenizer)

    @cached_property
    def words_apart(self) -> bool:
        return tokenizes_words_apart(self._tokenizer)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        encoded = self._tokenizer.encode(first, second)
        return encoded.ids, encoded.type_ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # unlike encode, this lets other threads run meanwhile
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise unencodable(text) from None
        except BaseException as error:
            if not is_panic(error):
                raise
            raise RequestError(f"the model's tokenizer cannot tokenize the text ({error_summary(error)})", "prompt") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
        if self.token_bytes is not None:
            return self.token_bytes.decode(ids, self.special_ids if skip_special_tokens else frozenset())
        tokens = self._tokens(ids, skip_special_tokens, spaces_between_special_tokens)
        decoder = self._tokenizer.decoder
        try:
            return " ".join(tokens) if decoder is None else decoder.decode(tokens)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise RequestError(f"the model's tokenizer cannot decode the tokens ({error_summary(error)})") from None

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def size(self, with_added: bool) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=with_added)

    def _tokens(self, ids: Iterable[int], skip_special: bool, spaces_between: bool) -> list[str]:
        """Without `spaces_between`, a run of added tokens is one token to the decoder, so nothing comes between them."""
        tokens: list[str] = []
        joins = False
        for token_id in ids:
            token = self.token(token_id)
            if token is None or (skip_special and token_id in self.special_ids):
                continue
            added = token_id in self._added
            if joins and added:
                tokens[-1] += token
            else:
                tokens.append(token)
            joins = added and not spaces_between
        return tokens


class TransformersBackend:
    """A tokenizer written in Python. Its `decode` is taken as it is, except that ids without a token decode to nothing."""

    short = 1 << 11
    token_bytes = None
    characters_per_token = None
    words_apart = False
    may_clean_up = False  # it cleans up by itself

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(added | set(tokenizer.all_special_ids))

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        encoded = self._tokenizer(first, second, return_token_type_ids=True)
        return list(encoded["input_ids"]), list(encoded["token_type_ids"])

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
        known = [i for i in ids if i < self._size]
        text = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=spaces_between_special_tokens
        )
        return cast(str, text)

    def token(self, token_id: int) -> str | None:
        return cast(str, self._tokenizer.convert_ids_to_tokens(token_id)) if token_id < self._size else None

    def id(self, token: str) -> int | None:
        return self.vocab().get(token)

    def vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def size(self, with_added: bool) -> int:
        return self._size if with_added else int(self._tokenizer.vocab_size)


def is_panic(error: BaseException) -> bool:
    """Return whether Rust code of the library has panicked. That is no Exception: PyO3 derives it from BaseException."""
    return type(error).__module__ == "pyo3_runtime"


def _takes_linear_time(tokenizer: tokenizers.Tokenizer) -> bool:
    parts = [part for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None]
    stages = [json.loads(part.__getstate__()) for part in parts]
    cheap = all(is_cheap(expression) for stage in stages for expression in patterns_of(stage))
    return cheap and prod(map(growth_of, stages)) <= SHORT_GROWTH


def set_ends(tokenizer: tokenizers.Tokenizer, start: list[str], end: list[str]) -> None:
    """Put these tokens around every encoded text."""
    ids = [(token, tokenizer.token_to_id(token)) for token in {*start, *end}]
    missing = [token for token, token_id in ids if token_id is None]
    if missing:
        raise ModelError(f"the tokenizer is configured to add {missing} to every text, but its vocabulary has no such token")
    tokenizer.post_processor = TemplateProcessing(
        single=[*start, "$A", *end], pair=[*start, "$A", "$B", *end], special_tokens=ids
    )


def unencodable(text: Any, parameter: str = "prompt") -> RequestError:
    if not isinstance(text, str):
        return RequestError(f"only a string can be tokenized, got {type(text).__name__}", parameter)
    return RequestError("the text is not valid Unicode: it has a lone surrogate (half of a UTF-16 pair)", parameter)


# ---- characters per token

COMPOSED = 4  # characters that may become one when they are composed

# stages that leave nothing out, and make as many characters of a text as it has, or more
_NORMALIZERS = {"ByteLevel", "Lowercase", "NFD", "NFKD", "Prepend"}
_PRE_TOKENIZERS = {"ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts"}


def most_characters(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Of one token. None: there may be tokens for any number of them, or text without tokens."""
    before = list(stages(tokenizer.pre_tokenizer, "pretokenizers"))
    first = list(stages(tokenizer.normalizer, "normalizers"))
    if not _spells_all(tokenizer, {stage["type"] for stage in (*first, *before)}):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None  # spaces around such a token are part of it, however many they are
    if not all(_keeps_parts(stage) for stage in before) or not all(_keeps_characters(stage) for stage in first):
        return None
    composes = any(stage["type"] in ("NFC", "NFKC") for stage in first)
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return longest * (COMPOSED if composes else 1)


def _spells_all(tokenizer: tokenizers.Tokenizer, stages: set[str]) -> bool:
    """Has every character tokens of its own? Unknown ones may be left out, or be one token together."""
    model = tokenizer.model
    if isinstance(model, models.BPE):
        unknown = model.unk_token is not None and not model.fuse_unk
        return unknown or bool(model.byte_fallback) or "ByteLevel" in stages
    return isinstance(model, models.Unigram) and bool(getattr(model, "byte_fallback", False))


def _keeps_parts(stage: Mapping[str, Any]) -> bool:
    if stage["type"] in ("Split", "Punctuation"):
        return bool(stage.get("behavior") != "Removed")
    return stage["type"] in _PRE_TOKENIZERS


def _keeps_characters(stage: Mapping[str, Any]) -> bool:
    if stage["type"] == "Replace":
        old = stage["pattern"].get("String")
        return old is not None and len(stage["content"]) >= len(old)
    return stage["type"] in _NORMALIZERS or stage["type"] in ("NFC", "NFKC")
