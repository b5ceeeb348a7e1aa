"""Count the files, functions and lines of Quire that run for one request.

python scripts/request_path.py MODEL           one `LLM.generate`
python scripts/request_path.py MODEL --chat    one streamed chat over HTTP, in all processes of `quire serve`
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HERE = str(Path(__file__).parent.parent / "src" / "quire")
SETTLE_S = 15.0  # until processes that start in the background have started
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0.8, "top_p": 0.9, "seed": 1}

# runs in every process of the server: records functions between the files `begin` and `end`
RECORDER = """
import json, os, sys, threading, time
folder, here, ran = os.environ["REQUEST_PATH"], os.environ["REQUEST_PATH_OF"], set()
def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & 1 and code.co_filename.startswith(here) and not code.co_name.startswith("<"):
        ran.add((code.co_filename, code.co_firstlineno))
def watch():
    while not os.path.exists(f"{folder}/begin"):
        time.sleep(0.05)
    ran.clear()
    while not os.path.exists(f"{folder}/end"):
        time.sleep(0.05)
    with open(f"{folder}/{os.getpid()}.json", "w") as file:
        json.dump(sorted(ran), file)
def start():
    threading.Thread(target=watch, daemon=True).start()
threading.setprofile(note)
sys.setprofile(note)
start()
os.register_at_fork(after_in_child=start)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the lines of each file")
    asked = parser.parse_args()
    report(trace_chat(asked.model) if asked.chat else trace_generate(asked.model), asked.list)


def report(ran: set[tuple[str, int]], listed: bool) -> None:
    """Print the counts of functions, given by their file and first line."""
    lines: set[tuple[str, int]] = set()
    for name, first in ran:
        source = Path(name).read_text().splitlines(keepends=True)
        lines |= {(name, first + i) for i in range(len(inspect.getblock(source[first - 1 :])))}
    files = sorted({name for name, _ in ran})
    for name in files if listed else ():
        print(f"{sum(one == name for one, _ in lines):5d} {name.removeprefix(HERE + '/')}")
    print(f"{len(files)} files, {len(ran)} functions, {len(lines)} lines of those functions")


def trace_generate(model: str) -> set[tuple[str, int]]:
    from quire import LLM, SamplingParams

    params = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True)
    llm = LLM(model, device="cpu", max_num_seqs=4, kv_cache_memory_bytes=4 << 20)
    llm.generate(["hello there"], params, use_tqdm=False)  # warm up
    ran: set[CodeType] = set()

    def note(frame: FrameType, _event: str, _argument: Any) -> None:
        if frame.f_code.co_filename.startswith(HERE) and not frame.f_code.co_name.startswith("<"):
            ran.add(frame.f_code)

    threading.settrace(note)
    sys.settrace(note)
    llm.generate(["the quick brown fox"], params, use_tqdm=False)
    sys.settrace(None)
    threading.settrace(None)
    return {(code.co_filename, code.co_firstlineno) for code in ran}


def trace_chat(model: str) -> set[tuple[str, int]]:
    import httpx

    with tempfile.TemporaryDirectory() as name:
        folder, socket = Path(name), Path(name) / "socket"
        (folder / "sitecustomize.py").write_text(RECORDER)
        paths = [name, str(Path(HERE).parent), os.environ.get("PYTHONPATH", "")]
        recorded = {"REQUEST_PATH": name, "REQUEST_PATH_OF": HERE, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        flags = ["--device", "cpu", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(32 << 20), "--uds", str(socket)]
        server = subprocess.Popen([sys.executable, "-m", "quire", "serve", model, *flags], env=os.environ | recorded)
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://quire", timeout=600) as client:
                wait_ready(client, server)
                for _ in range(2):  # warm up
                    client.post("/v1/chat/completions", json={**CHAT, "stream": True}).raise_for_status()
                    time.sleep(SETTLE_S)
                (folder / "begin").touch()
                time.sleep(0.5)
                client.post("/v1/chat/completions", json={**CHAT, "stream": True}).raise_for_status()
                (folder / "end").touch()
                time.sleep(2.0)
            return set(read_records(folder.glob("*.json")))
        finally:
            server.terminate()
            server.wait()


def wait_ready(client: Any, server: "subprocess.Popen[bytes]") -> None:
    import httpx

    while server.poll() is None:
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit("the server ended")


def read_records(paths: Iterable[Path]) -> Iterable[tuple[str, int]]:
    for path in paths:
        yield from ((name, first) for name, first in json.loads(path.read_text()))


if __name__ == "__main__":
    main()
