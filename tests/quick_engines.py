"""Engine processes that start in a blink: a fork server (quire/proc/fork_server.py) forks them, whoever starts them.

    with quick_engines(): AsyncLLM(...)      python quick_engines.py PARENT SOCKET [with-thread]

A forked engine is what a started one is, but for the imports it finds done: a process with its own number, with the environment
and the directory of who starts it. Tests of starting itself start real ones.
"""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

TESTS = Path(__file__).parent
FAULTY = (sys.executable, str(TESTS / "engine" / "faulty_engine.py"))

GRAMMARS_AHEAD = "QUIRE_TEST_GRAMMARS_AHEAD"  # environment: engines start their grammar process as served ones do


@functools.cache
def _server():
    """One for all tests of this process, and gone with it."""
    from patience import PATIENCE
    from quire.engine.child import PRELOADED_MODULES
    from quire.proc import fork_server

    with contextlib.ExitStack() as stack:
        command = fork_server.COMMAND
        stack.callback(setattr, fork_server, "COMMAND", command)
        fork_server.COMMAND = (sys.executable, __file__)
        process = fork_server.ForkServerProcess((*PRELOADED_MODULES, "numpy.ma", "quire.ops.native"))
    atexit.register(process.close)
    deadline = time.monotonic() + PATIENCE
    while not process.usable:
        assert not process.closed and time.monotonic() < deadline, "there is no fork server"
        time.sleep(0.01)
    return process


class _Asking:
    """The fork server, for one engine with a fault."""

    def __init__(self, fault: Sequence[str]) -> None:
        self._fault = fault

    def fork(self, module, argv, descriptors, out):
        told = json.dumps([dict(os.environ), str(Path.cwd()), *self._fault]).encode()
        return _server().fork("quick_engines", [*argv, told.hex()], descriptors, out)


@contextlib.contextmanager
def quick_engines() -> Iterator[None]:
    from quire.engine import client
    from quire.engine.child import COMMAND, Child

    _server()

    def start(args, command=COMMAND, engine=0, serving=True, server=None, ends=None):
        command = tuple(command)
        if server is None and (command == COMMAND or command[:2] == FAULTY):
            server = _Asking(command[2:] if command[:2] == FAULTY else ())
        return Child(args, command, engine, serving, server, ends)

    client.Child = start
    try:
        yield
    finally:
        client.Child = Child


@contextlib.contextmanager
def held_back(supervisor) -> Iterator[None]:
    """A lost engine has no successor as long as this lasts: tests look at what happens meanwhile."""
    restart, over = supervisor._restart, threading.Event()

    async def wait(child):
        while not over.is_set():
            await asyncio.sleep(0.01)
        await restart(child)

    supervisor._restart = wait
    try:
        yield
    finally:
        supervisor._restart = restart
        over.set()


def main(argv: Sequence[str]) -> int:
    """What a fork is: the engine process."""
    from quire.engine import process

    *given, told = argv
    environment, directory, *fault = json.loads(bytes.fromhex(told))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    process.GRAMMARS_AHEAD = GRAMMARS_AHEAD in environment  # hardly any test needs what each would pay for
    if fault:
        sys.path.insert(0, str(TESTS / "engine"))
        import faulty_engine

        faulty_engine.install(*fault)
    return process.main(given)


if __name__ == "__main__":
    from quire.proc import fork_server

    sys.modules["quick_engines"] = sys.modules["__main__"]
    sys.exit(fork_server.main())
