"""The user's constraint on the text of an answer.

Only its types are checked here. Whether the schema, pattern or grammar is valid is found out when it is compiled
(`features/structured/grammar/`).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.types.errors import InvalidParameter
from quire.types.json_text import read_json

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FIELD = "structured_outputs"
MAX_GRAMMAR_BYTES = 1 << 18


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """vLLM's fields; exactly one of the first six is given. `starts_after` and `strict` are extensions of Quire.

    `starts_after` is a sequence of token ids: the answer is unconstrained until it contains them, such as the ids that end a
    model's reasoning.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or EBNF with ::=
    json_object: bool | None = None  # any JSON object
    structural_tag: str | dict[str, Any] | None = None  # free text in which triggers start constrained parts
    disable_fallback: bool = False  # no effect: there is no fallback
    disable_any_whitespace: bool = False  # JSON without spaces and line breaks
    disable_additional_properties: bool | None = None  # JSON objects have only declared keys (None: the same)
    whitespace_pattern: str | None = None  # whitespace between the parts of JSON
    starts_after: list[int] | None = None
    strict: bool = False  # refuse a JSON schema that a grammar cannot fully enforce

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidParameter(f"{FIELD} takes exactly one of {', '.join(CONSTRAINTS)}; got {found}", FIELD)
        self._check_types()
        self._check_options(given[0])

    @property
    def constraint(self) -> str:
        """Return the name of the constraint that is given."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    @property
    def size(self) -> int:
        """Return its size in bytes."""
        try:
            return len(msgspec.msgpack.encode(self))
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            name = self.constraint
            raise InvalidParameter(
                f"{FIELD}.{name} cannot be passed on as an object ({error}): give it as text", FIELD
            ) from None

    def _check_types(self) -> None:
        _check("json", self.json, (str, dict), "a JSON schema, as an object or as its text")
        _check("regex", self.regex, (str,), "a regular expression")
        _check("grammar", self.grammar, (str,), "the text of a grammar")
        _check("json_object", self.json_object, (bool,), "true")
        _check("structural_tag", self.structural_tag, (str, dict), "an object, or its text")
        _check("whitespace_pattern", self.whitespace_pattern, (str,), "a regular expression")
        for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "strict"):
            _check(name, getattr(self, name), (bool,), "true or false")
        choice = self.choice
        if choice is not None and (not isinstance(choice, list) or not choice or not all(isinstance(c, str) for c in choice)):
            raise InvalidParameter(f"{FIELD}.choice must be a list of at least one string, got {choice!r}", FIELD)
        ids = self.starts_after
        if ids is not None and (not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids)):
            raise InvalidParameter(f"{FIELD}.starts_after must be a list of token ids, got {ids!r}", FIELD)

    def _check_options(self, constraint: str) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "strict"):
            if getattr(self, name) and constraint not in ("json", "json_object"):
                raise InvalidParameter(f"{FIELD}.{name} is for json and json_object, not for {constraint}", FIELD)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidParameter(
                f"{FIELD}.whitespace_pattern and disable_any_whitespace contradict each other: leave one of them out",
                FIELD,
            )


def _check(name: str, value: Any, kinds: tuple[type, ...], what: str) -> None:
    if value is not None and not isinstance(value, kinds):
        pydantic = isinstance(value, type) and hasattr(value, "model_json_schema")
        meant = f"; give {value.__name__}.model_json_schema()" if pydantic else ""
        raise InvalidParameter(f"{FIELD}.{name} must be {what}, got {type(value).__name__}{meant}", FIELD)


def as_structured_outputs(value: Any) -> StructuredOutputsParams:
    """Return parameters from the fields of a request's object."""
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise InvalidParameter(f"{FIELD} must be StructuredOutputsParams, got {type(value).__name__}", FIELD)
    unknown = set(value) - set(StructuredOutputsParams.__struct_fields__)
    if unknown:
        known = ", ".join(StructuredOutputsParams.__struct_fields__)
        raise InvalidParameter(f"{FIELD} has no {', '.join(sorted(map(repr, unknown)))}; it has {known}", FIELD)
    return StructuredOutputsParams(**value)


def read_object(name: str, value: str | dict[str, Any]) -> dict[str, Any]:
    """Return a schema or a tag that is given as an object or as text."""
    if isinstance(value, dict):
        return value
    if len(value) > MAX_GRAMMAR_BYTES:
        raise InvalidParameter(
            f"{FIELD}.{name} has {len(value)} characters; at most {MAX_GRAMMAR_BYTES} bytes can be compiled", FIELD
        )
    try:
        parsed = read_json(value)
    except ValueError as error:
        raise InvalidParameter(f"{FIELD}.{name} is not JSON: {error}", FIELD) from None
    if not isinstance(parsed, dict):
        raise InvalidParameter(f"{FIELD}.{name} must be a JSON object, got {type(parsed).__name__}", FIELD)
    return parsed
