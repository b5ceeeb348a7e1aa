"""`python -m quire.entrypoints.openai.api_server --model MODEL`: the same as `quire serve MODEL`."""

import sys
from collections.abc import Sequence

from quire.cli.main import main as quire


def main(argv: Sequence[str] | None = None) -> int:
    return quire(["serve", *(sys.argv[1:] if argv is None else argv)])
