"""A text process: `python -m quire.text.workers.worker SOCKET SOURCE [with-thread]`. SOCKET is an inherited descriptor, SOURCE
where the tokenizer is.

It does one job at a time, within bounds of processor time and memory, and ends when the other side closes the socket. The
tokenizer is read when a job first needs it.
"""

import contextlib
import socket
import sys
from array import array
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from quire.proc.bounded import MB, Bounded, Bounds, peak_bytes, trim_heap
from quire.proc.channel import Frames
from quire.proc.spawn import set_up
from quire.text.chat import ChatTemplates
from quire.text.tool_prompt import render_described
from quire.text.workers import wire
from quire.types.errors import InvalidParameter, PromptTooLong, RequestError

HEAVY = 512 * MB  # a process that has grown beyond this ends after its job
LARGE = 4 * MB  # after a job with more bytes, freed memory is returned to the system

MIN_ENCODE_SECONDS = 5.0
SLOWEST_CHARS_PER_SECOND = 50_000  # of tokenizing; a twentieth of what is usual

BOUNDS: dict[type, Bounds] = {
    wire.Render: Bounds(wire.RENDER_SECONDS, 512 * MB, wire.TEMPLATE, "messages"),
    wire.Encode: Bounds(120.0, 4096 * MB, "tokenizing the text", "prompt"),
    wire.Decode: Bounds(60.0, 2048 * MB, "decoding the tokens", "tokens"),
    wire.Parse: Bounds(20.0, 4096 * MB, "reading the request body", "body"),
}


class TextWorker:
    def __init__(self, frames: Frames, where: wire.TokenizerSource) -> None:
        self._frames, self._where = frames, where

    @cached_property
    def _tokenizer(self) -> Any:
        from quire.text.tokenizer_files import read_named

        return read_named(Path(self._where.path), self._where.tokenizer, self._where.revision)

    def run(self) -> None:
        while (head := self._frames.wait()) is not None and (blob := self._frames.wait()) is not None:
            try:
                frames = self._answer(wire.decode_job(head), blob)
            except msgspec.ValidationError as error:
                frames = [wire.refusal(InvalidParameter(f"the request cannot be read: {error}"))]
            except RequestError as error:
                frames = [wire.refusal(error)]
            large = len(blob) > LARGE
            del head, blob  # not to be held until the next job
            heavy = peak_bytes() > HEAVY
            if heavy:
                frames[-1] = wire.LAST[frames[-1][:1]] + frames[-1][1:]
            while frames:
                self._frames.send(frames.pop(0))
            if heavy:
                return
            if large:
                trim_heap()

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
                with Bounded(BOUNDS[wire.Decode]):
                    return _frames_of(tokenizer.decode(numbers.tolist(), skip))
            case wire.Parse(depth, containers, values, integers):
                with Bounded(BOUNDS[wire.Parse]):
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
            media=job.media,
        )
        with Bounded(BOUNDS[wire.Render]):
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
        with Bounded(BOUNDS[wire.Encode], max(MIN_ENCODE_SECONDS, len(text) / SLOWEST_CHARS_PER_SECOND)):
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


def main(argv: Sequence[str]) -> int:
    set_up("text", argv, descriptors=argv[:1])
    frames = Frames(socket.socket(fileno=int(argv[0])))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the other side is gone
        TextWorker(frames, msgspec.json.decode(argv[1], type=wire.TokenizerSource)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
