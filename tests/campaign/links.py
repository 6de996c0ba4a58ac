# SPDX-License-Identifier: Apache-2.0
"""Links between readers and ranks, which can be made bad while bytes go over them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

#: What a link can do to what goes over it. "swallow": the reader hears nothing any more, also not
#: that the rank has died.
WAYS = ("cut", "half", "stall", "drip", "flip", "swap", "swallow")
_PIECE = 65536
_DRIP = 2048  # bytes of a piece that go one by one


class Link:
    """Stands before one rank, on a port of its own; *way* may be set from any thread."""

    def __init__(self, target: int, seed: int) -> None:
        self.rank, self.target, self.port = target, target, 0
        self.way = "pass"
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_PIECE)
        self.port = server.sockets[0].getsockname()[1]

    async def _accept(self, here: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        writers = {back}
        try:
            there, on = await asyncio.open_connection("127.0.0.1", self.target, limit=_PIECE)
            writers.add(on)
            self._writers |= writers
            await asyncio.gather(self._pump(here, on), self._pump(there, back))
        except OSError:
            pass
        finally:
            self._writers -= writers
            for writer in writers:
                writer.transport.abort()

    async def _pump(self, come: asyncio.StreamReader, go: asyncio.StreamWriter) -> None:
        while piece := await come.read(_PIECE):
            while self.way == "stall":
                await asyncio.sleep(0.002)
            if self.way == "cut":
                raise ConnectionResetError
            if self.way == "half":
                break
            if self.way != "swallow":
                await self._pass(piece, go)
        while self.way == "swallow":  # the end is not told
            await asyncio.sleep(0.002)
        with contextlib.suppress(OSError):
            go.write_eof()

    async def _pass(self, piece: bytes, go: asyncio.StreamWriter) -> None:
        if self.way == "flip" and self._random.random() < 0.2:
            changed = bytearray(piece)
            changed[self._random.randrange(len(piece))] ^= 1 << self._random.randrange(8)
            piece = bytes(changed)
        elif self.way == "swap" and len(piece) > 1:
            middle = self._random.randrange(1, len(piece))
            piece = piece[middle:] + piece[:middle]
        elif self.way == "drip":
            for at in range(min(len(piece), _DRIP)):
                go.write(piece[at : at + 1])
                await go.drain()
            piece = piece[_DRIP:]
        go.write(piece)
        await go.drain()

    def cut_all(self) -> None:
        """Resets every connection. Loop's thread."""
        for writer in list(self._writers):
            writer.transport.abort()


class Links:
    """One link a rank, in a thread of their own."""

    def __init__(self, targets: list[int], seed: int) -> None:
        self._loop = asyncio.new_event_loop()
        self.links = [Link(target, seed + at) for at, target in enumerate(targets)]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        if not self._ready.wait(30):
            raise TimeoutError("the links do not listen")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        for link in self.links:
            self._loop.run_until_complete(link.open())
        self._ready.set()
        self._loop.run_forever()

    def spoil(self, at: int, way: str) -> None:
        self.links[at].way = way
        if way == "cut":
            self._loop.call_soon_threadsafe(self.links[at].cut_all)

    def lead(self, at: int, port: int) -> None:
        """To somebody else than the rank, until heal()."""
        self.links[at].target = port
        self._loop.call_soon_threadsafe(self.links[at].cut_all)

    def heal(self, at: int) -> None:
        """As it was; connections whose bytes are lost, or go to somebody else, are cut."""
        link = self.links[at]
        lossy = link.way in ("swallow", "half") or link.target != link.rank
        link.target = link.rank
        link.way = "pass"
        if lossy:
            self._loop.call_soon_threadsafe(link.cut_all)
