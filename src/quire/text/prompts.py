"""Read prompts of any kind, offline and served: tokenize them and check their length.

The result is a `Prompt`. With an event loop, texts are processed in `text/offload.py`. `Tokenization` is how prompts of one
call are tokenized (tokenization_kwargs), with the names of Hugging Face and vLLM.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from quire.text.chat import MediaMarks
from quire.text.partial import encode_end
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import AdapterTokenizers
from quire.text.tool_prompt import render_described, wants_words
from quire.text.workers.wire import ALL, MAX_RENDERED, Cut
from quire.types.adapter import AdapterRef
from quire.types.checks import shown
from quire.types.errors import InvalidParameter, NotSupported, PromptTooLong, RequestError
from quire.types.prompts import NO_EXTRAS, Extras, Prompt

FIELD = "tokenization_kwargs"
_TRUNCATIONS = (True, False, None, "longest_first", "only_first", "do_not_truncate")
_PADDINGS = (False, None, "do_not_pad")


@dataclass(frozen=True)
class Tokenization:
    """`truncation` with `max_length`, or `truncate_prompt_tokens` (-1: as many as the model can take), cut a long prompt.

    Special tokens around it stay. What is cut off stands at the end, and at the beginning for `truncate_prompt_tokens`, unless
    `truncation_side` is given.
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
                allowed = ", ".join(map(repr, values))
                raise InvalidParameter(f"{FIELD}.{name} must be one of {allowed}, got {getattr(self, name)!r}", FIELD)
        if self.max_length is not None and not self._truncates:
            raise InvalidParameter(f"{FIELD}.max_length needs truncation=True", FIELD)

    @property
    def _truncates(self) -> bool:
        return self.truncation not in (None, False, "do_not_truncate")

    def apply(self, tokenizer: Tokenizer, text: str, longest: int) -> list[int]:
        """The tokens of a text. `longest`: as many as the model can take."""
        text = text.lower() if self.do_lower_case else text
        keep, side = self._bound(longest)
        if keep is not None:
            end = encode_end(tokenizer, text, self.add_special_tokens, keep, side == "right")
            if end is not None:
                return end
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


if TYPE_CHECKING:
    from quire.text.offload import TextOffload

_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation becomes a prompt offline: LLM.chat's own names."""

    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tokenization_kwargs: Mapping[str, Any] | None = None
    media: MediaMarks | None = None  # how images and videos are written for templates that take strings


def check_keys(prompt: Mapping[str, Any]) -> None:
    """Raise an error for keys of a prompt that are not known. Those of images and videos are taken out before."""
    if unknown := sorted(map(str, set(prompt) - _KEYS)):
        raise InvalidParameter(
            f"a prompt dict has no {unknown[0]!r:.80}; it has prompt, prompt_token_ids, cache_salt, multi_modal_data, "
            "multi_modal_uuids, mm_processor_kwargs and media_io_kwargs",
            "prompt",
        )


