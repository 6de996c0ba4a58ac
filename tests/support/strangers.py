# SPDX-License-Identifier: Apache-2.0
"""What strangers do to a rank whose port they reach. Each function of ATTACKS never returns: it is
run in a process of its own, and killed. Frames are made by hand, as no client of ours would."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

RUN = "lora:0"
HELLO, LIST, KEYS, WAIT, BEGIN, READ, WATCH, PING, DIGEST = 1, 7, 9, 15, 17, 19, 23, 25, 27
ERROR = 31
FOR_EVER = 1 << 50  # a step that does not come
READ_MOST = 4 << 20


def pack(value: Any) -> bytes:
    """msgpack of what requests are made of."""
    if isinstance(value, int):
        return struct.pack(">BQ", 0xCF, value) if value > 127 else bytes([value])
    if isinstance(value, str):
        return struct.pack(">BB", 0xD9, len(value)) + value.encode()
    if isinstance(value, bytes):
        return struct.pack(">BB", 0xC4, len(value)) + value
    if isinstance(value, list):
        return struct.pack(">BH", 0xDC, len(value)) + b"".join(map(pack, value))
    return bytes([0x80 | len(value)]) + b"".join(pack(k) + pack(v) for k, v in value.items())


def frame(kind: int, request: int, body: dict[int, Any]) -> bytes:
    """A whole message."""
    packed = pack(body)
    return struct.pack("<4sBBHQII", b"FAN1", 1, 0, kind, request, len(packed), 0) + packed


class Stranger:
    """A connection from 127.0.0.*source*, or the address *source*, which says hello."""

    def __init__(
        self,
        port: int,
        source: int | str = 1,
        session: bytes | None = None,
        target: str = "127.0.0.1",
    ) -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET)
        self.socket.bind((source if isinstance(source, str) else f"127.0.0.{source}", 0))
        self.socket.settimeout(10.0)
        self.socket.connect((target, port))
        role, number = (1, os.urandom(16)) if session is None else (2, session)
        ok = self.ask(HELLO, {1: 1, 2: 1, 4: role, 5: number})
        at = ok.index(b"\x05\xc4\x10") + 3
        self.session = ok[at : at + 16]

    def take(self, size: int) -> bytes:
        """So many bytes; ConnectionError: the rank has closed."""
        got = bytearray()
        while len(got) < size:
            more = self.socket.recv(size - len(got))
            if not more:
                raise ConnectionError
            got += more
        return bytes(got)

    def answer(self) -> tuple[int, bytes]:
        """The next message."""
        _, _, _, kind, _, length, _ = struct.unpack("<4sBBHQII", self.take(24))
        return kind, self.take(length)

    def ask(self, kind: int, body: dict[int, Any]) -> bytes:
        """The answer's body, b"" for an error."""
        self.socket.sendall(frame(kind, 1, body))
        got, answer = self.answer()
        return answer if got != ERROR else b""

    def lease(self, timeout_ms: int = 1000) -> tuple[bytes, bytes]:
        """A lease of the newest step, and the key table's digest; b"": none."""
        got = self.ask(WAIT, {1: RUN, 2: 0, 3: 0, 4: timeout_ms, 5: VERSION.get(self, 0)})
        if not got:
            return b"", b""
        VERSION[self] = number_of(got, 2)
        at = got.find(b"\x05\xc4\x10")
        digest = got.index(b"\x03\xc4\x10") + 3
        return (got[at + 3 : at + 19] if at >= 0 else b""), got[digest : digest + 16]


VERSION: dict[Stranger, int] = {}  # of the catalog, as a stranger was told last


def number_of(body: bytes, wanted: int) -> int:
    """The number with key *wanted*, of a map that begins with numbers."""
    at = 1
    while True:
        key, first = body[at], body[at + 1]
        size = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(first, 0)
        value = int.from_bytes(body[at + 2 : at + 2 + size], "big") if size else first
        if key == wanted:
            return value
        at += 2 + size


def idle(port: int) -> None:
    """As many connections as there are, from many addresses of this host; nothing is said."""
    held = []
    while True:
        with contextlib.suppress(OSError):
            held.append(Stranger(port, len(held) % 200 + 2))
        time.sleep(0.001 if len(held) < 256 else 0.1)


