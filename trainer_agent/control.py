"""The trainer's line to its agent: events out, the lease in, over the agent's Unix socket; and what it means when the agent is silent.

One thread does all of it, so that training never waits for an agent. If the agent restarts, the trainer connects again and says Hello with the newest
of each event; the agent adopts it or kills it. Past the lease the trainer pauses; past the lease and the grace without an agent it stops.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from opentinker.trainer_agent.protocol import LINE_BYTES_MAX, Hello, MetricsSample, ProtocolError, decode_lease, encode_line
from pydantic import BaseModel

__all__ = ["SOCKET_NAME", "AgentLine", "Line", "PrintedLine", "connect_in"]

SOCKET_NAME = "agent.sock"
_QUEUE_MAX = 256  # events; with one sample a second this is minutes of a stopped agent, then the oldest samples go
_RECONNECT_S = 0.2
_FLUSH_S = 3.0  # for the last events at the end; result.json has them too


def connect_in(directory: Path) -> socket.socket:
    """Connect to the agent's socket in `directory`. Through /proc, since a socket's path may have 107 bytes only. Raises OSError."""
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(5.0)
        connection.connect(f"/proc/self/fd/{folder}/{SOCKET_NAME}")
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


class Line:
    """What training needs of its agent. `stop_requested` is set by SIGTERM's handler, or here when the agent is lost for good."""

    def __init__(self, lease_valid_until_ns: int) -> None:
        self.stop_requested = threading.Event()
        self.training_began = threading.Event()  # from then on training itself looks at `stop_requested`
        self.agent_lost = False
        self._valid_until_ns = lease_valid_until_ns  # 0: no lease is kept
        self._renewed = threading.Event()

    def send(self, event: BaseModel) -> None:
        """Queue an event. Never waits, never fails."""
        raise NotImplementedError

    def close(self) -> None:
        """Send what is queued, within a bound."""

    @property
    def lease_holds(self) -> bool:
        return self._valid_until_ns == 0 or time.monotonic_ns() < self._valid_until_ns

    def wait_for_lease(self) -> bool:
        """Sleep until the lease holds or a stop is requested. Returns whether it holds."""
        while not self.lease_holds and not self.stop_requested.is_set():
            self._renewed.wait(0.05)
            self._renewed.clear()
        return self.lease_holds

    def renew(self, valid_until_ns: int) -> None:
        self._valid_until_ns = max(self._valid_until_ns, valid_until_ns)
        self._renewed.set()


class PrintedLine(Line):
    """No agent: events are printed on standard output as they would be sent. For running a trainer by hand, and for tests."""

    def __init__(self) -> None:
        super().__init__(0)

    def send(self, event: BaseModel) -> None:
        os.write(1, encode_line(event))


class AgentLine(Line):
    """The line to an agent that listens in `directory`."""

    def __init__(self, directory: Path, hello: Hello, lease_valid_until_ns: int, grace_s: float) -> None:
        super().__init__(lease_valid_until_ns)
        self._directory, self._hello, self._grace_ns = directory, hello, int(grace_s * 1e9)
        self._queue: deque[tuple[bytes, bool]] = deque(maxlen=_QUEUE_MAX)  # lines, and whether each is a sample
        self._newest: dict[str, bytes] = {}  # by type, to be said again after a reconnect
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closing = threading.Event()
        self._silent_since_ns = time.monotonic_ns()
        self._thread = threading.Thread(target=self._run, name="agent-line", daemon=True)
        self._thread.start()

    def send(self, event: BaseModel) -> None:
        line = encode_line(event)
        sample = isinstance(event, MetricsSample)
        with self._lock:
            self._queue.append((line, sample))
            if not sample:
                self._newest[type(event).__name__] = line
        self._wake()

    def close(self) -> None:
        self._closing.set()
        self._wake()
        self._thread.join(_FLUSH_S)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of wakes already
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        while True:
            try:
                with connect_in(self._directory) as connection:
                    with self._lock:
                        first = [(line, False) for line in (encode_line(self._hello), *self._newest.values())]
                        samples = [entry for entry in self._queue if entry[1]]
                        self._queue = deque([*first, *samples][:_QUEUE_MAX], maxlen=_QUEUE_MAX)
                    if self._serve(connection):
                        return
            except OSError:
                pass  # no agent at the moment
            if self._closing.wait(_RECONNECT_S):
                return
            now_ns = time.monotonic_ns()
            if now_ns > max(self._silent_since_ns, self._valid_until_ns) + self._grace_ns:
                self.agent_lost = True
                self.stop_requested.set()
                return

    def _serve(self, connection: socket.socket) -> bool:
        """Read and write until the connection ends. Returns True when all is said and the line may close."""
        received = b""
        while True:
            watched: list[Any] = [connection, self._wake_read]
            readable, _, _ = select.select(watched, [], [], 1.0)
            if self._wake_read in readable:
                os.read(self._wake_read, 4096)
            while self._queue:
                with self._lock:
                    line, _ = self._queue.popleft()
                connection.sendall(line)
            if connection in readable:
                data = connection.recv(65536)
                if not data:
                    self._silent_since_ns = time.monotonic_ns()
                    return False
                received = self._take_leases(received + data)
            if self._closing.is_set() and not self._queue:
                return True

    def _take_leases(self, received: bytes) -> bytes:
        *lines, rest = received.split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise OSError("the agent sends no lines")
        for line in lines:
            try:
                self.renew(decode_lease(line).valid_until_ns)
            except ProtocolError as error:
                raise OSError(str(error)) from error
        return rest
