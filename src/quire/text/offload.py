"""Text work for an event loop: short work runs in threads, long or possibly endless work in processes.

Tokenizing releases the interpreter lock, so a thread does not block the event loop. Making a list of a million ids does not
release it, and a thread cannot be killed.
"""

import asyncio
import copy
import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from quire.config.config import Config
from quire.text.backends import unencodable
from quire.text.chat import MediaMarks
from quire.text.pacing import SLICE_VALUES, Pace, json_chunks
from quire.text.partial import LONG_CHARACTERS, parts
from quire.text.tokenizer import Tokenizer
from quire.text.workers import wire
from quire.text.workers.pool import ProcessPool, text_kind
from quire.types.errors import EngineDead, InvalidParameter, RequestError

MAX_THREADS = 4
MAX_QUICK = 4  # processes for a model's own chat template
MAX_LONG = 4  # processes for everything else; not more than there are processors
SHORT_IDS = 4096  # token ids that are decoded by a thread
logger = logging.getLogger(__name__)

ALL = wire.ALL
T = TypeVar("T")


class TextOffload:
    def __init__(self, config: Config, tokenizer: Tokenizer | None) -> None:
        args = config.args
        where = wire.TokenizerSource(str(config.facts.files.path.absolute()), args.tokenizer, args.tokenizer_revision)
        self._tokenizer, self._foreign = tokenizer, False
        if tokenizer is not None:
            _ = tokenizer.characters_per_token  # reads the whole vocabulary once: before the first request
            if not tokenizer.short:
                logger.info("tokenizer stages may take long for any text: texts are tokenized in separate processes")
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="quire-text")
        self._quick = ProcessPool(text_kind(where), MAX_QUICK, self._threads)
        self._long = ProcessPool(text_kind(where), max(2, min(MAX_LONG, os.cpu_count() or 1)), self._threads)

    def for_tokenizer(self, tokenizer: Tokenizer) -> "TextOffload":
        """Return an offload for an adapter's tokenizer. The processes do not have it, so threads do the long work, too."""
        other = copy.copy(self)
        other._tokenizer, other._foreign = tokenizer, True
        return other

    def start(self, large_bodies: bool = False) -> None:
        """Start the process for chat templates before the first chat, and if asked to the one that parses large bodies."""
        self._quick.start()
        if large_bodies:
            self._long.start()

    def stop(self) -> None:
        self._quick.stop()
        self._long.stop()
        self._threads.shutdown(wait=False)

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [*self._quick.pids, *self._long.pids]

    async def thread(self, work: Callable[..., T], *args: Any) -> T:
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        except RuntimeError:
            raise EngineDead("the engine was shut down") from None
        return await future

    async def encode(self, text: str, add_special_tokens: bool, cut: wire.Cut = ALL) -> tuple[int, list[int] | None]:
        """How many tokens the text has, and those of them that are wanted; None if they are more than that.

        Of a long text that is cut, no more is tokenized than the cut leaves; its tokens are counted as one more than these.
        """
        tokenizer = self._has_tokenizer()
        if cut.keep is not None and len(text) > LONG_CHARACTERS and await self.thread(lambda: tokenizer.words_apart):
            tokens = await self._encode_end(text, add_special_tokens, cut)
            if tokens is not None:
                return cut.keep + 1, tokens
        return await self._encode_whole(tokenizer, text, add_special_tokens, cut)

    async def _encode_end(self, text: str, add_special_tokens: bool, cut: wire.Cut) -> list[int] | None:
        """Return the tokens that the cut leaves, from one end of the text; None if its end does not tell them."""
        assert cut.keep is not None
        for part in parts(text, cut):
            lead = 0 if not part.lead else len(await self._encode_short(self._has_tokenizer(), part.lead, False))
            _, ids = await self._encode_whole(self._has_tokenizer(), part.text, add_special_tokens, ALL)
            if ids is not None and len(ids) >= cut.keep + lead:
                return cut.of(ids)[1]
        return None

    async def _encode_whole(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, cut: wire.Cut
    ) -> tuple[int, list[int] | None]:
        if self._foreign or len(text) <= tokenizer.short:
            return cut.of(await self._encode_short(tokenizer, text, add_special_tokens))
        job = wire.Encode(add_special_tokens, cut)
        count, ids = await self._ask(self._long, job, await _utf8(text), "tokenizing the text", "prompt")
        return count, ids

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        tokenizer = self._has_tokenizer()
        if self._foreign or len(ids) <= SHORT_IDS:
            return await self.thread(tokenizer.decode, ids, skip_special_tokens)
        pace, blob = Pace(), []
        try:
            for i in range(0, len(ids), SLICE_VALUES):
                await pace()
                blob.append(array("q", ids[i : i + SLICE_VALUES]).tobytes())
        except (TypeError, OverflowError):
            raise InvalidParameter("token ids must be integers of at most 64 bits", "tokens") from None
        return str(await self._ask(self._long, wire.Decode(skip_special_tokens), blob, "decoding the tokens", "tokens"))

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool,
        cut: wire.Cut = ALL,
        most: int = wire.MAX_RENDERED,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        describe_tools: bool = False,
        variables: Mapping[str, Any] | None = None,
        media: MediaMarks | None = None,
    ) -> tuple[str, int, list[int] | None]:
        """Return the prompt of a conversation, its number of tokens, and the tokens that the cut leaves (see `encode`)."""
        tokenizer = self._has_tokenizer()
        template = tokenizer.choose_template(chat_template, bool(tools) and not describe_tools)
        job = wire.Render(
            template,
            list(messages),
            None if tools is None else list(tools),
            None if documents is None else list(documents),
            add_generation_prompt,
            continue_final_message,
            {**tokenizer.special_tokens_map, **(variables or {})},
            chat_template_content_format,
            describe_tools,
            add_special_tokens,
            most if self._foreign else tokenizer.short,
            most,
            cut,
            media,
        )
        pool = self._quick if chat_template is None else self._long
        text, tokens = await self._ask(pool, job, [], wire.TEMPLATE, "messages")
        count, ids = tokens or cut.of(await self._encode_short(tokenizer, text, add_special_tokens))
        return text, count, ids

    async def parse(self, raw: bytes, bounds: wire.Parse) -> Any:
        """Parse JSON. Long lists of integers become `wire.Ids`."""
        return await self._ask(self._long, bounds, [raw], "reading the request body", "body")

    async def _encode_short(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= tokenizer.tiny:
            pace = Pace()
            await pace()
            ids = tokenizer.encode(text, add_special_tokens)
            await pace()
            return ids
        return await self.thread(tokenizer.encode, text, add_special_tokens)

    async def _ask(self, pool: ProcessPool, job: wire.Job, blob: Sequence[bytes], what: str, parameter: str) -> Any:
        try:
            head = await json_chunks(_flat(job)) if isinstance(job, wire.Render) else [msgspec.json.encode(job)]
        except UnicodeEncodeError:
            raise unencodable("", parameter) from None
        except (TypeError, OverflowError, RecursionError) as error:
            raise InvalidParameter(f"{what} cannot be given these values: {error}", parameter) from None
        return await pool.run(head, blob, what, parameter)

    def _has_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("there is no tokenizer: the engine was started with skip_tokenizer_init")
        return self._tokenizer


def _flat(job: wire.Render) -> list[Any]:
    """Return what the encoder would write, as plain values, so that it can be encoded in chunks."""
    return [type(job).__name__, *msgspec.structs.astuple(job)]


async def _utf8(text: str) -> list[bytes]:
    pace = Pace()
    chunks = []
    try:
        for i in range(0, len(text), 2 * SLICE_VALUES):
            await pace()
            chunks.append(text[i : i + 2 * SLICE_VALUES].encode())
    except UnicodeEncodeError:
        raise unencodable(text) from None
    return chunks
