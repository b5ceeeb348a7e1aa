"""How long the server's event loop stalls over bodies that cost much: a table with one row per body.

    python benchmarks/loop_stalls.py [--tries 4] [--limit 0.05] [NAME...]

Starts `quire serve` with the fake executor, sends each body of tests/serve/hostile_bodies.py and prints the shortest and the
longest of its longest stalls, in ms. A stall is processor time of the API process between two turns of its event loop. Exits
with 1 if even the shortest is above the limit for some body.
"""

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "serve")]

from hostile_bodies import CASES, PulseServer, make_checkpoint  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *CASES])
    parser.add_argument("--tries", type=int, default=4)
    parser.add_argument("--limit", type=float, default=0.05, help="seconds")
    options = parser.parse_args()
    over = []
    with tempfile.TemporaryDirectory() as directory:
        server = PulseServer(make_checkpoint(Path(directory)), Path(directory, "log"))
        try:
            print(f"{'body':24}{'shortest':>10}{'longest':>10} ms")
            for name in options.names or CASES:
                stalls = [measure(server, name) for _ in range(options.tries)]
                print(f"{name:24}{1000 * min(stalls):10.1f}{1000 * max(stalls):10.1f}", flush=True)
                over += [name] if min(stalls) > options.limit else []
        finally:
            server.close()
    print(f"above {1000 * options.limit:.0f} ms: {', '.join(over) or 'none'}")
    return int(bool(over))


def measure(server: PulseServer, name: str) -> float:
    """Send the body of this name once; return the longest stall in seconds."""
    server.longest_stall()
    response = server.post(name)
    if response.status_code != CASES[name][2]:
        raise SystemExit(f"{name} must be answered with {CASES[name][2]}; got {response.status_code}: {response.text[:300]}")
    return server.longest_stall()


if __name__ == "__main__":
    sys.exit(main())
