"""Prompts as users give them, the prepared prompt, and extras that travel with a request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from quire.types.adapter import AdapterRef
from quire.types.media import MediaItem
from quire.types.pooling import Pooling


class _PromptFields(TypedDict):
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any] | None]  # modality -> one or a list of images or videos
    multi_modal_uuids: NotRequired[Mapping[str, Any] | None]  # modality -> one or a list of names
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


class TextPrompt(_PromptFields):
    prompt: str


class TokensPrompt(_PromptFields):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True)
class Extras:
    """Fields of a request besides tokens and sampling parameters, from the prompt to the rows of the device.

    `Prompt`, `EngineRequest` and `Admission` have it as a whole, so a new field needs no other changes.
    """

    adapter_slot: int = 0  # device slot of the LoRA adapter; set in an `Admission`, from `lora`; 0: none
    pooling: Pooling | None = None  # pool the prompt's hidden states, and sample no token
    lora: AdapterRef | None = None  # the LoRA adapter; `adapter_slot` is its slot, known when it is on the device
    lora_name: str = ""  # the user's name of it
    unpooled: int = 0  # tokens at the beginning that are left out of the mean
    unattended: int = 0  # tokens at the end that no token attends to
    skipped: tuple[int, ...] = ()  # token ids that have no vector where each token has one
    media: tuple[MediaItem, ...] = ()  # images and videos, by rising position
    segment: int = 0  # of a pair of texts: position of the first token with segment id 1; 0 = all tokens have segment id 0

    @property
    def features(self) -> tuple[str, ...]:
        """Return the features whose device half the request requires."""
        return (*(("lora",) if self.adapter_slot else ()), *(("pooling",) if self.pooling is not None else ()))


NO_EXTRAS = Extras()


@dataclass(frozen=True)
class Prompt:
    text: str | None  # of the user or the template; None: token ids were given, or it was truncated
    ids: list[int]
    cache_salt: str | None = None  # cached pages are shared only among prompts with the same one
    extras: Extras = NO_EXTRAS
