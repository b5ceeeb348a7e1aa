"""Run engines of this machine that another one serves: `quire serve --headless --data-parallel-start-rank N`, or on Ray.

    node 0 ═ TCP ═ a thread for each engine ═ its process

Arguments are node 0's, except for the model's files, which are this command's. The loss of an engine is reported with the
requests that were running, and node 0 starts the next one over a new connection. This process ends with node 0.
"""

import logging
import select
import threading
import time
from dataclasses import replace

import msgspec

from quire.config.args import EngineArgs
from quire.engine import ipc
from quire.engine.child import Child, engine_fork_server, forks_engines
from quire.engine.handshake import Address, cluster_key, connect, keep_alive, own_terms, receive_json, send_json
from quire.proc.channel import Channel
from quire.types.errors import EngineError

POLL_S = 0.1  # between checks of the process
CLOSED_POLL_S = 0.01  # the same, after it has closed its connection
STOPPED_TIMEOUT_S = 0.5  # that it may be stopped (SIGSTOP)
STOP_TIMEOUT_S = 5.0  # for an engine to end by itself, and for its last reports
RECONNECT_S = 0.2  # between two processes of an engine
STOP = ipc.encode(ipc.Stop())

logger = logging.getLogger(__name__)


class NodeAgent:
    """The engines of this machine."""

    def __init__(
        self, args: EngineArgs, first: int, count: int, key: str | None = None, index: int = 0, here: int | None = None
    ) -> None:
        """Run engines `first` to `first + count - 1`.

        args: of the command on this machine.
        key: what machine 0 requires; default: QUIRE_CLUSTER_KEY.
        index: of the first of these engines among the `here` engines that share this machine; default: all are these.
        """
        self._args, self._first, self._count, self._terms = args, first, count, own_terms(args)
        self._key, self._index, self._here = cluster_key() if key is None else key, index, here or count
        self._address: Address = (args.data_parallel_address, args.data_parallel_rpc_port)
        self._fork_server = engine_fork_server()
        self._over = threading.Event()
        self.errors: list[Exception] = []

    def run(self) -> None:
        """Run until node 0 has ended. Raises why the first engine could not reach it."""
        threads = [
            threading.Thread(target=self._run_engine, args=(number,), name=f"quire-engine-{number}", daemon=True)
            for number in range(self._count)
        ]
        if forks_engines(self._args):
            self._fork_server.prepare()  # it imports while this machine waits for node 0
        try:
            for thread in threads:
                thread.start()
            while not self.errors and any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(0.1)
            if self.errors:
                raise self.errors[0]
        finally:
            self._over.set()
            for thread in threads:
                thread.join(STOP_TIMEOUT_S)
            self._fork_server.close()

    def _run_engine(self, number: int) -> None:
        """Run one engine, process after process."""
        try:
            while not self._over.is_set():
                if self._serve(number):
                    return
                self._over.wait(RECONNECT_S)
        except Exception as error:
            self.errors.append(error)

    def _serve(self, number: int) -> bool:
        """Run one process of an engine. Return True if node 0 has ended the engine."""
        engine = self._first + number
        logger.info("engine %d: waiting for machine 0 at %s:%d", engine, *self._address)
        connection = connect(self._address, time.monotonic() + self._args.engine_start_timeout)
        with connection:
            try:
                send_json(connection, {"key": self._key, "engine": engine, "clock": time.monotonic(), **self._terms})
                reply = receive_json(connection, STOP_TIMEOUT_S)
            except (EngineError, OSError):  # node 0 is ending
                return False
            if "refused" in reply:
                raise EngineError(f"machine 0 refused this machine: {reply['refused']}")
            keep_alive(connection)
            channel = Channel(connection, ipc.MAX_FIRST_MESSAGE_BYTES)
            start = self._receive_start(channel)
            channel.allow(ipc.MAX_MESSAGE_BYTES)
            if not isinstance(start, ipc.StartEngine):
                return start is not None
            logger.info("engine %d starts", engine)
            server = self._fork_server.get(self._args.engine_start_timeout)
            child = Child(self._own_args(start.args), engine=self._index + number, serving=start.serving, server=server)
            try:
                return self._relay(channel, child)
            finally:
                child.close()

    def _receive_start(self, channel: Channel) -> ipc.Command | None:
        """Return node 0's command, which may be late while another node has this engine. None: it is gone."""
        while not self._over.is_set() and not channel.closed:
            frame = channel.receive()
            if frame is not None:
                try:
                    return ipc.decode_command(frame)
                except msgspec.MsgspecError as error:
                    raise EngineError(f"{self._address[0]}, port {self._address[1]}, is not machine 0: {error}") from None
            channel.wait(int(1000 * POLL_S))
        self._refuse_fault(channel)
        return None

    def _refuse_fault(self, channel: Channel) -> None:
        if channel.fault:
            raise EngineError(f"{self._address[0]}, port {self._address[1]}, is not machine 0: {channel.fault}")

    def _own_args(self, args: EngineArgs) -> EngineArgs:
        own = self._args
        return replace(
            args,
            model=own.model,
            revision=own.revision,
            download_dir=own.download_dir,
            hf_token=own.hf_token,
            data_parallel_backend="mp",
            data_parallel_size_local=self._here,
            data_parallel_start_rank=0,
        )

    def _relay(self, channel: Channel, child: Child) -> bool:
        """Relay messages until either side is gone. Return True if node 0 ended the engine."""
        channel.send(ipc.encode(ipc.Begun(child.pid)))
        stopped_since: float | None = None
        stopping = False
        while not channel.closed and not self._over.is_set():
            waiting = select.poll()
            waiting.register(channel.fileno(), select.POLLIN | (select.POLLOUT if channel.full else 0))
            if not child.closed:
                waiting.register(child.fd, select.POLLIN | (select.POLLOUT if child.full else 0))
            waiting.poll(1000 * (CLOSED_POLL_S if child.closed else POLL_S))
            channel.flush()
            child.flush()
            while (frame := channel.receive()) is not None:
                stopping = stopping or frame == STOP
                child.send_frame(frame)
            while (frame := child.receive_frame()) is not None:
                channel.send(frame)
            stopped_since = (stopped_since or time.monotonic()) if child.stopped else None
            if stopped_since is not None and time.monotonic() - stopped_since > STOPPED_TIMEOUT_S:
                return self._report_end(channel, child, "SIGSTOP: it was stopped, so it is killed")
            if child.closed and child.ending() is not None:
                self._report_end(channel, child, str(child.ending()))
                return stopping
        self._refuse_fault(channel)
        return stopping

    def _report_end(self, channel: Channel, child: Child, how: str) -> bool:
        """Report the end of an engine to node 0."""
        child.kill()
        logger.info("the engine process %d ended with %s", child.pid, how)
        channel.send(ipc.encode(ipc.Ended(how, sorted(child.in_flight()), child.last_lines())))
        channel.drain(STOP_TIMEOUT_S)
        return False
