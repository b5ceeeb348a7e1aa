"""Logprobs in their two shapes on the wire: four parallel lists (completions), a list of objects (chat)."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar, cast, overload

from quire.serve.protocol import ChatLogprobs, ChatToken, CompletionLogprobs, TokenChance
from quire.text.detokenizer import new_detokenizer
from quire.text.pacing import LazyList
from quire.text.tokenizer import Tokenizer
from quire.types.outputs import Logprob, TokenLogprobs
from quire.types.sampling import SamplingParams

FEW = 128  # positions, choices or the like that are made at once
T = TypeVar("T")
LEAST = -9999.0  # JSON has no minus infinity

Positions = Sequence[TokenLogprobs | None]


class TokenNames:
    """Tokens as they are shown: as text with their bytes, or as token_id:N.

    The text of a token that is part of a character is what its place makes of it (`text/detokenizer.py`).
    """

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def name(self, token: int, chance: Logprob | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        try:
            return self._raw(token).decode()
        except UnicodeDecodeError:
            return "" if chance is None else chance.decoded_token or ""

    def spelling(self, token: int) -> list[int] | None:
        """Characters may be spread over tokens: these bytes can be joined, their texts cannot."""
        return None if self._tokenizer is None else list(self._raw(token))

    def _raw(self, token: int) -> bytes:
        assert self._tokenizer is not None
        token_bytes = self._tokenizer.token_bytes
        if token_bytes is not None:
            return token_bytes.join([token], started=True)[0]
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


class TextOffsets:
    """Where each token's text begins in the text of its choice. Tokens of one character share its place.

    `prompt` stands before the text. `echoed` is its first part, and is shown with special tokens or without.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        params: SamplingParams,
        echoed: Sequence[int] = (),
        skip_echoed: bool = False,
    ) -> None:
        self._length = 0
        self._read = 0
        self._echo, self._rest = None, None
        self._echoed = len(echoed)
        if tokenizer is not None:
            skip, spaces = params.skip_special_tokens, params.spaces_between_special_tokens
            self._echo = new_detokenizer(tokenizer, (), skip_echoed, spaces) if echoed else None
            self._rest = new_detokenizer(tokenizer, prompt or echoed, skip, spaces)

    def next(self, token: int) -> int:
        offset = self._length
        detokenizer = self._echo if self._read < self._echoed else self._rest
        self._read += 1
        if detokenizer is not None:
            self._length += len(detokenizer.feed([token]))
        return offset


def completion_logprobs(
    tokens: Sequence[int], positions: Positions, names: TokenNames, offsets: TextOffsets
) -> CompletionLogprobs:
    """`positions` may lack the first token's (nothing comes before a prompt). Many of them are made when they are written."""
    if len(tokens) > FEW:
        assert len(tokens) == len(positions)
        late: Any = {
            "text_offset": LazyList(map(offsets.next, tokens)),
            "token_logprobs": LazyList(
                None if chances is None else _finite(chances[token].logprob)
                for token, chances in zip(tokens, positions, strict=True)
            ),
            "tokens": LazyList(
                names.name(token, None if chances is None else chances[token])
                for token, chances in zip(tokens, positions, strict=True)
            ),
            "top_logprobs": LazyList(None if chances is None else _by_name(chances, names) for chances in positions),
        }
        return cast(CompletionLogprobs, late)
    out: CompletionLogprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, chances in zip(tokens, positions, strict=True):
        out["text_offset"].append(offsets.next(token))
        out["tokens"].append(names.name(token, None if chances is None else chances[token]))
        out["token_logprobs"].append(None if chances is None else _finite(chances[token].logprob))
        out["top_logprobs"].append(None if chances is None else _by_name(chances, names))
    return out


def chat_logprobs(tokens: Sequence[int], positions: Positions, names: TokenNames, top: int) -> ChatLogprobs:
    """`top` of the likeliest alternatives each, likeliest first; -1: all."""
    content = (token_logprobs(token, chances, names, top) for token, chances in zip(tokens, positions, strict=True))
    return {"content": few(content, len(tokens))}


def token_logprobs(token: int, chances: TokenLogprobs | None, names: TokenNames, top: int) -> ChatToken:
    assert chances is not None
    likeliest = sorted(chances.items(), key=_rank)
    shown = [_chance(names, other, chance) for other, chance in (likeliest if top == -1 else likeliest[:top])]
    return {**_chance(names, token, chances[token]), "top_logprobs": shown}


def prompt_logprobs(positions: Positions | None) -> list[dict[str, Any] | None] | None:
    if positions is None:
        return None
    shown = (
        None if chances is None else {str(token): _entry(chance) for token, chance in chances.items()} for chances in positions
    )
    return few(shown, len(positions))


def few(values: Iterable[T], count: int) -> list[T]:
    """A list of values that are costly to make; of many, one that is made when it is written."""
    return list(values) if count <= FEW else cast(list[T], LazyList(values))


class Joined(Sequence[TokenLogprobs | None]):
    """Two tables, one after the other, without copying either."""

    def __init__(self, first: Positions, second: Positions) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> Positions: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | Positions | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._first[index] if index < len(self._first) else self._second[index - len(self._first)]

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        return chain(self._first, self._second)


def _by_name(chances: TokenLogprobs, names: TokenNames) -> dict[str, float]:
    """Tokens that are parts of characters may have one name; the chosen token, which is the first, keeps its own."""
    out: dict[str, float] = {}
    for token, chance in chances.items():
        out.setdefault(names.name(token, chance), _finite(chance.logprob))
    return out


def _entry(chance: Logprob) -> dict[str, Any]:
    return {"logprob": _finite(chance.logprob), "rank": chance.rank, "decoded_token": chance.decoded_token}


def _chance(names: TokenNames, token: int, chance: Logprob) -> TokenChance:
    return {"token": names.name(token, chance), "logprob": _finite(chance.logprob), "bytes": names.spelling(token)}


def _rank(item: tuple[int, Logprob]) -> float:
    return -item[1].logprob


def _finite(value: float) -> float:
    return max(value, LEAST)
