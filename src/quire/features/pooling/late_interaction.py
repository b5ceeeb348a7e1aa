"""Late interaction (ColBERT): queries and documents are read differently, and every token has a vector.

    query      [CLS] [Q] what is a page [SEP] [MASK] [MASK] ...     filled up with mask tokens, which have vectors too
    document   [CLS] [D] a page is a leaf . [SEP]                   punctuation has no vectors

The files say which marker follows the first special tokens, how long texts may be, and to how many tokens queries are filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from quire.features.pooling.host import ModelPooling, Role
from quire.features.pooling.sentence_files import LateInteraction
from quire.text.tokenizer import Tokenizer
from quire.types.errors import ModelError
from quire.types.prompts import Extras, Prompt


@dataclass(frozen=True)
class RoleReader:
    """How texts of one role become prompts."""

    text: str  # before each text
    marker: int | None  # token id after the first special tokens
    most: int  # tokens of a prompt, before it is filled up
    fill: int  # tokens of a prompt that is filled up; 0: none is
    filler: int
    attended: bool  # tokens attend to those that fill the prompt
    skipped: tuple[int, ...]  # tokens without vectors
    before: int  # special tokens before a text

    @property
    def room(self) -> int:
        """Return the most tokens without the marker."""
        return self.most - (self.marker is not None)

    def complete(self, prompt: Prompt) -> Prompt:
        """Return a tokenized text with marker and mask tokens."""
        ids = list(prompt.ids)
        if self.marker is not None:
            ids.insert(self.before, self.marker)
        added = max(0, self.fill - len(ids))
        ids += [self.filler] * added
        extras = replace(prompt.extras, unattended=0 if self.attended else added, skipped=self.skipped)
        return replace(prompt, ids=ids, extras=extras)


def find_role(pooling: ModelPooling, name: str | None) -> Role | None:
    """Return the role that `prompt_name` stands for; None: the model reads queries and documents alike."""
    if pooling.late is None:
        return None
    return "query" if name == "query" else "document" if name == "document" else None


def role_reader(tokenizer: Tokenizer, pooling: ModelPooling, role: Role, longest: int) -> RoleReader:
    """longest: tokens of the model's context"""
    assert pooling.late is not None
    return _reader(tokenizer, pooling.late, pooling.before_role(role), role, longest)


@lru_cache(maxsize=16)
def _reader(tokenizer: Tokenizer, late: LateInteraction, prompt: str, role: Role, longest: int) -> RoleReader:
    marker, text = _split_marker(tokenizer, prompt)
    limit = late.query_length if role == "query" else late.document_length
    most, fill = min(limit or longest, longest), 0
    if role == "query" and late.fill:
        fill = min(late.fill, longest)
        most = fill if late.cut else max(most, fill) if limit else longest
    skipped = _ids(tokenizer, late.skipped_words) if role in late.skipped_roles else ()
    return RoleReader(
        text,
        marker,
        most,
        fill,
        _filler(tokenizer, late) if fill else 0,
        late.attended,
        skipped,
        len(tokenizer.template.before),
    )


def _split_marker(tokenizer: Tokenizer, prompt: str) -> tuple[int | None, str]:
    """Return the token that a prompt begins with, if the vocabulary has the whole prompt or its first word, and the rest."""
    words = prompt.split(maxsplit=1)
    for marker in (prompt, *words[:1]):
        found = _exact(tokenizer, marker)
        if marker and found is not None and (found in tokenizer.special_ids or marker.startswith("[")):
            return found, prompt.removeprefix(marker).lstrip(" ")
    return None, prompt


def _filler(tokenizer: Tokenizer, late: LateInteraction) -> int:
    token = late.filler or tokenizer.special_tokens_map.get("mask_token") or tokenizer.eos_token or ""
    found = _exact(tokenizer, token)
    if found is None:
        raise ModelError(f"queries are filled up with the token {token!r}, which the tokenizer does not have")
    return found


def _ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[int, ...]:
    found = (_exact(tokenizer, word) for word in words)
    return tuple(sorted({each for each in found if each is not None}))


def _exact(tokenizer: Tokenizer, token: str) -> int | None:
    found = tokenizer.convert_tokens_to_ids(token) if token else None
    return found if found is not None and tokenizer.token(found) == token else None


def with_role(extras: Extras, prompt: Prompt) -> Extras:
    """Return extras with those that a role gave the prompt."""
    own = prompt.extras
    return replace(extras, segment=own.segment, unpooled=own.unpooled, unattended=own.unattended, skipped=own.skipped)
