"""Put processed images and videos into a prompt: its placeholders become their tokens."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from quire.features.media.families.base import MediaFamily
from quire.features.media.inputs import field_of
from quire.features.media.store import Processed
from quire.text.tokenizer import Tokenizer
from quire.types.errors import InvalidParameter
from quire.types.media import MODALITIES, MediaItem, Modality


class Placeholders:
    """The placeholders of a model's family, as text and as tokens."""

    def __init__(self, family: MediaFamily, tokenizer: Tokenizer) -> None:
        self.texts = {modality: family.placeholder(modality) for modality in family.modalities}
        self._ids = {modality: tokenizer.encode(text, add_special_tokens=False) for modality, text in self.texts.items()}
        special = tokenizer.special_ids
        self._marks = frozenset(i for ids in self._ids.values() for i in ids if i in special)
        names = (str(tokenizer.convert_ids_to_tokens(i)) for i in self._marks)
        self._typed = tuple(dict.fromkeys([*self.texts.values(), *names]))

    def refuse_typed(self, texts: Iterable[tuple[str, str]]) -> None:
        """Raise an error if a text of a conversation has a placeholder. texts: the place and the text"""
        for where, text in texts:
            for mark in self._typed:
                if mark in text:
                    raise InvalidParameter(
                        f"{where} has {mark}, which stands for an image or a video. Send the media as parts", field_of(where)
                    )

    def refuse_in(self, ids: Sequence[int]) -> None:
        """Raise an error if a prompt without media has a token of a placeholder."""
        if any(mark in ids for mark in self._marks):
            names = " or ".join(self.texts.values())
            raise InvalidParameter(
                f"the prompt has tokens of {names}, and no image or video comes with it. Remove them, or send it too: "
                "in messages of a chat, or in Python as multi_modal_data",
                "prompt",
            )

    def in_text(self, text: str) -> list[tuple[int, Modality]]:
        """Return where placeholders begin in a text, in order."""
        found: list[tuple[int, Modality]] = []
        for modality, mark in self.texts.items():
            start = text.find(mark)
            while start >= 0:
                found.append((start, modality))
                start = text.find(mark, start + len(mark))
        return sorted(found)

    def in_ids(self, ids: Sequence[int]) -> Iterator[tuple[int, int, Modality]]:
        """Yield start, length and modality of each placeholder among tokens, in order."""
        i = 0
        while i < len(ids):
            for modality, mark in self._ids.items():
                if ids[i] == mark[0] and list(ids[i : i + len(mark)]) == mark:
                    yield i, len(mark), modality
                    i += len(mark)
                    break
            else:
                i += 1

    def complete_text(self, text: str, items: Sequence[Processed], family: MediaFamily) -> str:
        """Return the text with what the family writes around placeholders and around the whole prompt."""
        rest, out, end = _by_modality(items), [], 0
        for start, modality in self.in_text(text):
            item = next(rest[modality], None)
            if item is None:
                break  # the count of tokens is checked
            mark = self.texts[modality]
            out += [text[end:start], item.before, mark, item.after]
            end = start + len(mark)
        return family.complete_text("".join([*out, text[end:]]), sum(item.modality == "image" for item in items))

    def expand(self, ids: Sequence[int], items: Sequence[Processed], parameter: str) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Return the tokens of the prompt with those of the items, and the items with their positions."""
        found = list(self.in_ids(ids))
        self._check_counts(Counter(modality for _, _, modality in found), items, parameter)
        rest, out, placed, end = _by_modality(items), list[int](), list[MediaItem](), 0
        for start, length, modality in found:
            item = next(rest[modality])
            out += ids[end:start]
            placed.append(
                MediaItem(
                    modality, len(out), len(item.tokens), item.digest, item.arrays, item.embedded, item.grid, item.interval
                )
            )
            out += item.tokens
            end = start + length
        return [*out, *ids[end:]], tuple(placed)

    def _check_counts(self, found: Counter[Modality], items: Sequence[Processed], parameter: str) -> None:
        given = Counter(item.modality for item in items)
        for modality in MODALITIES:
            if found[modality] == given[modality]:
                continue
            if parameter == "messages":
                raise InvalidParameter(
                    f"the chat template writes {found[modality]} placeholders for {given[modality]} {modality}s. It does not "
                    f"read {modality}s in messages of such roles, or a text has a placeholder",
                    parameter,
                )
            mark = self.texts.get(modality, "")
            raise InvalidParameter(
                f"the prompt must have one {mark} for each {modality}: it has {found[modality]}, and {given[modality]} "
                f"{modality}s came with it",
                parameter,
            )


def _by_modality(items: Sequence[Processed]) -> dict[Modality, Iterator[Processed]]:
    return {modality: iter([item for item in items if item.modality == modality]) for modality in MODALITIES}
