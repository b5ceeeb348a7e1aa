"""Server-sent events from bytes as they come. Only `data` matters here."""


class EventReader:
    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that `data` completes."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif self._data and line in (b"", b"\r"):
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return events
