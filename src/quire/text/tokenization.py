"""tokenization_kwargs: how one call's prompts become tokens, in the words of Hugging Face's tokenizers and vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from quire.text.tokenizer import Tokenizer
from quire.types.errors import InvalidParameter, NotSupported

FIELD = "tokenization_kwargs"
_TRUNCATIONS = (True, False, None, "longest_first", "only_first", "do_not_truncate")
_PADDINGS = (False, None, "do_not_pad")


@dataclass(frozen=True)
class Tokenization:
    """`truncation` with `max_length`, or `truncate_prompt_tokens` (-1: as many as the model can take), cut a long prompt.

    Special tokens around it stay. What is cut off stands at the end, and at the beginning for `truncate_prompt_tokens`, unless
    `truncation_side` says otherwise.
    """

    add_special_tokens: bool = True
    truncation: bool | str | None = None
    max_length: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    do_lower_case: bool = False
    padding: bool | str | None = False

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, add_special_tokens: bool = True) -> "Tokenization":
        values = {"add_special_tokens": add_special_tokens, **(given or {})}
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise NotSupported(f"{FIELD} has no {name!r}; it has {', '.join(known)}", FIELD)
        made = cls(**values)
        made._check()
        return made

    def _check(self) -> None:
        for name in ("add_special_tokens", "do_lower_case"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{FIELD}.{name} must be true or false, got {getattr(self, name)!r}", FIELD)
        for name, least in (("max_length", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least or value == 0):
                raise InvalidParameter(f"{FIELD}.{name} must be a number of tokens, got {value!r}", FIELD)
        for name, values in (
            ("truncation", _TRUNCATIONS), ("padding", _PADDINGS), ("truncation_side", (None, "left", "right")),
        ):  # fmt: skip
            if getattr(self, name) not in values:
                told = ", ".join(map(repr, values))
                raise InvalidParameter(f"{FIELD}.{name} must be one of {told}, got {getattr(self, name)!r}", FIELD)
        if self.max_length is not None and not self._truncates:
            raise InvalidParameter(f"{FIELD}.max_length needs truncation=True", FIELD)

    @property
    def _truncates(self) -> bool:
        return self.truncation not in (None, False, "do_not_truncate")

    def apply(self, tokenizer: Tokenizer, text: str, longest: int) -> list[int]:
        """The tokens of a text. `longest`: as many as the model can take."""
        text = text.lower() if self.do_lower_case else text
        whole = tokenizer.encode(text, self.add_special_tokens)
        bare = tokenizer.encode(text, add_special_tokens=False) if self.add_special_tokens else whole
        for i in range(len(whole) - len(bare) + 1):
            if whole[i : i + len(bare)] == bare:
                return self.cut(bare, whole[:i], whole[i + len(bare) :], longest=longest)
        return self.cut(whole, longest=longest)

    def cut(self, ids: list[int], before: Sequence[int] = (), after: Sequence[int] = (), *, longest: int) -> list[int]:
        """What is left of the tokens between those before and after."""
        keep, side = self._bound(longest)
        if keep is not None:
            room = max(0, keep - len(before) - len(after))
            if len(ids) > room:
                ids = ids[:room] if side == "right" else ids[len(ids) - room :]
        return [*before, *ids, *after]

    def _bound(self, longest: int) -> tuple[int | None, str]:
        if self.truncate_prompt_tokens is not None:
            keep = longest if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
            return keep, self.truncation_side or "left"
        if self._truncates:
            return (longest if self.max_length is None else self.max_length), self.truncation_side or "right"
        return None, ""
