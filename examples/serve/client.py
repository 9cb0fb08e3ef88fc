"""A small HTTP/1.1 client: one connection, one request after another, nothing else.

A load generator shares the machine with what it measures, so that every microsecond of it is one that the
server does not have; a full client costs ten times as much per request.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import NamedTuple, Self


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def request(method: str, target: str, body: bytes = b"", **headers: str) -> bytes:
    """A request as it goes over the wire. Underscores in names of headers become hyphens."""
    fields = {"host": "loopback", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if body or method == "POST":
        fields["content-length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


class Connection:
    """`async with Connection(host, port) as connection: await connection.ask(request("GET", "/"))`."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    async def ask(self, wire: bytes) -> Reply:
        """Send a request, wait for its whole reply. Cancelled or failed, the connection is dropped.

        A server may close a connection that it kept open, at any time: then once more, on a new one.
        """
        kept = self._open is not None
        try:
            reader = await self.send(wire)
            reply = await self.read(reader)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self.drop()
            if not kept or getattr(error, "partial", b""):
                raise
            return await self.ask(wire)
        except BaseException:
            self.drop()
            raise
        if reply.headers.get("connection") == "close":
            self.drop()
        return reply

    async def send(self, wire: bytes) -> asyncio.StreamReader:
        if self._open is None:
            self._open = await asyncio.open_connection(*self._address)
        reader, writer = self._open
        writer.write(wire)
        await writer.drain()
        return reader

    async def head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ", 2)[1]), {name.lower(): value.strip() for name, value in pairs}

    async def read(self, reader: asyncio.StreamReader) -> Reply:
        status, headers = await self.head(reader)
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while chunk := await self.chunk(reader):
                body += chunk
        else:
            body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Reply(status, headers, body)

    async def chunk(self, reader: asyncio.StreamReader) -> bytes:
        """The next piece of a streaming reply; empty at its end."""
        size = int(await reader.readuntil(b"\r\n"), 16)
        return (await reader.readexactly(size + 2))[:-2]

    def drop(self) -> None:
        """Disconnect, whatever is under way."""
        connected, self._open = self._open, None
        if connected is not None:
            connected[1].transport.abort()
