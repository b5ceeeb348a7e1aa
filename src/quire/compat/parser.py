"""The argument parser of programs written for vLLM."""

from quire.cli.parser import CommandParser


class FlexibleArgumentParser(CommandParser):
    """`--a_b` is `--a-b`, flags may have dots, `--config FILE` holds flags. Unknown flags are left to parse_known_args."""

    def _refuse(self, text: str) -> None:  # type: ignore[override]
        """parse_args refuses them all."""
