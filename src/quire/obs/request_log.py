"""A log line for every request that comes and, on demand, for what was generated."""

import logging
from collections.abc import Sequence
from typing import TypeVar

from quire.types.news import Arrived, OutputNews
from quire.types.stats import Stats

logger = logging.getLogger(__name__)

_Text = TypeVar("_Text", str, Sequence[int])


class RequestLog:
    """An observer. Prompts are told at debug level only; `most` characters, or token ids, of a text."""

    def __init__(self, outputs: bool, most: int | None) -> None:
        self._outputs, self._most = outputs, most

    def on_step(self, stats: Stats, tokens_in_step: int, now: float) -> None:
        """Steps are not requests."""

    def on_arrival(self, request: Arrived) -> None:
        lora = request.lora_name or None
        logger.info("Received request %s: params: %s, lora_request: %s.", request.request_id, request.params, lora)
        if logger.isEnabledFor(logging.DEBUG):
            text = None if request.prompt is None else self._cut(request.prompt)
            ids = list(self._cut(request.prompt_ids))
            logger.debug("Request %s details: prompt: %r, prompt_token_ids: %s.", request.request_id, text, ids)

    def on_outputs(self, news: OutputNews) -> None:
        for request in news.finished:
            seconds = request.metrics.finished_ts - request.metrics.queued_ts
            for index, reason in enumerate(request.reasons):
                name = request.request_id if len(request.reasons) == 1 else f"{request.request_id} choice {index}"
                logger.info("Finished request %s: %s, %d tokens in %.3f s.", name, reason, request.generated[index], seconds)
                if self._outputs:
                    logger.info("Generated response %s: output: %r.", name, self._cut(request.texts[index]))

    def _cut(self, text: _Text) -> _Text:
        return text if self._most is None else text[: self._most]


def log_piece(name: str, choice: int, text: str, finish_reason: str | None, most: int | None) -> None:
    """Log one piece of a streamed answer; at most `most` characters of it."""
    shown = text if most is None else text[:most]
    line = "Generated response %s (streaming delta): choice: %d, output: %r, finish_reason: %s."
    logger.info(line, name, choice, shown, finish_reason)
