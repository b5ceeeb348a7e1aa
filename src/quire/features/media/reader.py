"""Read the images and videos of requests: from what clients send to items that the engine takes.

    MediaRef ─► content, by its digest ─► cache ─► media process: decode, preprocess, expand ─► Processed ─► prompt

Equal content is processed once, also if several requests bring it at the same time. An event loop runs this; no work blocks it.
"""

import asyncio
import hashlib
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.args import local_engines
from quire.features.media.embeds import EMBEDS, Embeddings, encoded
from quire.features.media.host import media_of, read_limits, why_no_media
from quire.features.media.inputs import MediaOptions, MediaRef, Pixels, field_of, take_media, texts_of
from quire.features.media.prompt import Placeholders
from quire.features.media.store import Processed, ProcessorCache, SharedFile, SharedFiles, removed_on_error
from quire.features.media.workers import preload, wire
from quire.features.media.workers.fetch import check_url
from quire.proc.fork_server import LazyForkServer
from quire.proc.spawn import command_of
from quire.text.chat import MediaMarks
from quire.text.tokenizer import Tokenizer
from quire.text.workers.pool import SETTINGS, ProcessPool, WorkerKind, current_tenant
from quire.text.workers.wire import TokenizerSource
from quire.types.errors import EngineDead, FetchFailed, InvalidParameter, NotSupported, PromptTooLong, RequestError
from quire.types.media import MediaItem, Modality

if TYPE_CHECKING:
    from quire.config.config import Config

WORKERS_VARIABLE = "QUIRE_MEDIA_WORKERS"  # most processes that decode and preprocess
MAX_FETCHERS = 8
FETCH_VARIABLES = ("QUIRE_{}_FETCH_TIMEOUT", "VLLM_{}_FETCH_TIMEOUT")  # of IMAGE and VIDEO, in seconds
FETCH_SECONDS: Mapping[Modality, float] = {"image": 5.0, "video": 30.0}
FETCH_PATIENCE_S = 1.5  # after which only a download that will end in time goes on
MAX_FETCHED_BYTES: Mapping[Modality, int] = {"image": 64 << 20, "video": 512 << 20}
FETCH_HANG_S = 120.0  # a process that waits for a server uses no processor time
MAX_UUIDS = 1 << 16
SHORT_BYTES = 1 << 16  # content whose digest is computed on the event loop
_DATA = "data:"
_COMMAND = command_of("quire.features.media.workers.worker")
Encode = Callable[[str, bool], Awaitable[list[int]]]


@dataclass(frozen=True)
class _Content:
    """What is to be decoded, and its digest."""

    key: str
    kind: wire.ContentKind
    blob: bytes = b""
    file: SharedFile | None = None  # has it in place of `blob`
    shape: tuple[int, ...] = ()
    fps: float = 1.0


class _TokenLimit:
    """The most tokens of all items of one prompt, so that no more items are processed than fit the context."""

    def __init__(self, most: int | None) -> None:
        self._most, self._taken = most, 0

    def take(self, tokens: int) -> None:
        self._taken += tokens
        if self._most is not None and self._taken > self._most:
            raise PromptTooLong(
                f"This model's maximum context length is {self._most} tokens, and the images and videos up to here have "
                f"{self._taken}. Send fewer or smaller ones"
            )


