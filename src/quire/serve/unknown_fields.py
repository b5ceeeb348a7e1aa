"""Fields of requests that no protocol has: ignored, and named in the log, once each."""

import difflib
import logging
from collections.abc import Iterable

from pydantic import BaseModel

logger = logging.getLogger(__name__)

MOST_NAMES, LONGEST_NAME = 64, 64  # clients choose them


class UnknownFields:
    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, body: BaseModel, names: Iterable[str]) -> None:
        for name in names:
            name = name[:LONGEST_NAME]
            if name in self._told or len(self._told) == MOST_NAMES:
                continue
            self._told.add(name)
            near = difflib.get_close_matches(name, type(body).model_fields, n=1)
            hint = f"; did its client mean {near[0]!r}?" if near else ""
            logger.warning("a request has the field %s, which is unknown and ignored%s (told once)", ascii(name), hint)
            if len(self._told) == MOST_NAMES:
                logger.warning("%d unknown fields have been named; others are ignored without a word", MOST_NAMES)
