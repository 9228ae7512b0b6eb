"""Where trainers connect: the agent's Unix socket. One line a message; who does not say a Hello that fits is sent away."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import structlog
from opentinker.trainer_agent.control import SOCKET_NAME
from opentinker.trainer_agent.protocol import LINE_BYTES_MAX, Event, Hello, Lease, ProtocolError, decode_event, encode_line

__all__ = ["Listener"]

Place = tuple[str, int, int]  # job_uid, attempt_number, rank
_HELLO_TIMEOUT_S = 5.0


class Listener:
    """Accepts trainers, passes on what they say, and tells them their lease."""

    def __init__(self, directory: Path, knows: Callable[[Hello], bool], said: Callable[[Place, Event], None]) -> None:
        """`knows`: whether the Hello is that of a trainer of ours. `said`: called for each message, Hello included."""
        self._directory, self._knows, self._said = directory, knows, said
        self._server: asyncio.Server | None = None
        self._writers: dict[Place, asyncio.StreamWriter] = {}

    async def start(self) -> None:
        """Listen. An earlier agent's socket is replaced: the lock on the folder says that it is gone."""
        path = self._directory / SOCKET_NAME
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        folder = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # through /proc, since a socket's path may have 107 bytes only
            self._server = await asyncio.start_unix_server(self._serve, f"/proc/self/fd/{folder}/{SOCKET_NAME}", limit=LINE_BYTES_MAX)
            os.chmod(path, 0o600)
        finally:
            os.close(folder)

    def renew(self, place: Place, valid_until_ns: int) -> None:
        """Tell a trainer how long it may go on. One that reads nothing is left to its old lease."""
        writer = self._writers.get(place)
        if writer is not None and writer.transport.get_write_buffer_size() < LINE_BYTES_MAX:
            writer.write(encode_line(Lease(valid_until_ns=valid_until_ns)))

    async def stop(self) -> None:
        """Close every connection: to a trainer this is an agent that is gone."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place: Place | None = None
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = decode_event(await reader.readuntil(b"\n"))
            if not isinstance(hello, Hello) or not self._knows(hello):
                structlog.get_logger().warning("a process that is no trainer of this agent was sent away", said=type(hello).__name__)
                return
            place = (hello.job_uid, hello.attempt_number, hello.rank)
            self._writers[place] = writer
            self._said(place, hello)
            while line := await reader.readline():
                self._said(place, decode_event(line))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ConnectionError, ProtocolError, ValueError) as error:
            if not isinstance(error, (asyncio.IncompleteReadError, ConnectionError)):
                structlog.get_logger().warning("a trainer's connection was closed", place=place, error=str(error))
        finally:
            if place is not None and self._writers.get(place) is writer:
                del self._writers[place]
            writer.close()
