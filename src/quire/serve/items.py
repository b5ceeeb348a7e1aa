"""Events as a sequence of items, for the protocols that see an answer so: stretches of text, stretches of reasoning, calls.

One item is open at a time. The changes, in order, are what a stream tells; the items are the whole answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from quire.text.parse.events import Event, Reasoning, Text, ToolArguments, ToolEnd, ToolStart

Kind = Literal["text", "reasoning", "call"]


@dataclass
class Item:
    kind: Kind
    text: str = ""  # of a call: its arguments, JSON
    name: str = ""  # of a call
    id: str = ""  # of a call
    complete: bool = True


@dataclass(frozen=True)
class ItemOpened:
    index: int
    item: Item


@dataclass(frozen=True)
class ItemGrown:
    index: int
    item: Item
    piece: str


@dataclass(frozen=True)
class ItemClosed:
    index: int
    item: Item


Change = ItemOpened | ItemGrown | ItemClosed


@dataclass
class Items:
    items: list[Item] = field(default_factory=list)
    _open: bool = False

    def add(self, events: Iterable[Event]) -> list[Change]:
        changes: list[Change] = []
        for event in events:
            match event:
                case Text(text):
                    self._prose("text", text, changes)
                case Reasoning(text):
                    self._prose("reasoning", text, changes)
                case ToolStart(_, name, call_id):
                    self._start(Item("call", name=name, id=call_id or ""), changes)
                case ToolArguments(_, piece):
                    self._grow(piece, changes)
                case ToolEnd(_, complete):
                    self.items[-1].complete = complete
                    changes += self.close()
        return changes

    def cut(self) -> list[Change]:
        """The length ended the answer: the item it was in is incomplete, and where there is no item, so is an empty text."""
        changes: list[Change] = []
        if not self.items:
            self._start(Item("text"), changes)
        self.items[-1].complete &= not self._open
        return changes + self.close()

    def close(self) -> list[Change]:
        """Nothing more comes, or something else."""
        if not self._open:
            return []
        self._open = False
        return [ItemClosed(len(self.items) - 1, self.items[-1])]

    @property
    def calls(self) -> bool:
        """Are there calls, all of them whole?"""
        calls = [item for item in self.items if item.kind == "call"]
        return bool(calls) and all(item.complete for item in calls)

    @property
    def reasoning(self) -> str:
        return "".join(item.text for item in self.items if item.kind == "reasoning")

    def _prose(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if not self._open or self.items[-1].kind != kind:
            # the line end that parts it from earlier text means nothing where that is another item
            text = text.removeprefix("\n") if any(item.kind == kind for item in self.items) else text
            self._start(Item(kind), changes)
        self._grow(text, changes)

    def _start(self, item: Item, changes: list[Change]) -> None:
        changes += self.close()
        self.items.append(item)
        self._open = True
        changes.append(ItemOpened(len(self.items) - 1, item))

    def _grow(self, piece: str, changes: list[Change]) -> None:
        item = self.items[-1]
        item.text += piece
        if piece:
            changes.append(ItemGrown(len(self.items) - 1, item, piece))
