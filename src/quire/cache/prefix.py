"""Content keys of full pages: a chain of SHA-256, so that a key covers its page's tokens and all tokens before them.

    key[0] = sha256(root(salt) + tokens of page 0)        key[i] = sha256(key[i-1] + tokens of page i)

The salt (adapter, media, tenant) enters at the root and thereby into every key of the chain.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256


def root(salt: Sequence[str]) -> bytes:
    """Return the key before the first page. Each part is preceded by its length, so ("ab", "c") and ("a", "bc") differ."""
    digest = sha256(b"quire")
    for part in salt:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def extend_keys(keys: list[bytes], tokens: "array[int]", page_size: int, salt: Sequence[str]) -> None:
    """Append the keys of the full pages of `tokens` that `keys` lacks."""
    count = len(tokens) // page_size
    if len(keys) >= count:
        return
    parent = keys[-1] if keys else root(salt)
    data = tokens[len(keys) * page_size : count * page_size].tobytes()
    width = len(data) // (count - len(keys))
    for start in range(0, len(data), width):
        parent = sha256(parent + data[start : start + width]).digest()
        keys.append(parent)
