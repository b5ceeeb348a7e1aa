"""`python -m quire.compat SCRIPT ARGS...`: run a script, a module or a command so that `import vllm` means Quire."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.compat import SITE

USAGE = "usage: python -m quire.compat {SCRIPT | -m MODULE | -c CODE | COMMAND} [ARGS...]"


def main(argv: Sequence[str]) -> int:
    """Replace this process. PYTHONPATH holds for the processes that the program starts, too."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, "", "Runs a program written for vLLM with Quire: import vllm means Quire.", sep="\n")
        return 0 if argv else 2
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    if argv[0] in ("-m", "-c") or Path(argv[0]).exists():
        os.execve(sys.executable, [sys.executable, *argv], environment)
    if (command := shutil.which(argv[0])) is not None:
        os.execve(command, list(argv), environment)
    print(f"quire.compat: SCRIPT must be a file, -m MODULE or a command; got {argv[0]!r}. {USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
