"""Prompts with `multi_modal_data` become prepared prompts, and media work without an event loop of the caller."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from quire.features.media.inputs import NO_OPTIONS, MediaOptions, MediaRef, options_of, read_multi_modal
from quire.features.media.reader import Encode, MediaReader
from quire.text.prompts import Tokenization, check_keys
from quire.types.errors import EngineDead, InvalidParameter, NotSupported
from quire.types.prompts import Extras, Prompt

if TYPE_CHECKING:
    from quire.text.offload import TextOffload
    from quire.text.prompts import PromptReader

T = TypeVar("T")
ADD_SPECIAL_TOKENS = "_add_special_tokens"  # key of the prompt of a conversation
_OWN = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs", ADD_SPECIAL_TOKENS)
CLOSE_TIMEOUT_S = 5.0


def has_media(prompt: Any) -> bool:
    """Return whether a prompt has images or videos, or uuids of them."""
    return isinstance(prompt, Mapping) and any(prompt.get(name) for name in _OWN[:2])


def without_media(prompt: Any) -> Any:
    """Return a prompt for which `has_media` does not hold without its keys for media, such as empty lists."""
    if not isinstance(prompt, Mapping) or not any(name in prompt for name in _OWN):
        return prompt
    return {name: value for name, value in prompt.items() if name not in _OWN}


def references(prompt: Mapping[str, Any]) -> list[MediaRef]:
    """Return the media of a prompt. It may read all pixels of PIL images."""
    return read_multi_modal(prompt.get("multi_modal_data") or {}, prompt.get("multi_modal_uuids"))


def check_tokenization(how: Tokenization | None) -> None:
    """Raise an error for a tokenization that a prompt with media cannot have."""
    if how is not None and how != Tokenization(add_special_tokens=how.add_special_tokens):
        raise NotSupported(
            "tokenization_kwargs may only have add_special_tokens if images or videos come with the prompt",
            "tokenization_kwargs",
        )


async def read_prompt(
    media: MediaReader,
    prompts: "PromptReader",
    prompt: Mapping[str, Any],
    refs: Sequence[MediaRef],
    encode: Encode,
    options: MediaOptions = NO_OPTIONS,
    how: Tokenization | None = None,
) -> Prompt:
    """Return the prepared prompt of a dict for which `has_media` holds. options: of all prompts; its own come first"""
    check_tokenization(how)
    own = options_of(prompt.get("mm_processor_kwargs"), prompt.get("media_io_kwargs"))
    both = MediaOptions({**options.processor, **own.processor}, {**options.io, **own.io})
    plain = without_media(prompt)
    check_keys(plain)
    ids = None
    if "prompt_token_ids" in plain:
        ids = prompts.read(plain).ids
    text, given = plain.get("prompt"), ids is not None
    if not given and not isinstance(text, str):
        raise InvalidParameter("a prompt with multi_modal_data needs a text or prompt_token_ids", "prompt")
    special = prompt.get(ADD_SPECIAL_TOKENS, True) if how is None else how.add_special_tokens
    ids, items = await media.complete(None if given else text, ids, refs, both, encode, special, "prompt")
    return Prompt(text if isinstance(text, str) else None, ids, plain.get("cache_salt"), Extras(media=items))


class AsyncMedia:
    """What `AsyncLLM` does with images and videos."""

    media: MediaReader
    prompts: "PromptReader"
    offload: "TextOffload"

    async def reset_mm_cache(self) -> None:
        """Forget processed images and videos."""
        self.media.reset()

    async def _read_media(self, prompt: Mapping[str, Any], how: Tokenization | None, extras: Extras) -> Prompt:
        """Return the prepared prompt of a dict for which `has_media` holds."""
        prompts = self.prompts if extras.lora is None else self.prompts.of(extras)
        refs = await self.offload.thread(references, prompt)
        return await read_prompt(self.media, prompts, prompt, refs, prompts.encode_text, NO_OPTIONS, how)


class MediaLoop:
    """An event loop in a thread, for a `MediaReader` whose caller has none. It is started when it is needed."""

    def __init__(self, reader: MediaReader) -> None:
        self._reader = reader
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the work. An interruption (Ctrl-C) cancels it."""
        if self._closed:
            work.close()
            raise EngineDead("the engine has been shut down")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run_to_end, args=(self._loop,), name="quire-media", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._closed = True
        loop, self._loop = self._loop, None
        if loop is None:
            self._reader.stop()
            return
        done = threading.Event()

        def stop() -> None:
            try:
                self._reader.stop()
            finally:
                loop.stop()
                done.set()

        with contextlib.suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(stop)
            done.wait(CLOSE_TIMEOUT_S)
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)


def _run_to_end(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, cancel what is left in it, and close it."""
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
    finally:
        loop.close()
