"""A text process: `python -m quire.text.workers.worker SOCKET SOURCE [with-thread]`. SOCKET is an inherited descriptor, SOURCE
where the tokenizer is.

It does one job at a time, within bounds of processor time and memory, and ends when the other side closes the socket. The
tokenizer is read when a job first needs it.
"""

import contextlib
import resource
import signal
import socket
import sys
from array import array
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from quire.proc.channel import Frames
from quire.proc.spawn import set_up
from quire.text.chat import ChatTemplates
from quire.text.tool_prompt import render_described
from quire.text.workers import wire
from quire.types.errors import InvalidParameter, PromptTooLong, RequestError

MB = 1 << 20
GRACE = 2  # seconds of processor time until what cannot be interrupted is killed
HEAVY = 512 * MB  # a process that has grown beyond this ends after its job


MIN_ENCODE_SECONDS = 5.0
SLOWEST_CHARS_PER_SECOND = 50_000  # of tokenizing; a twentieth of what is usual

HARD_CPU = resource.getrlimit(resource.RLIMIT_CPU)[1]
HARD_SPACE = resource.getrlimit(resource.RLIMIT_AS)[1]


class Bounds(msgspec.Struct, frozen=True):
    seconds: float  # of processor time
    memory: int  # bytes, besides what the process has
    what: str
    parameter: str | None


BOUNDS: dict[type, Bounds] = {
    wire.Render: Bounds(wire.RENDER_SECONDS, 512 * MB, wire.TEMPLATE, "messages"),
    wire.Encode: Bounds(120.0, 4096 * MB, "tokenizing the text", "prompt"),
    wire.Decode: Bounds(60.0, 2048 * MB, "decoding the tokens", "tokens"),
    wire.Parse: Bounds(20.0, 4096 * MB, "reading the request body", "body"),
}


class Overdue(BaseException):
    """Not an Exception: nothing that a job runs may catch it."""


class TextWorker:
    def __init__(self, frames: Frames, where: wire.TokenizerSource) -> None:
        self._frames, self._where = frames, where

    @cached_property
    def _tokenizer(self) -> Any:
        from quire.files.resolve import resolve_model
        from quire.text.tokenizer_files import read_tokenizer

        path = Path(self._where.path)
        if self._where.tokenizer is not None:
            path = resolve_model(self._where.tokenizer, revision=self._where.revision, weights=False).path
        return read_tokenizer(path)

    def run(self) -> None:
        while (head := self._frames.wait()) is not None and (blob := self._frames.wait()) is not None:
            try:
                frames = self._answer(wire.decode_job(head), blob)
            except msgspec.ValidationError as error:
                frames = [wire.refusal(InvalidParameter(f"the request cannot be read: {error}"))]
            except RequestError as error:
                frames = [wire.refusal(error)]
            heavy = _peak() > HEAVY
            if heavy:
                frames[-1] = wire.LAST[frames[-1][:1]] + frames[-1][1:]
            for frame in frames:
                self._frames.send(frame)
            if heavy:
                return

    def _answer(self, job: wire.Job, blob: bytes) -> list[bytes]:
        match job:
            case wire.Render():
                return _frames_of(self._render(job))
            case wire.Encode(special, cut):
                return _frames_of(self._encode(str(blob, "utf-8", "surrogatepass"), special, cut))
            case wire.Decode(skip):
                numbers = array("q")
                numbers.frombytes(blob)
                tokenizer = self._tokenizer
                with Bounded(wire.Decode):
                    return _frames_of(tokenizer.decode(numbers.tolist(), skip))
            case wire.Parse(depth, containers, values, integers):
                with Bounded(wire.Parse):
                    return _frames_of(_parse(blob), wire.FrameWriter(depth, containers, values, integers))

    def _render(self, job: wire.Render) -> tuple[str, Any]:
        """The text, and its tokens if it is long."""
        render = partial(
            ChatTemplates({"default": job.template}).render,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            documents=job.documents,
            variables=job.variables,
            content_format=job.content_format,
        )
        with Bounded(wire.Render):
            text = (
                render_described(render, job.messages, job.tools)
                if job.describe_tools
                else render(job.messages, tools=job.tools)
            )
        if not _is_text(text):
            raise InvalidParameter(f"{wire.TEMPLATE} wrote halves of characters (surrogates)", "messages")
        if len(text) > job.most:
            raise PromptTooLong(wire.too_long(len(text), job.most), "messages")
        return text, None if len(text) <= job.short else self._encode(text, job.add_special_tokens, job.cut)

    def _encode(self, text: str, add_special_tokens: bool, cut: wire.Cut) -> tuple[int, list[int] | None]:
        tokenizer = self._tokenizer  # reading it is not the job's cost
        with Bounded(wire.Encode, max(MIN_ENCODE_SECONDS, len(text) / SLOWEST_CHARS_PER_SECOND)):
            return cut.of(tokenizer.encode(text, add_special_tokens))


