"""The forms in which a prompt may be given, the one that it has from there on, and what comes with it."""

from dataclasses import dataclass
from typing import NotRequired, TypedDict

from quire.types.adapter import AdapterRef
from quire.types.pooling import Pooling


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True)
class Extras:
    """What a request brings along beside tokens and sampling parameters, from where its prompt is read to the rows of the
    device: `Prompt`, `EngineRequest` and `Admission` carry it as a whole, so that a field here travels by itself."""

    adapter: int = 0  # on the device: the place of the adapter that its tokens run with; 0 = none
    pooling: Pooling | None = None  # its prompt's hidden states are pooled, and no token is drawn
    lora: AdapterRef | None = None  # the adapter itself; its place is known when it is on the device
    lora_name: str = ""  # as users call it
    segment: int = 0  # of a pair of texts: position of the first token with segment id 1; 0 = all tokens have segment id 0

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features without whose device half the request must not run."""
        return (*(("lora",) if self.adapter else ()), *(("pooling",) if self.pooling is not None else ()))


NO_EXTRAS = Extras()


@dataclass(frozen=True)
class Prompt:
    text: str | None  # as the user or the template wrote it; None: it came as token ids, or was cut
    ids: list[int]
    cache_salt: str | None = None  # cached pages are shared only among prompts with the same one
    extras: Extras = NO_EXTRAS
