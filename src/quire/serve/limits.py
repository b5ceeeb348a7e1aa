"""Limits on what a client, a connection and a request may use. They are checked before any work is done.

Those of the model (context length, vocabulary, max_logprobs) are checked in `text/prompts.py` and `text/inputs.py`.
"""

import logging
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.types.checks import shown
from quire.types.errors import ConfigError, InvalidParameter
from quire.types.sampling import MAX_BAD_WORDS, MAX_LOGPROB_TOKEN_IDS

MAX_STOP_STRINGS = 4
MAX_STOP_STRINGS_VARIABLES = ("QUIRE_MAX_STOP_STRINGS", "VLLM_MAX_STOP_STRINGS")


def max_stop_strings() -> int:
    """Return how many stop strings one HTTP request may have: the environment's value, or MAX_STOP_STRINGS."""
    for name in MAX_STOP_STRINGS_VARIABLES:
        if text := os.environ.get(name):
            if not text.isascii() or not text.isdigit():
                raise ConfigError(f"{name} must be an integer of at least 0; got {text!r}. Remove it for {MAX_STOP_STRINGS}.")
            return int(text)
    return MAX_STOP_STRINGS


@dataclass(frozen=True)
class ServerLimits:
    # of a connection
    url_bytes: int = 16 * 2**10  # 414
    header_bytes: int = 64 * 2**10  # 431; of the head of a request, and of the framing around the chunks of a body
    headers: int = 256  # 431
    pipelined: int = 16  # requests received before the previous one is answered
    head_seconds: int = 20  # 408; from the first byte of a request, or from the connection's beginning, to the end of its head
    body_seconds: int = 20  # 408; in which `body_progress` bytes of a body come, or all that is left of it
    body_progress: int = 16 * 2**10
    read_seconds: int = 300  # in which a client reads something of what was written for it
    unread_bytes: int = 8 * 2**20  # of an answer whose client has read nothing for `stalled_seconds`
    stalled_seconds: int = 60
    linger_seconds: int = 5  # in which a client that was answered early may finish sending

    # of all connections together
    connections: int = 16 * 2**10
    spare_descriptors: int = 128  # reserved for the rest of the process, above all for a restart of the engine
    unfinished_bytes: int = 256 * 2**20  # 503; of bodies that are being received
    unparsed_bytes: int = 256 * 2**20  # 503; of large bodies that wait to be parsed

    all_unread_bytes: int = 512 * 2**20  # of answers that wait for their clients

    viewers: int = 64  # 503; of /engine/events; of one of several keys, no more than are left for others

    # of the HTTP request
    body_bytes: int = 16 * 2**20  # 413
    media_body_bytes: int = 64 * 2**20  # 413; where the model reads images
    json_depth: int = 64
    json_containers: int = 2**15  # arrays and objects together
    json_values: int = 2**16  # values and names of values, besides integers in long lists
    json_integers: int = 2**22  # in such lists

    # of the work
    prompts: int = 1024
    prompt_characters: int = 8 * 2**20  # of all prompts together
    prompt_tokens: int = 2**21  # of all prompts together
    n: int = 1024
    sequences: int = 4096  # n times prompts
    messages: int = 4096
    message_parts: int = 4096  # of all messages together
    tools: int = 256
    documents: int = 2048  # OpenAI's limit of inputs; of chats and rerankers
    detokenize_tokens: int = 2**20
    stored_responses: int = 1024  # of all clients together; the oldest of the key with the most go first
    stored_bytes: int = 64 * 2**20
    background_responses: int = 64  # of all clients; of one of several keys, no more than are left for others

    # of single parameters: entries
    stop: int = field(default_factory=max_stop_strings)
    stop_token_ids: int = 1024
    logit_bias: int = 1024
    bad_words: int = MAX_BAD_WORDS
    logprob_token_ids: int = MAX_LOGPROB_TOKEN_IDS
    allowed_token_ids: int = 2**18
    chat_template_kwargs: int = 64
    metadata: int = 256

    # of single parameters: characters
    stop_characters: int = 4096
    bad_word_characters: int = 1024
    chat_template_characters: int = 256 * 2**10
    identifier_characters: int = 256


LIMITS = ServerLimits()

# parameters that are lists or objects: the limit of the same name bounds their entries
_COUNTED = (
    "messages", "tools", "documents", "stop", "stop_token_ids", "logit_bias", "bad_words", "logprob_token_ids",
    "allowed_token_ids", "chat_template_kwargs", "metadata",
)  # fmt: skip
_IDENTIFIERS = ("model", "request_id", "cache_salt", "session_id", "user")
# parameters that are strings or lists of them -> the limit that bounds each string
_MEASURED = {
    "stop": "stop_characters",
    "bad_words": "bad_word_characters",
    "chat_template": "chat_template_characters",
    **dict.fromkeys(_IDENTIFIERS, "identifier_characters"),
}


def check_limits(request: Any, limits: ServerLimits = LIMITS) -> None:
    """Check every parameter that has a size limit of its own."""
    given = request.model_fields_set  # what was left out is small
    for name in _COUNTED:
        value = getattr(request, name) if name in given else None
        if isinstance(value, list | dict):
            refuse_more(name, len(value), getattr(limits, name), "entries")
    for name, limit in _MEASURED.items():
        value = getattr(request, name) if name in given else None
        # other types are refused by the protocol's model
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                refuse_more(name, len(text), getattr(limits, limit), "characters")