def _frames_of(value: Any, writer: wire.FrameWriter | None = None) -> list[bytes]:
    return list((writer or wire.FrameWriter()).frames(value))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidParameter(wire.not_json(error), "body") from None


# ---- bounds


class Bounded:
    """What goes beyond the bounds of such a job is refused. What no exception can reach is killed a little later."""

    _memory: tuple[str, int | None] = ("", None)  # for whom the bound is set: jobs of one kind need not measure again

    def __init__(self, kind: type, seconds: float | None = None) -> None:
        """`seconds`: of processor time, if this job may have fewer than others of its kind."""
        bounds = BOUNDS[kind]
        few = bounds.seconds if seconds is None else min(seconds, bounds.seconds)
        self._bounds = msgspec.structs.replace(bounds, seconds=few)

    def __enter__(self) -> None:
        bounds = self._bounds
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime + bounds.seconds) + GRACE
        resource.setrlimit(resource.RLIMIT_CPU, (most, HARD_CPU))
        if Bounded._memory[0] != bounds.what:
            space = _space()
            Bounded._memory = bounds.what, None if space is None else space + bounds.memory
        _limit_memory(Bounded._memory[1])
        signal.signal(signal.SIGPROF, _overdue)
        signal.setitimer(signal.ITIMER_PROF, bounds.seconds, 0.25)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CPU, (HARD_CPU, HARD_CPU))
        _limit_memory(None)
        bounds = self._bounds
        match error:
            case Overdue():
                raise InvalidParameter(wire.too_slow(bounds.what, bounds.seconds), bounds.parameter) from None
            case MemoryError():
                reason = f"{bounds.what} needs too much memory: more than {bounds.memory // MB} MB"
                raise InvalidParameter(reason, bounds.parameter) from None
            case RecursionError():
                reason = f"{bounds.what} goes too deep: too many values inside of others"
                raise InvalidParameter(reason, bounds.parameter) from None


def _peak() -> int:
    """The most bytes that this process has held. What Linux says for `ru_maxrss` includes what its parent held when it was
    started."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _overdue(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise Overdue


def _limit_memory(most: int | None) -> None:
    if most is None or (HARD_SPACE != resource.RLIM_INFINITY and most > HARD_SPACE):
        most = HARD_SPACE
    with contextlib.suppress(ValueError, OSError):  # not every system has this bound
        resource.setrlimit(resource.RLIMIT_AS, (most, HARD_SPACE))


def _space() -> int | None:
    """Bytes of this process's address space, if the system reports it."""
    try:
        return int(Path("/proc/self/statm").read_text().split(maxsplit=1)[0]) * resource.getpagesize()
    except OSError:
        return None


def main(argv: Sequence[str]) -> int:
    set_up("text", argv, descriptors=argv[:1])
    frames = Frames(socket.socket(fileno=int(argv[0])))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the other side is gone
        TextWorker(frames, msgspec.json.decode(argv[1], type=wire.TokenizerSource)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
