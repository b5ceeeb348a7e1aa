"""clean_up_tokenization_spaces: English as WordPiece takes it apart, put together again."""

_REPLACED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def clean_up(text: str) -> str:
    for old, new in _REPLACED:
        text = text.replace(old, new)
    return text


class CleanUpStream:
    """The parts told, joined, are the parts fed, joined and cleaned up.

    Where a replacement falls can depend on a text's very first characters (of `' ' ' '` every second one is replaced), so each
    rule is followed from the beginning on, with its own rest held back: never more than one character less than its pattern.
    """

    def __init__(self) -> None:
        self._held = [""] * len(_REPLACED)  # by each rule: what may be the beginning of its pattern

    def feed(self, text: str) -> str:
        return self._pass(text, last=False)

    def finish(self) -> str:
        return self._pass("", last=True)

    def _pass(self, text: str, last: bool) -> str:
        for i, (old, new) in enumerate(_REPLACED):
            *done, rest = (self._held[i] + text).split(old)
            kept = 0 if last else next((n for n in range(len(old) - 1, 0, -1) if rest.endswith(old[:n])), 0)
            self._held[i] = rest[len(rest) - kept :]
            text = new.join([*done, rest[: len(rest) - kept]])
        return text
