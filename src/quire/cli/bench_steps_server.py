"""The server of `quire bench steps --front-end`: `python -m quire.cli.bench_steps_server PARENT FLAG ... [with-thread]`.
Whatever the environment says of keys is not for it."""

import os
import sys
from collections.abc import Sequence

from quire.proc.spawn import WITH_THREAD, end_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    parent, *flags = sys.argv[1:] if argv is None else argv
    if WITH_THREAD in flags[-1:]:
        end_with_parent()
        flags.pop()
    if os.getppid() != int(parent):  # it ended before that
        return 1
    from quire.cli.main import main as quire

    return quire(["serve", *flags, "--no-auth"])


if __name__ == "__main__":
    sys.exit(main())