def pump(sockets: list[socket.socket], blob: bytes) -> None:
    """Sends *blob* again and again on all, and drops what comes."""
    left = dict.fromkeys(sockets, b"")
    for one in sockets:
        one.setblocking(False)
    while True:
        for one in sockets:
            left[one] = left[one] or blob
            with contextlib.suppress(BlockingIOError):
                left[one] = left[one][one.send(left[one]) :]
            with contextlib.suppress(BlockingIOError):
                one.recv(1 << 20)


def flood(port: int, kind: int, body: dict[int, Any], sessions: int = 1) -> None:
    """One request as often as it is taken; all answers are read."""
    pump(
        [Stranger(port).socket for _ in range(sessions)],
        b"".join(frame(kind, i + 2, body) for i in range(500)),
    )


def keys(port: int) -> None:
    """The table of names, whole, again and again."""
    flood(port, KEYS, {2: Stranger(port).lease()[1], 5: 0})


def waits(port: int) -> None:
    """Sessions with as many waits and watches as there may be, and more of them on top."""
    held = [Stranger(port) for _ in range(60)]
    for one in held:
        one.socket.sendall(b"".join(frame(WATCH, 100 + i, {1: RUN}) for i in range(16)))
    wait = {1: RUN, 2: 2, 3: FOR_EVER, 4: 600000}
    pump([one.socket for one in held], frame(WAIT, 2, wait) * 32)


def leases(port: int) -> None:
    """Always a fresh lease, and none is ended."""
    one = Stranger(port)
    while True:
        one.lease()
        time.sleep(0.002)


def transfers(port: int, kind: int) -> None:
    """Sixteen connections that read all there is, or have it digested, and again."""
    control = Stranger(port)
    data = [Stranger(port, session=control.session) for _ in range(16)]
    while True:
        token = control.lease()[0]
        if not token:
            continue
        asked = frame(kind, 3, {1: token, 2: READ_MOST, 3: [[0, 0, READ_MOST]]})
        for one in data:
            one.socket.sendall(asked)
        for one in data:
            with contextlib.suppress(TimeoutError):
                one.answer()


def chunks(port: int) -> None:
    """Requests that come byte by byte, each a packet, on sixteen data connections."""
    control = Stranger(port)
    data = [Stranger(port, session=control.session) for _ in range(16)]
    for one in data:
        one.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.socket.setblocking(False)
    while True:
        for byte in frame(PING, 2, {}):
            for one in data:
                with contextlib.suppress(BlockingIOError):
                    one.socket.send(bytes([byte]))
        for one in data:
            with contextlib.suppress(BlockingIOError):
                one.socket.recv(4096)


def slow(port: int) -> None:
    """Connections that ask for much, and take a byte a second."""
    held: list[Stranger] = []
    while True:
        while len(held) < 64:
            one = Stranger(port, len(held) + 2)
            digest = one.lease()[1]
            one.socket.setblocking(False)
            asked = b"".join(frame(KEYS, i + 2, {2: digest, 5: 0}) for i in range(20000))
            with contextlib.suppress(BlockingIOError):
                one.socket.send(asked)
            held.append(one)
        for one in list(held):
            try:
                one.socket.recv(1)
            except BlockingIOError:
                continue
            except OSError:
                held.remove(one)
        time.sleep(1.0)


def churn(port: int) -> None:
    """Connections that are reset at once."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def nonsense(port: int, bytes_of: bytes) -> None:
    """Connections that say what is no message."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as one:
            one.sendall(bytes_of)
            one.recv(100)


ATTACKS: dict[str, Callable[[int], None]] = {
    "idle": idle,
    "ping": lambda port: flood(port, PING, {}),
    "ping16": lambda port: flood(port, PING, {}, 16),
    "list": lambda port: flood(port, LIST, {}),
    "keys": keys,
    "waits": waits,
    "leases": leases,
    "reads": lambda port: transfers(port, READ),
    "digests": lambda port: transfers(port, DIGEST),
    "chunks": chunks,
    "slow": slow,
    "churn": churn,
    "garbage": lambda port: nonsense(port, b"GET / HTTP/1.1\r\n\r\n" * 3),
    "hellos": lambda port: nonsense(port, b"\x16\x03\x01\x40\x00" + bytes(60)),
}


def attack(name: str, port: int) -> None:
    """Never returns, but for an error of its own."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ATTACKS[name](port)
