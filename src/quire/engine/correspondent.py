"""An engine somewhere else, as whoever watches over it writes to it: commands leave, and reports come, through a mailbox."""

from quire.engine import ipc
from quire.proc.channel import Channel


class Correspondent:
    _mailbox: Channel

    @property
    def fd(self) -> int:
        """Readable when there are reports, or never will be again (`closed`)."""
        return self._mailbox.fileno()

    @property
    def closed(self) -> bool:
        """It will send no more reports."""
        return self._mailbox.closed

    @property
    def full(self) -> bool:
        """It had no room for all commands: `flush` when `fd` can be written."""
        return self._mailbox.full

    def flush(self) -> None:
        self._mailbox.flush()

    def send(self, command: ipc.Command) -> None:
        self.send_frame(ipc.encode(command))

    def send_frame(self, frame: bytes) -> None:
        self._mailbox.send(frame)
