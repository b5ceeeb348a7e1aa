"""What the front end costs: many streams through a real server whose engine needs no model.

    python benchmarks/front_end.py MODEL [--streams 1000] [--tokens 128]

Starts `quire serve MODEL` with the executor that only pretends to compute, opens all streams at once with `quire bench serve`,
has every token's id checked, and prints the processor time that the API process and the engine process took for each token.
Of MODEL only the configuration and the tokenizer are used. Linux only: processor times come from /proc.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--input-len", type=int, default=32)
    options = parser.parse_args()
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "quire.cli.main", "serve", options.model, "--port", str(port),
         "--distributed-executor-backend", "fake", "--max-num-seqs", str(options.streams), "--disable-uvicorn-access-log"],
    )  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as directory:
            warm = bench(port, 32, 16, options.input_len, Path(directory, "warm.json"), seed=1)
            if warm["failed"]:
                return 1
            engine = child(server.pid)
            before = {pid: processor_seconds(pid) for pid in (server.pid, engine)}
            result = bench(port, options.streams, options.tokens, options.input_len, Path(directory, "result.json"), seed=2)
            spent = {pid: processor_seconds(pid) - before[pid] for pid in before}
        tokens = result["total_output_tokens"]
        for name, pid in (("API process", server.pid), ("engine process", engine)):
            print(f"{name:<16}{spent[pid]:6.2f} s of processor time,{spent[pid] / tokens * 1e6:7.1f} us per token")
        return 0 if result["completed"] == options.streams and tokens == options.streams * options.tokens else 1
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def bench(port: int, streams: int, tokens: int, input_len: int, path: Path, seed: int) -> dict[str, float]:
    subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "bench", "serve", "--port", str(port), "--ready-check-timeout-sec", "120",
         "--num-prompts", str(streams), "--random-input-len", str(input_len), "--random-output-len", str(tokens),
         "--ignore-eos", "--extra-body", '{"return_token_ids": true}', "--seed", str(seed), "--save-result", str(path)],
        check=True,
    )  # fmt: skip
    result: dict[str, float] = json.loads(path.read_text())
    return result


def processor_seconds(pid: int) -> float:
    """User and system time of all threads so far."""
    fields = stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICK


def child(pid: int) -> int:
    """The engine process, of the server's children."""
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    children = [process for process in processes if stat(process)[1:2] == [str(pid)]]
    (engine,) = [process for process in children if b"quire.engine.process" in Path(f"/proc/{process}/cmdline").read_bytes()]
    return engine


def stat(pid: int) -> list[str]:
    """What /proc says of a process, after its name; nothing where it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
