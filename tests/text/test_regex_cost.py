import pytest

from quire.text.other_tokenizers import PRE_TOKENIZERS
from quire.text.regex_cost import is_cheap


def test_expressions_of_known_families_are_cheap() -> None:
    assert [(name, pattern) for name, row in PRE_TOKENIZERS.items() for pattern in row.patterns if not is_cheap(pattern)] == []


@pytest.mark.parametrize(
    "expression",
    [
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re)?|\s+(?!\S)|\s+",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
        r"\d{1,3}(?=(?:\d{3})*\b)",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ],
)
def test_other_common_expressions_are_cheap(expression: str) -> None:
    assert is_cheap(expression)


@pytest.mark.parametrize(
    "expression",
    [
        r"(x+x+)+y", r"(?:a|a)*b", r"a*a*b", r"(a?){30}a{30}", r"a{1,99}+b", r"(\w+)\1", r"(?:a{1,9}){1,9}b", r"(?~abc)",
        r"(?:(x+x+)+y|.)", r"a?a?a?a?a?a?a?aaaaaaa", r"(a|aa)+$", r"[[]a*a*b", r"(a*)*", r"a**", r"(?:a(?:b|c+)){2}",
        r"a*(?:b|a*)c", r"(a*b", r"a)", r"[a", "\\",
    ],
)  # fmt: skip
def test_expressions_that_may_backtrack_are_not(expression: str) -> None:
    assert not is_cheap(expression)
