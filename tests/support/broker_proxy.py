"""A TCP proxy before the real broker that can swallow its answers: a request arrives, takes effect, and nobody hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import struct

__all__ = ["BrokerProxy"]

_CHUNK = 64 * 1024


class BrokerProxy:
    """Forwards bytes. Where the broker names its own address in an answer it is made ours, so that clients stay with the proxy."""

    def __init__(self, bootstrap: str) -> None:
        host, port = bootstrap.rsplit(":", 1)
        self._broker = (host, int(port))
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallowing = False
        self.swallowed = 0  # bytes of answers that nobody got

    async def __aenter__(self) -> BrokerProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._hang_up()

    async def recover(self) -> None:
        """Answer again. Connections that missed an answer are gone, as after a broken network."""
        self.swallowing = False
        await self._hang_up()

    async def _hang_up(self) -> None:
        pipes = list(self._pipes)
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _accept(self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        broker_reader, broker_writer = await asyncio.open_connection(*self._broker)
        self._writers |= {client_writer, broker_writer}
        for pipe in (self._requests(client_reader, broker_writer), self._answers(broker_reader, client_writer)):
            task = asyncio.create_task(pipe)
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Frame by frame: a frame that is split would hide the address in it."""
        theirs, ours = (struct.pack(">9si", b"127.0.0.1", port) for port in (self._broker[1], self.port))
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                length = await reader.readexactly(4)
                frame = await reader.readexactly(int.from_bytes(length, "big"))
                if self.swallowing:
                    self.swallowed += len(frame)
                    continue
                writer.write(length + frame.replace(theirs, ours))
                await writer.drain()
        writer.close()
