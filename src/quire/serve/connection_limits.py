"""All connections of one server together: how many there may be, how much of what they send is kept unfinished, and how much
that they do not read.

When there is no room, those that only wait make room first: connections between two requests, or in the middle of a head. A
connection for which there is none even so is told to come back. Descriptors are left over for whatever else the process has to
open, because an engine that cannot be restarted for want of them is lost to everybody.
"""

import logging
import resource
from collections.abc import Callable
from typing import Protocol

from quire.serve.limits import ServerLimits

MOST_DESCRIPTORS = 2**16  # more are not asked for, whatever the system would give
ROOM = 7 / 8  # how full unfinished bodies, or unread answers, may leave their share, once it was too full
UNREAD_BYTES = "unread_bytes"  # in the state of a request: a function that returns what waits for the client in the API

logger = logging.getLogger(__name__)


class Member(Protocol):
    """One connection."""

    body_size: int  # bytes so far of a body that is not finished
    body_age: int  # seconds that it has been coming
    unread: int  # bytes of an answer that wait for the client
    stalled: int  # seconds in which the client has read nothing of them

    def look(self) -> None:
        """A second has passed."""

    def make_room(self) -> None:
        """It only waits, and is closed."""

    def give_up_body(self) -> None:
        """What it sends takes too much room for too long."""

    def close_unread(self) -> None:
        """What its client does not read takes too much memory."""


class ConnectionLimits:
    def __init__(self, limits: ServerLimits, descriptors: int) -> None:
        self.limits = limits
        self.most = min(limits.connections, descriptors - min(limits.spare_descriptors, descriptors // 2))
        self._members: set[Member] = set()
        self._idle: dict[Member, None] = {}  # in the order in which they began to wait
        self._sending: set[Member] = set()
        self.unfinished = 0  # bytes
        self.on_closed_unread: Callable[[], None] = lambda: None  # called for every connection that is closed as unread

    def __len__(self) -> int:
        return len(self._members)

    def enter(self, member: Member) -> bool:
        """False: there is no room."""
        full = len(self._members) >= self.most
        if full and self._idle:
            next(iter(self._idle)).make_room()
        elif full:
            return False
        self._members.add(member)
        self.idle(member)
        return True

    def leave(self, member: Member) -> None:
        self._members.discard(member)
        self.busy(member)
        self.end_body(member)

    def idle(self, member: Member) -> None:
        if member in self._members:
            self._idle[member] = None

    def busy(self, member: Member) -> None:
        self._idle.pop(member, None)

    def begin_body(self, member: Member) -> None:
        self._sending.add(member)

    def add_body(self, member: Member, size: int) -> None:
        member.body_size += size
        self.unfinished += size
        if self.unfinished > self.limits.unfinished_bytes:
            self._make_room_for_bodies()

    def end_body(self, member: Member) -> None:
        self._sending.discard(member)
        self.unfinished -= member.body_size
        member.body_size = member.body_age = 0

    def look(self) -> None:
        """Once a second. Seconds are counted by these calls: nobody pays for a time in which the loop did not listen."""
        for member in self._sending:
            member.body_age += 1
        for member in tuple(self._members):
            member.look()
            if member.unread > self.limits.unread_bytes and member.stalled > self.limits.stalled_seconds:
                self._close_unread(member)
        self._make_room_for_answers()

    def _make_room_for_bodies(self) -> None:
        """Whoever holds the most for the longest goes first: a body that comes quickly is not kept out by those that do not."""
        worst = sorted(self._sending, key=lambda member: member.body_size * (1 + member.body_age), reverse=True)
        for member in worst:
            if self.unfinished <= ROOM * self.limits.unfinished_bytes:
                return
            member.give_up_body()

    def _make_room_for_answers(self) -> None:
        """Close those first that hold much and have read nothing for long: slow clients that read are hurt last."""
        total, most = sum(member.unread for member in self._members), self.limits.all_unread_bytes
        if total <= most:
            return
        for member in sorted(self._members, key=lambda member: member.unread * (1 + member.stalled), reverse=True):
            if total <= ROOM * most:
                return
            total -= member.unread
            self._close_unread(member)

    def _close_unread(self, member: Member) -> None:
        logger.warning(
            "closed a connection: its client left %d bytes of the answer unread, and read nothing for %d s",
            member.unread, member.stalled,
        )  # fmt: skip
        self.on_closed_unread()
        member.close_unread()


def raise_descriptor_limit() -> int:
    """As many descriptors as the system allows; returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a system that promises more than it gives
        return soft
    return wanted
