# SPDX-License-Identifier: Apache-2.0
"""Ranks of another release, and ways to ranks that let little through."""

from __future__ import annotations

import itertools
import socket
import struct
import threading

from local_world import PATIENCE


def refuse(listener: socket.socket) -> None:
    """Answers every hello as a release of another protocol does."""
    text = b"this server speaks protocol versions 7 to 7, the client 1 to 1"
    body = b"\x82\x01\xd1" + struct.pack(">h", -401) + b"\x02\xd9" + bytes([len(text)]) + text
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        with peer:
            peer.settimeout(PATIENCE)
            head = peer.recv(24, socket.MSG_WAITALL)
            peer.recv(struct.unpack_from("<I", head, 16)[0], socket.MSG_WAITALL)
            request = struct.unpack_from("<Q", head, 8)[0]
            peer.sendall(b"FAN1" + struct.pack("<HHQII", 1, 31, request, len(body), 0) + body)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):
                pass


class NarrowWay:
    """A way to a rank that lets *through* bytes of its answers pass until ``wide`` is set, and ends
    the first *drops* data connections of its one reader when the rank has greeted."""

    def __init__(self, port: int, through: int, drops: int = 0) -> None:
        self.port, self.through, self.drops = port, through, drops
        self.wide = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                reader, _ = self.listener.accept()
            except OSError:
                return
            rank = socket.create_connection(("127.0.0.1", self.port))
            if 1 <= number <= self.drops:  # the first is the control connection
                with reader, rank:
                    rank.sendall(reader.recv(1 << 16))
                    reader.sendall(rank.recv(1 << 16))
                continue
            threading.Thread(target=self._pass, args=(reader, rank, 1 << 40), daemon=True).start()
            threading.Thread(
                target=self._pass, args=(rank, reader, self.through), daemon=True
            ).start()

    def _pass(self, source: socket.socket, sink: socket.socket, most: int) -> None:
        passed = 0
        try:
            while got := source.recv(1 << 16):
                sink.sendall(got)
                passed += len(got)
                if passed > most:
                    self.wide.wait(PATIENCE)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the test ends
