"""A TCP proxy before the real broker that can swallow its answers: a request arrives, takes effect, and nobody hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import struct

__all__ = ["FETCH", "PRODUCE", "BrokerProxy"]

PRODUCE, FETCH = 0, 1  # Kafka's numbers of the two kinds of request


class BrokerProxy:
    """Forwards bytes. Where the broker names its own address in an answer it is made ours, so that clients stay with the proxy."""

    def __init__(self, bootstrap: str) -> None:
        host, port = bootstrap.rsplit(":", 1)
        self._broker = (host, int(port))
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallowing: set[int] = set()  # kinds of request whose answers nobody gets
        self.swallowed = 0  # how many

    async def __aenter__(self) -> BrokerProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._hang_up()

    async def recover(self) -> None:
        """Answer again. Connections that missed an answer are gone, as after a broken network."""
        self.swallowing = set()
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
        kinds: dict[bytes, int] = {}  # of requests in flight, by correlation id
        for pipe in (self._requests(client_reader, broker_writer, kinds), self._answers(broker_reader, client_writer, kinds)):
            task = asyncio.create_task(pipe)
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kinds: dict[bytes, int]) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                length = await reader.readexactly(4)
                frame = await reader.readexactly(int.from_bytes(length, "big"))
                kinds[frame[4:8]] = int.from_bytes(frame[:2], "big")
                writer.write(length + frame)
                await writer.drain()
        writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kinds: dict[bytes, int]) -> None:
        theirs, ours = (struct.pack(">9si", b"127.0.0.1", port) for port in (self._broker[1], self.port))
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                length = await reader.readexactly(4)
                frame = await reader.readexactly(int.from_bytes(length, "big"))
                if kinds.pop(frame[:4], None) in self.swallowing:
                    self.swallowed += 1
                    continue
                writer.write(length + frame.replace(theirs, ours))
                await writer.drain()
        writer.close()
