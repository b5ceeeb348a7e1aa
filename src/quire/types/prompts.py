"""The forms in which a prompt may be given, and the one that it has from there on."""

from dataclasses import dataclass
from typing import NotRequired, TypedDict

from quire.types.extras import NO_EXTRAS, Extras


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True)
class Prompt:
    text: str | None  # as the user or the template wrote it; None: it came as token ids, or was cut
    ids: list[int]
    cache_salt: str | None = None  # cached pages are shared only among prompts with the same one
    extras: Extras = NO_EXTRAS
