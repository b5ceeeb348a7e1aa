"""Content keys of full pages: a chain of SHA-256, so that a key covers its page's tokens and all tokens before them.

    key[0] = sha256(root(salt) + tokens of page 0)        key[i] = sha256(key[i-1] + tokens of page i)

The salt (adapter, tenant) enters at the root and thereby into every key of the chain. Images and videos enter at the page in
which they begin: a page with marks hashes them after its tokens, with their positions in the page.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from hashlib import sha256

from quire.types.media import Mark


def root(salt: Sequence[str]) -> bytes:
    """Return the key before the first page. Each part is preceded by its length, so ("ab", "c") and ("a", "bc") differ."""
    digest = sha256(b"quire")
    for part in salt:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def extend_keys(
    keys: list[bytes], tokens: "array[int]", page_size: int, salt: Sequence[str], marks: Sequence[Mark] = ()
) -> None:
    """Append the keys of the full pages of `tokens` that `keys` lacks. marks: by rising position."""
    count = len(tokens) // page_size
    if len(keys) >= count:
        return
    parent = keys[-1] if keys else root(salt)
    data = tokens[len(keys) * page_size : count * page_size].tobytes()
    width = len(data) // (count - len(keys))
    marked = _by_page(marks, len(keys), page_size) if marks else {}
    for start in range(0, len(data), width):
        content = parent + data[start : start + width]
        if len(keys) in marked:
            content += marked[len(keys)]
        parent = sha256(content).digest()
        keys.append(parent)


def _by_page(marks: Sequence[Mark], page: int, page_size: int) -> Mapping[int, bytes]:
    """Return what is hashed for the marks of each page, from `page` on."""
    found: dict[int, bytes] = {}
    for position, text in marks[bisect_left(marks, (page * page_size, "")) :]:
        index, offset = divmod(position, page_size)
        encoded = text.encode()
        found[index] = found.get(index, b"") + offset.to_bytes(8, "little") + len(encoded).to_bytes(8, "little") + encoded
    return found
