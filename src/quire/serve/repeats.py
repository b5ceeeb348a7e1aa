"""Tool calls that a model repeats because a grammar lets it write one more."""

from quire.text.parse.events import Event, ToolArguments, ToolEnd, ToolStart


class RepeatFilter:
    """Withhold a call while it equals the beginning of the call before it.

    A call that differs is passed on as soon as it does. A call with the same name and the same arguments is dropped, and
    `repeated` is set: nothing after it is worth generating. So is a call that the text breaks off before it differs.
    """

    def __init__(self) -> None:
        self.repeated = False
        self._previous: tuple[str, str] | None = None
        self._name = self._arguments = ""
        self._withheld: list[Event] = []

    def feed(self, event: Event) -> list[Event]:
        """Return the events that may be passed on now."""
        if isinstance(event, ToolStart):
            self._name, self._arguments = event.name, ""
        elif isinstance(event, ToolArguments):
            self._arguments += event.json
        elif not isinstance(event, ToolEnd):
            return [event]
        if not self._withheld and not isinstance(event, ToolStart):
            return self._passed(event)
        self._withheld.append(event)
        if not self._same_so_far(isinstance(event, ToolEnd) and event.complete):
            events, self._withheld = self._withheld, []
            return [*events[:-1], *self._passed(events[-1])]
        if isinstance(event, ToolEnd):
            self.repeated |= event.complete
            self._withheld = []
        return []

    def _same_so_far(self, complete: bool) -> bool:
        if self._previous is None or self._name != self._previous[0]:
            return False
        before = self._previous[1]
        return self._arguments == before if complete else before.startswith(self._arguments)

    def _passed(self, event: Event) -> list[Event]:
        if isinstance(event, ToolEnd):
            self._previous = (self._name, self._arguments)
        return [event]
