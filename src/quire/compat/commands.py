"""vLLM's argument parser and the module that starts its server."""

import sys
from collections.abc import Sequence

from quire.cli.main import main as quire
from quire.cli.parser import CommandParser


class FlexibleArgumentParser(CommandParser):
    """`--a_b` is `--a-b`, flags may have dots, `--config FILE` holds flags. Unknown flags are left to parse_known_args."""

    def _refuse(self, text: str) -> None:  # type: ignore[override]
        """Do nothing: parse_args refuses all unknown flags together."""


def serve(argv: Sequence[str] | None = None) -> int:
    """Run `python -m quire.entrypoints.openai.api_server --model MODEL` as `quire serve --model MODEL`."""
    return quire(["serve", *(sys.argv[1:] if argv is None else argv)])
