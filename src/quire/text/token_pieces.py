"""Tokens as bytes: what each token adds to a text, independent of its neighbours.

Nearly every language model's decoder only replaces characters token by token, so a text is the concatenation of its
tokens' bytes, read as UTF-8 (invalid parts become U+FFFD). Two things depend on the place: the first token of a text may
lose the space that SentencePiece put in front of it, and a character may be spread over several tokens.

    "▁Hello" "▁you" "<0xE2>" "<0x82>" "<0xAC>"   ->   b"Hello" b" you" b"\\xe2" b"\\x82" b"\\xac"   ->   "Hello you€"

One deliberate difference from the `tokenizers` library: there, one bad byte turns a whole run of byte tokens into U+FFFD,
so nothing of the run can be returned before it ends; here only the bad bytes do.
This file knows nothing of encoding or of special tokens: the caller says which ids to leave out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