def check_work(prompts: int, n: int, limits: ServerLimits = LIMITS) -> None:
    refuse_more("prompt", prompts, limits.prompts, "prompts")
    if n < 1:
        raise InvalidParameter(f"n must be between 1 and {limits.n}, got {shown(n)}", "n")
    refuse_more("n", n, limits.n, "completions")
    refuse_more("n", prompts * n, limits.sequences, "completions of all prompts together")


def refuse_more(parameter: str, size: int, most: int, unit: str) -> None:
    if size > most:
        raise InvalidParameter(f"{parameter} may have at most {most} {unit}, got {size}", parameter)


# ---- connections
#
# When there is no room, idle connections are closed first: those between two requests, or in the middle of a head. A connection
# for which there is no room even so gets 503. Descriptors are reserved for the rest of the process: an engine that cannot be
# restarted for lack of descriptors is lost to all clients.

MAX_DESCRIPTORS = 2**16  # the limit is not raised above this
FREED_SHARE = 7 / 8  # of the limit on unfinished or unread bytes that remains in use after connections were closed
UNREAD_BYTES = "unread_bytes"  # in the state of a request: a function that returns what waits for the client in the API

logger = logging.getLogger(__name__)


class LimitedConnection(Protocol):
    """A connection that counts against the limits."""

    body_size: int  # bytes received of an unfinished body
    body_age: int  # seconds since the body began
    unread: int  # bytes of an answer that the client has not read
    stalled: int  # seconds since the client last read

    def tick(self) -> None:
        """Called every second."""

    def make_room(self) -> None:
        """Close this connection, which is idle."""

    def give_up_body(self) -> None:
        """Refuse the unfinished body: it takes too much memory for too long."""

    def close_unread(self) -> None:
        """Close this connection: its unread answer takes too much memory."""


class ConnectionLimits:
    def __init__(self, limits: ServerLimits, descriptors: int) -> None:
        self.limits = limits
        self.most = min(limits.connections, descriptors - min(limits.spare_descriptors, descriptors // 2))
        self._members: set[LimitedConnection] = set()
        self._idle: dict[LimitedConnection, None] = {}  # in the order in which they began to wait
        self._sending: set[LimitedConnection] = set()
        self.unfinished = 0  # bytes
        self.on_closed_unread: Callable[[], None] = lambda: None  # called for every connection that is closed as unread

    def __len__(self) -> int:
        return len(self._members)

    def enter(self, member: LimitedConnection) -> bool:
        """Count the connection; return False if there is no room for it."""
        full = len(self._members) >= self.most
        if full and self._idle:
            next(iter(self._idle)).make_room()
        elif full:
            return False
        self._members.add(member)
        self.idle(member)
        return True

    def leave(self, member: LimitedConnection) -> None:
        self._members.discard(member)
        self.busy(member)
        self.end_body(member)

    def idle(self, member: LimitedConnection) -> None:
        if member in self._members:
            self._idle[member] = None

    def busy(self, member: LimitedConnection) -> None:
        self._idle.pop(member, None)

    def begin_body(self, member: LimitedConnection) -> None:
        self._sending.add(member)

    def add_body(self, member: LimitedConnection, size: int) -> None:
        member.body_size += size
        self.unfinished += size
        if self.unfinished > self.limits.unfinished_bytes:
            self._make_room_for_bodies()

    def end_body(self, member: LimitedConnection) -> None:
        self._sending.discard(member)
        self.unfinished -= member.body_size
        member.body_size = member.body_age = 0

    def tick(self) -> None:
        """Called every second. Seconds are counted by these calls: time in which the event loop was blocked does not count."""
        for member in self._sending:
            member.body_age += 1
        for member in tuple(self._members):
            member.tick()
            if member.unread > self.limits.unread_bytes and member.stalled > self.limits.stalled_seconds:
                self._close_unread(member)
        self._make_room_for_answers()

    def _make_room_for_bodies(self) -> None:
        """Refuse the largest and slowest bodies first, so that slow bodies do not cause the refusal of a fast one."""
        worst = sorted(self._sending, key=lambda member: member.body_size * (1 + member.body_age), reverse=True)
        for member in worst:
            if self.unfinished <= FREED_SHARE * self.limits.unfinished_bytes:
                return
            member.give_up_body()

    def _make_room_for_answers(self) -> None:
        """Close connections with much unread and no read for long first; slow clients that read are closed last."""
        total, most = sum(member.unread for member in self._members), self.limits.all_unread_bytes
        if total <= most:
            return
        for member in sorted(self._members, key=lambda member: member.unread * (1 + member.stalled), reverse=True):
            if total <= FREED_SHARE * most:
                return
            total -= member.unread
            self._close_unread(member)

    def _close_unread(self, member: LimitedConnection) -> None:
        logger.warning(
            "closed a connection: %d bytes of the answer unread, no read for %d s",
            member.unread, member.stalled,
        )  # fmt: skip
        self.on_closed_unread()
        member.close_unread()


def raise_descriptor_limit() -> int:
    """Raise the limit of descriptors as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):  # the system refuses its own hard limit
        return soft
    return limit
