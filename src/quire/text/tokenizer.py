"""The tokenizer users hold in their hands: text to ids, ids to text, chat templates, special tokens.

The names and meanings are those of Hugging Face's fast tokenizers. Two choices are our own: `skip_special_tokens` is on by
default, and `all_special_ids` are all the ids it leaves out. An id beyond the vocabulary decodes to nothing (models pad
their vocabulary), a negative one is an error. `tokenizer_files.py` reads tokenizers from files.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, overload

from quire.text.backends import TokenBytes, TokenizerBackend, unencodable
from quire.text.chat import ChatTemplates, MediaMarks
from quire.text.partial import SpecialTokens
from quire.types.errors import NotSupported, RequestError

_REPLACED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def clean_up(text: str) -> str:
    for old, new in _REPLACED:
        text = text.replace(old, new)
    return text


class CleanUpStream:
    """The returned parts, joined, are the fed parts, joined and cleaned up.

    Where a replacement falls can depend on a text's very first characters (of `' ' ' '` every second one is replaced), so each
    rule is followed from the beginning on, with its own rest held back: never more than one character less than its pattern.
    """

    def __init__(self) -> None:
        self._held = [""] * len(_REPLACED)  # by each rule: what may be the beginning of its pattern

    def feed(self, text: str) -> str:
        return self._pass(text, last=False)

    def finish(self) -> str:
        return self._pass("", last=True)

    def _pass(self, text: str, last: bool) -> str:
        for i, (old, new) in enumerate(_REPLACED):
            *done, rest = (self._held[i] + text).split(old)
            withheld = 0 if last else next((n for n in range(len(old) - 1, 0, -1) if rest.endswith(old[:n])), 0)
            self._held[i] = rest[len(rest) - withheld :]
            text = new.join([*done, rest[: len(rest) - withheld]])
        return text


MAX_IDS = 2**31

# arguments that transformers' apply_chat_template takes for itself; a template must not get them in silence
_ELSEWHERE = frozenset(
    {"return_tensors", "padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}
)


class Encoded(dict[str, Any]):
    """`input_ids` and `attention_mask`, as keys and as attributes."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class Tokenizer:
    def __init__(
        self,
        backend: TokenizerBackend,
        *,
        special_tokens: Mapping[str, str] | None = None,  # bos_token, eos_token, ... as chat templates know them
        chat_templates: Mapping[str, str] | None = None,
        clean_up_tokenization_spaces: bool = False,
        init_kwargs: Mapping[str, Any] | None = None,  # fields of its files
    ) -> None:
        self._backend = backend
        self.init_kwargs: dict[str, Any] = dict(init_kwargs or {})
        self.special_tokens_map: dict[str, str] = dict(special_tokens or {})
        self._chat = ChatTemplates(chat_templates or {})
        self.cleans_up = clean_up_tokenization_spaces and backend.may_clean_up
        self.vocab_size = backend.size(with_added=False)
        self._size = backend.size(with_added=True)

    # ---- vocabulary

    def __len__(self) -> int:
        """Tokens, added ones included; `vocab_size` is without them."""
        return self._size

    @property
    def special_ids(self) -> frozenset[int]:
        return self._backend.special_ids

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._backend.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [self.token(i) for i in self.all_special_ids]

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.special_tokens_map.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._named_id("unk_token")

    @property
    def token_bytes(self) -> TokenBytes | None:
        """Tokens as bytes; None where a token's text depends on its neighbours."""
        return None if self.cleans_up else self._backend.token_bytes

    @property
    def short(self) -> int:
        """Characters of a text that is tokenized in less than a tenth of a second; 0 if any text may take long."""
        return self._backend.short

    @property
    def tiny(self) -> int:
        """Characters of a text that is tokenized in little more time than a thread takes to begin."""
        return self.short >> 5

    @property
    def characters_per_token(self) -> int | None:
        """Return the maximum; None: it is unknown."""
        return self._backend.characters_per_token

    @property
    def words_apart(self) -> bool:
        """Whether words with a space between them are tokenized independently of each other."""
        return self._backend.words_apart

    @cached_property
    def template(self) -> SpecialTokens:
        """The special tokens of a text and of a pair of texts."""
        return SpecialTokens.of(self._backend)

    def get_vocab(self) -> dict[str, int]:
        return self._backend.vocab()

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; nothing if there is none with this id."""
        return self._backend.token(_checked_id(token_id)) or ""

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Iterable[int], skip_special_tokens: bool = False) -> list[str | None]: ...
    def convert_ids_to_tokens(
        self, ids: int | Iterable[int], skip_special_tokens: bool = False
    ) -> str | list[str | None] | None:
        if isinstance(ids, int):
            return self._backend.token(_checked_id(ids))
        skip = self.special_ids if skip_special_tokens else frozenset()
        return [self._backend.token(i) for i in _checked_ids(ids) if i not in skip]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str] | tuple[str, ...]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str] | tuple[str, ...]) -> int | list[int | None] | None:
        """A token that is not in the vocabulary has the unknown token's id, if there is one."""
        if isinstance(tokens, str):
            found = self._backend.id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    # ---- text to ids, ids to text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise unencodable(text)
        return self._backend.encode(text, add_special_tokens)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        batch = [self.encode(one, add_special_tokens) for one in text]
        return Encoded(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def decode(
        self,
        ids: int | Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """`clean_up_tokenization_spaces`: None does as the tokenizer's files say, which is never for BPE vocabularies."""
        checked = [_checked_id(ids)] if isinstance(ids, int) else _checked_ids(ids)
        text = self._backend.decode(checked, skip_special_tokens, spaces_between_special_tokens)
        cleans_up = self.cleans_up if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        return clean_up(text) if cleans_up else text

    def batch_decode(
        self,
        sequences: Iterable[Iterable[int]],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        flags = (skip_special_tokens, spaces_between_special_tokens, clean_up_tokenization_spaces)
        return [self.decode(ids, *flags) for ids in sequences]

    # ---- chat

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The template, or all of them by name if there are several."""
        return self._chat.source

    @chat_template.setter
    def chat_template(self, template: str | Mapping[str, str] | None) -> None:
        named = {"default": template} if isinstance(template, str) else dict(template or {})
        self._chat = ChatTemplates(named)

    def choose_template(self, asked: str | None, tools: bool) -> str:
        """The template's text, which may be asked for by name."""
        return self._chat.choose(asked, tools)

    @overload
    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: Literal[False], **kwargs: Any
    ) -> str: ...
    @overload
    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: Literal[True] = True, **kwargs: Any
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], tokenize: bool = True, **kwargs: Any
    ) -> str | list[int] | Encoded: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        return_dict: bool = False,
        chat_template_content_format: str = "auto",
        media_marks: MediaMarks | None = None,
        **kwargs: Any,
    ) -> str | list[int] | Encoded:
        """The prompt of a conversation. `chat_template` is a template's text or name; `kwargs` go to the template."""
        for name in _ELSEWHERE & set(kwargs):
            raise NotSupported(f"apply_chat_template has no {name}: it returns a string or a list of ids", name)
        prompt = self._chat.render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            variables={**self.special_tokens_map, **kwargs},
            content_format=chat_template_content_format,
            media=media_marks,
        )
        if not tokenize:
            return prompt
        encoded = self(prompt, add_special_tokens=False)
        return encoded if return_dict else list(encoded.input_ids)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self._backend.id(token)


def _checked_ids(ids: Iterable[int]) -> list[int]:
    try:
        checked = [operator.index(i) for i in ids]
    except TypeError:
        raise RequestError(f"token ids must be integers, got {ids!r:.100}") from None
    if checked and not 0 <= min(checked) <= max(checked) < MAX_IDS:
        bad = next(i for i in checked if not 0 <= i < MAX_IDS)
        raise RequestError(f"token ids must be at least 0 and less than {MAX_IDS}, got {bad}")
    return checked


def _checked_id(token_id: int) -> int:
    return _checked_ids([token_id])[0]