class MediaReader:
    """Reads the media of requests. If the model reads text only, every image is refused."""

    def __init__(self, config: "Config", tokenizer: Tokenizer | None) -> None:
        self._config = config
        self.media = media_of(config)
        self.placeholders = None
        if self.media is not None and tokenizer is not None:
            self.placeholders = Placeholders(self.media.family, tokenizer)
        self.cache = ProcessorCache(int(config.args.mm_processor_cache_gb * (1 << 30)))
        self.on_processed: Callable[[float], None] = lambda seconds: None  # noqa: ARG005
        self._limits = read_limits(config.args.limit_mm_per_prompt)
        self._files: SharedFiles | None = None
        self._server: LazyForkServer | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="quire-media")
        self._pool: ProcessPool | None = None
        self._fetchers: ProcessPool | None = None
        self._running: dict[str, tuple[asyncio.Task[Processed], int]] = {}  # by key, with the number of waiting requests
        self._named: OrderedDict[tuple[str | None, Modality, str], str] = OrderedDict()  # uuid -> digest of the content
        self._inline = _has_remote_engines(config)  # arrays are sent to them
        self.readers = 1  # that share the processors, such as those of several API processes

    @property
    def marks(self) -> MediaMarks | None:
        """Return how chat templates that take strings get media; None: there are none."""
        if self.placeholders is None:
            return None
        texts = {str(modality): text for modality, text in self.placeholders.texts.items()}
        return MediaMarks(texts, self._config.args.interleave_mm_strings)

    def start(self) -> None:
        """Prepare the processes before the first image, and remove what a killed process left in shared memory."""
        if self.media is not None and self.missing is None:
            self._fork_server()

    def stop(self) -> None:
        for pool in (self._pool, self._fetchers):
            if pool is not None:
                pool.stop()
        if self._server is not None:
            self._server.close()
        self._threads.shutdown(wait=False)
        self.cache.clear()
        if self._files is not None:
            self._files.close()

    def reset(self) -> None:
        """Forget processed items and their uuids."""
        self.cache.clear()
        self._named.clear()

    @property
    def pids(self) -> list[int]:
        return [pid for pool in (self._pool, self._fetchers) if pool is not None for pid in pool.pids]

    @property
    def missing(self) -> str | None:
        """Return the packages that images need and that are not installed; None: all are."""
        names = [
            package for package, module in (("transformers", "transformers"), ("Pillow", "PIL")) if find_spec(module) is None
        ]
        return " and ".join(names) or None

    def take(
        self, messages: Sequence[Mapping[str, Any]], local: bool = False
    ) -> tuple[Sequence[Mapping[str, Any]], list[MediaRef]]:
        """Return messages as `take_media` does, and their media. Raise an error for media or texts that are refused."""
        taken, refs = take_media(messages, local)
        self.check(refs)
        if self.placeholders is not None:
            self.placeholders.refuse_typed(texts_of(taken))
        return taken, refs

    def check(self, refs: Sequence[MediaRef]) -> None:
        """Raise an error for media that the model does not read, or that are too many."""
        counts: Counter[Modality] = Counter()
        for ref in refs:
            self._check(ref)
            counts[ref.modality] += 1
            if counts[ref.modality] > (most := self._limits[ref.modality]):
                count = sum(other.modality == ref.modality for other in refs)
                raise InvalidParameter(
                    f"{ref.where}: a prompt may have at most {most} {ref.modality}s, got {count} (limit_mm_per_prompt)",
                    field_of(ref.where),
                )

    def _check(self, ref: MediaRef) -> None:
        field = field_of(ref.where)
        if isinstance(ref.content, Embeddings) and not self._config.args.enable_mm_embeds:
            raise NotSupported(f"{ref.where}: {EMBEDS} require enable_mm_embeds of the server. Send the image itself", field)
        if why := why_no_media(self._config, ref.modality):
            raise NotSupported(f"{ref.where}: {ref.modality} input {why}", field)
        if self.placeholders is None:
            raise InvalidParameter(f"{ref.where}: {ref.modality}s require a tokenizer. Remove skip_tokenizer_init", field)
        if self.missing is not None:
            raise NotSupported(
                f"{ref.where}: {ref.modality}s require {self.missing}: pip install 'quire[vision]' on the server", field
            )

    async def complete(
        self,
        text: str | None,
        ids: Sequence[int] | None,
        refs: Sequence[MediaRef],
        options: MediaOptions,
        encode: Encode,
        add_special_tokens: bool,
        parameter: str,
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Return the tokens of a prompt with its media, and the items.

        text: with placeholders; None: token ids were given. ids: its tokens, if they are known. encode: tokenizes a text.
        """
        self.check(refs)
        assert self.media is not None and self.placeholders is not None
        items = await self.process(refs, options, self._config.max_model_len)
        family, special = self.media.family, add_special_tokens and self.media.family.adds_special_tokens
        if text is not None:
            completed = self.placeholders.complete_text(text, items, family)
            if ids is None or completed != text or special != add_special_tokens:
                ids = await encode(completed, special)
        assert ids is not None
        return self.placeholders.expand(ids, items, parameter)

    async def process(self, refs: Sequence[MediaRef], options: MediaOptions, most_tokens: int | None = None) -> list[Processed]:
        """Return the items; an error names the place of its part. most_tokens: that they may have together"""
        count, limit = sum(ref.modality == "image" for ref in refs), _TokenLimit(most_tokens)
        tasks = [asyncio.ensure_future(self._named_errors(ref, options, count, limit)) for ref in refs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            while tasks:  # an error refers to this frame; a reference back would keep all content until garbage is collected
                tasks.pop().cancel()

    async def _named_errors(self, ref: MediaRef, options: MediaOptions, count: int, limit: _TokenLimit) -> Processed:
        try:
            item = await self._one(ref, options, count)
            limit.take(len(item.tokens))
            return item
        except EngineDead:
            raise
        except RequestError as error:
            error.__traceback__ = None  # its frames have the content
            raise type(error)(f"{ref.where}: {error}", error.parameter or field_of(ref.where)) from None

    async def _one(self, ref: MediaRef, options: MediaOptions, count: int) -> Processed:
        job = self._job(ref.modality, options, count)
        name = None if ref.uuid is None else (current_tenant.get(), ref.modality, ref.uuid)
        if ref.content is None:
            assert name is not None
            known = self._named.get(name)
            item = None if known is None else self.cache.get(_key(known, job))
            if item is None:
                raise InvalidParameter("no image or video with this uuid is cached. Send it with its content")
            self._named.move_to_end(name)
            return item
        content = await self._content(ref)
        item = await self._cached(content, job)
        if name is not None:
            self._named[name] = content.key
            self._named.move_to_end(name)
            if len(self._named) > MAX_UUIDS:
                self._named.popitem(last=False)
        return item

    def _job(self, modality: Modality, options: MediaOptions, count: int) -> wire.Process:
        """Return the job without its content."""
        assert self.media is not None
        args = self._config.args
        processor = {**(args.mm_processor_kwargs or {}), **options.processor}
        io = {**args.media_io_kwargs.get(modality, {}), **options.io.get(modality, {})}
        counted = count if self.media.family.depends_on_count and modality == "image" else 0
        return wire.Process(modality, "file", "", [], processor, io, counted, "")

    # ---- content

    async def _content(self, ref: MediaRef) -> _Content:
        match ref.content:
            case Embeddings() as embeds:
                blob = encoded(embeds)
                return _Content(await self._digest(b"embeds", blob), "embeds", blob)
            case Pixels(shape, data, fps):
                key = await self._digest(b"pixels", msgspec.json.encode((shape, fps)), data)
                return _Content(key, "pixels", data, shape=shape, fps=fps)
            case bytes(data):
                return _Content(await self._digest(b"file", data), "file", data)
            case str(url) if url[: len(_DATA)].lower() == _DATA:
                blob = _data_of(url, ref.modality)
                return _Content(await self._digest(b"base64", blob), "base64", blob)
            case str(url):
                return await self._fetch(url, ref.modality)
        raise AssertionError

    async def _digest(self, *pieces: bytes) -> str:
        def digest() -> str:
            found = hashlib.sha256()
            for piece in pieces:
                found.update(len(piece).to_bytes(8, "little"))
                found.update(piece)
            return found.hexdigest()

        if sum(map(len, pieces)) <= SHORT_BYTES:
            return digest()
        return await asyncio.get_running_loop().run_in_executor(self._threads, digest)

    async def _fetch(self, url: str, modality: Modality) -> _Content:
        args = self._config.args
        domains, root = list(args.allowed_media_domains or ()), args.allowed_local_media_path
        check_url(url, domains, root)
        file = self._open_files().new()
        job = wire.Fetch(url, domains, root, file.path, *_seconds(modality), MAX_FETCHED_BYTES[modality])
        if self._fetchers is None:
            ready = [msgspec.json.encode(wire.Warm(False))], [b""]
            kind = WorkerKind("fetch", "", _COMMAND, ready, FETCH_HANG_S, self._fork_server())
            self._fetchers = ProcessPool(kind, MAX_FETCHERS, self._threads)
        with removed_on_error(file):
            size, digest = await self._fetchers.run(_encoded(job), [b""], f"fetching the {modality}", None)
        if size == 0:
            raise FetchFailed("it cannot be fetched: it is empty")
        return _Content(digest, "file", file=file)

    # ---- processing

    async def _cached(self, content: _Content, job: wire.Process) -> Processed:
        key = _key(content.key, job)  # `content.key` has the frame rate, which a uuid alone does not bring
        if content.kind == "pixels" and job.modality == "video":
            job = msgspec.structs.replace(job, io={**job.io, "fps": content.fps})
        item = self.cache.get(key)
        if item is not None:
            return item
        if key not in self._running:
            self._running[key] = asyncio.get_running_loop().create_task(self._run(key, content, job)), 0
        task, waiting = self._running[key]
        self._running[key] = task, waiting + 1
        try:
            return await asyncio.shield(task)
        finally:
            if (entry := self._running.get(key)) is not None and entry[0] is task:
                self._running[key] = task, entry[1] - 1
                if entry[1] == 1:  # no request waits
                    del self._running[key]
                    task.cancel()
            del entry, task  # an error refers to this frame, and so to the content

    async def _run(self, key: str, content: _Content, job: wire.Process) -> Processed:
        out = None if self._inline else self._open_files().new()
        whole = msgspec.structs.replace(
            job, kind=content.kind, path=content.file.path if content.file is not None else "", shape=list(content.shape),
            out="" if out is None else out.path,
        )  # fmt: skip
        begun = time.monotonic()
        with removed_on_error(out, content.file):
            answer = await self._processes().run(_encoded(whole), [content.blob], f"reading the {job.modality}", None)
        item = Processed.of(job.modality, msgspec.convert(answer, wire.ProcessedItem), out)
        self.cache.put(key, item)
        self.on_processed(time.monotonic() - begun)
        return item

    def _processes(self) -> ProcessPool:
        if self._pool is None:
            ready = [msgspec.json.encode(wire.Warm(True))], [b""]
            kind = WorkerKind("media", self._source, _COMMAND, ready, server=self._fork_server())
            self._pool = ProcessPool(kind, max(1, max_workers() // self.readers), self._threads)
        return self._pool

    @property
    def _source(self) -> str:
        return str(self._open_files().directory / "source")

    def _fork_server(self) -> LazyForkServer:
        """Return the server that forks all processes, with image processor and tokenizer in memory."""
        if self._server is None:
            config, media = self._config, self.media
            assert media is not None
            where = str(config.facts.files.path.absolute())
            tokenizer = TokenizerSource(where, config.args.tokenizer, config.args.tokenizer_revision)
            source = wire.MediaSource(where, tokenizer, config.facts.architecture, dict(media.config))
            Path(self._source).write_bytes(msgspec.json.encode(source))
            self._server = LazyForkServer([preload.__name__], {**SETTINGS, preload.SOURCE_VARIABLE: self._source}, False)
            self._server.prepare()
        return self._server

    def _open_files(self) -> SharedFiles:
        if self._files is None:
            self._files = SharedFiles()
        return self._files


def _has_remote_engines(config: "Config") -> bool:
    """Return whether an engine or a rank may be on another machine."""
    args = config.args
    remote = local_engines(args) < args.data_parallel_size
    return remote or args.nnodes > 1 or args.distributed_executor_backend == "ray"


def max_workers() -> int:
    """Return the most processes that decode and preprocess, of all readers together.

    QUIRE_MEDIA_WORKERS sets it; default: half of the processors, 2 to 16.
    """
    given = os.environ.get(WORKERS_VARIABLE, "")
    return int(given) if given.isdecimal() and int(given) else max(2, min(16, (os.cpu_count() or 1) // 2))


def _seconds(modality: Modality) -> tuple[float, float]:
    """Return the timeout of a fetch, and the time after which only a download that will end in time goes on.

    Both are the value of an environment variable, if one is set.
    """
    for name in FETCH_VARIABLES:
        given = os.environ.get(name.format(modality.upper()), "")
        if given.isdecimal() and int(given):
            return float(given), float(given)
    return FETCH_SECONDS[modality], FETCH_PATIENCE_S


def _key(content: str, job: wire.Process) -> str:
    """Return the digest of a content and of everything that its processing depends on."""
    return hashlib.sha256(msgspec.json.encode((content, job), order="sorted")).hexdigest()


def _encoded(job: wire.MediaJob) -> list[bytes]:
    try:
        return [msgspec.json.encode(job)]
    except (TypeError, RecursionError):
        raise InvalidParameter("mm_processor_kwargs must be JSON values", "mm_processor_kwargs") from None


def _data_of(url: str, modality: Modality) -> bytes:
    """Return the base64 text of a data URL."""
    head, comma, text = url[len(_DATA) :].partition(",")
    kind, *parameters = head[:256].lower().split(";")
    if not comma or "base64" not in (parameter.strip() for parameter in parameters):
        raise InvalidParameter(f"a data: URL must be data:{modality}/TYPE;base64,TEXT")
    if kind == "image/svg+xml":
        raise NotSupported("SVG is not supported. Send it as PNG")
    if kind and kind.partition("/")[0] not in (modality, "application"):
        raise InvalidParameter(f"a data: URL here must be of type {modality}/..., got {kind!r:.80}")
    try:
        return text.encode("ascii")
    except UnicodeEncodeError:
        raise InvalidParameter("its base64 is not valid") from None
