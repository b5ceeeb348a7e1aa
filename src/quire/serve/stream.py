"""What the chunks of a stream tell besides text: usage, times and the system's fingerprint, as stream_options ask for it."""

from typing import Any

from quire.serve.generation import GenerationJob
from quire.serve.protocol.fields import StreamOptions
from quire.serve.server import Server
from quire.serve.usage import timing_of, usage_of
from quire.types.outputs import RequestOutput


class StreamUsage:
    """A stream ends with a usage chunk if that is `wanted`; otherwise its last choice carries what concerns all of it."""

    def __init__(self, server: Server, job: GenerationJob, options: StreamOptions | None) -> None:
        forced = server.settings.enable_force_include_usage
        self.wanted = forced or (options is not None and bool(options.include_usage))
        self._in_every_chunk = forced or (self.wanted and options is not None and bool(options.continuous_usage_stats))
        self._server = server
        self._job = job
        self._cached = [0] * len(job.prompts)
        self._open = len(job.prompts) * job.n
        self._last: RequestOutput | None = None

    def note(self, prompt: int, output: RequestOutput) -> None:
        self._cached[prompt] = output.num_cached_tokens
        self._last = output

    def mark(self, chunk: dict[str, Any], prompt: int, tokens: int, finished: bool) -> dict[str, Any]:
        """A chunk of one choice, which has `tokens` so far, with what else it has to tell."""
        if self._in_every_chunk:
            chunk["usage"] = usage_of(len(self._job.prompts[prompt].ids), tokens, None)
        if finished and not self.wanted:
            self._open -= 1
            chunk["system_fingerprint"] = self._server.fingerprint
            if self._open == 0:
                chunk |= self._times()
        return chunk

    def final(self, tokens: int, reasoning_tokens: int | None = None) -> dict[str, Any]:
        """What the usage chunk tells."""
        cached = self._server.told_cached(sum(self._cached))
        usage = usage_of(self._job.prompt_tokens, tokens, cached, reasoning_tokens)
        return {"usage": usage, "system_fingerprint": self._server.fingerprint, **self._times()}

    def _times(self) -> dict[str, Any]:
        """Times of several choices together would mean nothing."""
        if not self._job.timed or len(self._cached) * self._job.n > 1 or self._last is None:
            return {}
        return {"metrics": timing_of(self._last.metrics, self._server.speculates)}
