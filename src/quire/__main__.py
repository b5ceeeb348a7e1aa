"""`python -m quire`, where the script `quire` is not on the path."""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