class PromptReader:
    """Turn prompts of any form into token ids. `max_model_len` may change when an engine has measured its cache."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        offload: "TextOffload | None" = None,
        tokenizers: AdapterTokenizers | None = None,
    ) -> None:
        """tokenizers: the tokenizers of adapters that have their own; None: all use `tokenizer`"""
        self.tokenizer, self.vocab_size, self.max_model_len = tokenizer, vocab_size, max_model_len
        self._offload, self._tokenizers = offload, tokenizers

    def of(self, extras: Extras) -> "PromptReader":
        """Return the reader for this adapter's vocabulary. It may read files."""
        lora = extras.lora
        if lora is None or not lora.added or self._tokenizers is None:
            return self
        tokenizer, offload = self._tokenizers.of(lora), self._offload
        if offload is not None and tokenizer is not None and tokenizer is not self.tokenizer:
            offload = offload.for_tokenizer(tokenizer)
        return PromptReader(tokenizer, self.vocab_size + lora.added, self.max_model_len, offload)

    def open_tokenizer(self, lora: AdapterRef) -> Tokenizer | None:
        """Open the adapter's tokenizer for later requests; raise what is wrong with it."""
        return self.tokenizer if self._tokenizers is None else self._tokenizers.of(lora)

    # ---- reading

    def read(self, prompt: Any, how: Tokenization | None = None, extras: Extras = NO_EXTRAS) -> Prompt:
        """A user's prompt in any form (`PromptType`). `how` is asked for by tokenization_kwargs; a `Prompt` may have extras."""
        if isinstance(prompt, Prompt):
            return prompt if extras == NO_EXTRAS else replace(prompt, extras=replace(extras, media=prompt.extras.media))
        if isinstance(prompt, str):
            return Prompt(prompt, self._encode(prompt, how), None, extras)
        return self._read_parts(prompt, how, extras)

    def _read_parts(self, prompt: Any, how: Tokenization | None, extras: Extras) -> Prompt:
        """Of a dict or of token ids."""
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        check_keys(given)
        salt = given.get("cache_salt")
        if "prompt_token_ids" in given:
            return Prompt(given.get("prompt"), self._cut_ids(_checked_ids(given["prompt_token_ids"]), how), salt, extras)
        content = given.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(content, str):
            return Prompt(content, self._encode(content, how), salt, extras)
        if isinstance(content, Sequence):
            return Prompt(None, self._cut_ids(_checked_ids(content), how), salt, extras)
        raise InvalidParameter(
            "a prompt is a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids', "
            f"not {type(content).__name__}",
            "prompt",
        )

    def read_chats(self, conversations: Iterable[Sequence[Mapping[str, Any]]], options: ChatOptions) -> list[Prompt]:
        """Where the template has no place for tools, they are described in words, as the server does."""
        assert self.tokenizer is not None
        how = Tokenization.of(options.tokenization_kwargs, add_special_tokens=False)
        render = partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            chat_template=options.chat_template,
            chat_template_content_format=options.chat_template_content_format,
            media_marks=options.media,
            **(options.chat_template_kwargs or {}),
        )
        described = options.chat_template is None and wants_words(self.tokenizer.chat_template)
        texts = (
            render_described(render, one, options.tools) if described else render(one, tools=options.tools)
            for one in conversations
        )
        return [self.read(text, how) for text in texts]

    async def encode(self, text: str, add_special_tokens: bool, cut: Cut, parameter: str) -> Prompt:
        """Tokenize a text without blocking the event loop."""
        assert self._offload is not None
        count, ids = await self._offload.encode(text, add_special_tokens, cut)
        return self._read_offloaded(text, count, ids, cut, parameter)

    async def encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenize a whole text without blocking the event loop."""
        return (await self.encode(text, add_special_tokens, ALL, "prompt")).ids

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert self._offload is not None
        return await self._offload.decode(ids, skip_special_tokens)

    async def render(self, messages: Sequence[Mapping[str, Any]], cut: Cut, **options: Any) -> Prompt:
        """Render a conversation without blocking the event loop. The options are those of `TextOffload.render`."""
        assert self._offload is not None
        most = MAX_RENDERED if cut.keep is not None else self.most_characters
        text, count, ids = await self._offload.render(messages, cut=cut, most=most, **options)
        return self._read_offloaded(text, count, ids, cut, "messages")

    def _read_offloaded(self, text: str, count: int, ids: list[int] | None, cut: Cut, parameter: str) -> Prompt:
        if ids is None:
            if cut.most > self.max_model_len:
                raise PromptTooLong(f"{parameter} may have at most {cut.most} tokens, got {count}", parameter)
            raise self._too_long(count, None, parameter)
        return Prompt(text if len(ids) == count else None, ids)

    def _encode(self, text: str, how: Tokenization | None) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer (skip_tokenizer_init): give token ids as the prompt", "prompt")
        return self.tokenizer.encode(text) if how is None else how.apply(self.tokenizer, text, self.max_model_len - 1)

    def _cut_ids(self, ids: list[int], how: Tokenization | None) -> list[int]:
        return ids if how is None else how.cut(ids, longest=self.max_model_len - 1)

    # ---- how long

    def check(self, prompt: Prompt, answered: bool = True) -> tuple[int, ...]:
        """Return the prompt's tokens. Raise what the model cannot be given. answered: there must be room for an answer."""
        ids, salt = prompt.ids, prompt.cache_salt
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise InvalidParameter("cache_salt must be a non-empty string", "cache_salt")
        if not ids:
            raise InvalidParameter("the prompt is empty: give at least one token", "prompt")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = shown(next(i for i in ids if not 0 <= i < self.vocab_size))
            raise InvalidParameter(f"token id {bad} is out of vocabulary: ids go from 0 to {self.vocab_size - 1}", "prompt")
        if answered:
            self.room(len(ids))
        elif len(ids) > self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, and this model's maximum context length is {self.max_model_len}. Shorten "
                "it, or set truncate_prompt_tokens",
                "prompt",
            )
        return tuple(ids)

    def room(self, tokens: int, asked: int | None = None, parameter: str = "prompt", asked_by: str = "max_tokens") -> int:
        """How many tokens an answer to a prompt of this length can have; at least one, and as many as are `asked` for.

        The parameters are those that errors name: of the prompt, and of the length of the answer.
        """
        room = self.max_model_len - tokens
        if room < 1 or room < (asked or 1):
            raise self._too_long(tokens, asked, parameter if room < 1 else asked_by)
        return room

    def cut(self, keep: int | None, right: bool = False, asked: int | None = None) -> Cut:
        """Return the cut of a prompt: truncate_prompt_tokens, or all tokens if they fit. -1: as many as fit, with an answer
        as long as is asked for."""
        if keep is None:
            return Cut(self.max_model_len)
        if keep == 0:
            raise InvalidParameter("truncate_prompt_tokens=0 leaves nothing of the prompt", "truncate_prompt_tokens")
        if keep > self.max_model_len:
            raise InvalidParameter(
                f"truncate_prompt_tokens={keep} is more than the model's context of {self.max_model_len} tokens",
                "truncate_prompt_tokens",
            )
        return Cut(self.max_model_len, max(1, self.max_model_len - max(1, asked or 0)) if keep == -1 else keep, right)

    @property
    def most_characters(self) -> int:
        """Of a prompt that fits."""
        longest = None if self.tokenizer is None else self.tokenizer.characters_per_token
        return MAX_RENDERED if longest is None else self.max_model_len * longest

    def refuse_hopeless(self, characters: int, parameter: str) -> None:
        """A text that is too long even if all its tokens were the vocabulary's longest need not be tokenized."""
        if characters > self.most_characters:
            least = -(-characters * self.max_model_len // self.most_characters)
            raise PromptTooLong(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has {characters} "
                f"characters, which cannot be fewer than {least} tokens. Shorten the prompt.",
                parameter,
            )

    def _too_long(self, tokens: int, asked: int | None, parameter: str) -> PromptTooLong:
        requested = "at least 1 output token" if asked is None else f"{asked} output tokens"
        together = tokens + (1 if asked is None else asked)
        over, room = together - self.max_model_len, self.max_model_len - tokens
        ways = [f"ask for at most {room} output token{'s' * (room != 1)}"] if room > 0 else []
        ways += [f"shorten the prompt by at least {over}"] if over < tokens else []
        return PromptTooLong(
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {requested} and your "
            f"prompt has {tokens} tokens ({together} together): {', or '.join([*ways, 'raise max_model_len'])}",
            parameter,
        )


def _checked_ids(ids: Any) -> list[int]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise InvalidParameter(f"prompt_token_ids must be a list of integers, got {type(ids).__name__}", "prompt")
    if set(map(type, ids)) != {int}:  # find the wrong one
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidParameter(f"prompt_token_ids must be integers, got {token!r}", "prompt")
    return list(ids)
