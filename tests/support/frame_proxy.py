#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""frame_proxy.py TARGET [--ucx-version V] [--hold-reads BYTES]

Stands between a client and the ranks of HOST:PORT[,HOST:PORT...], over TCP, and counts the
protocol's frames. The first line on standard output is the target to use instead. At SIGTERM it
prints one JSON object, {"ranks": [{"NAME": [frames, bytes of bodies], ...}, ...]}, and ends.

--ucx-version: ranks seem to have this UCX (as many characters as the real one).
--hold-reads: passes so many bytes of each rank's read replies on and then no more; prints a line
"held" when a rank has come to that point.
"""
import argparse
import asyncio
import json
import signal
import struct
import sys

import xxhash

NAMES = {
    1: "hello", 2: "hello_ok", 5: "open_path", 6: "open_path_ok", 7: "list", 8: "list_ok",
    9: "keys", 10: "keys_ok", 11: "boxes", 12: "boxes_ok", 13: "regions", 14: "regions_ok",
    15: "wait", 16: "wait_ok", 17: "begin", 18: "begin_ok", 19: "read", 20: "read_ok",
    21: "end", 22: "end_ok", 23: "watch", 24: "event", 25: "ping", 26: "pong", 31: "error",
}
HEADER = struct.Struct("<4sBBHQII")
PIECE = 1 << 20
SEAL = struct.Struct("<Q")  # behind every frame but the hello: both ends are this library


class Rank:
    def __init__(self, options, address):
        self.options = options
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.counts, self.passed, self.held = {}, 0, False
        self.listener = None

    def rewrite(self, name, body):
        """The version is a short text: one byte of type and length, then its characters."""
        if name != "hello_ok" or not self.options.ucx_version:
            return body
        wanted = self.options.ucx_version.encode()
        at = body.find(bytes([0xA0 + len(wanted)]) + b"1.")
        if at < 0:
            raise RuntimeError("the rank has no UCX of such a version")
        return body[: at + 1] + wanted + body[at + 1 + len(wanted) :]

    async def hold(self, reader):
        """Nothing more goes on until the rank closes."""
        if not self.held:
            self.held = True
            print("held", flush=True)
        while await reader.read(PIECE):
            pass
        raise asyncio.IncompleteReadError(b"", None)

    async def pass_read(self, reader, writer, length):
        """The body of a read's reply, as it comes."""
        limit = self.options.hold_reads
        while length > 0:
            piece = await reader.read(min(length, PIECE))
            if not piece:
                raise asyncio.IncompleteReadError(piece, length)
            length -= len(piece)
            if limit is not None and self.passed + len(piece) > limit:
                writer.write(piece[: limit - self.passed])
                self.passed = limit
                await self.hold(reader)
            self.passed += len(piece)
            writer.write(piece)
            await writer.drain()

    async def seal(self, name, frame, reader, hello):
        """What is behind a frame; a reply to the hello that was rewritten needs a new one."""
        if name == "hello":
            hello.append(frame)
            return b""
        seal = await reader.readexactly(SEAL.size)
        if name == "hello_ok" and self.options.ucx_version:
            return SEAL.pack(xxhash.xxh3_64_intdigest(hello[0] + frame))
        return seal

    async def forward(self, reader, writer, hello):
        while True:
            header = await reader.readexactly(HEADER.size)
            magic, _, _, kind, _, length, _ = HEADER.unpack(header)
            if magic != b"FAN1":
                raise RuntimeError("this is not the protocol")
            count = self.counts.setdefault(NAMES[kind], [0, 0])
            count[0] += 1
            count[1] += length
            writer.write(header)
            if NAMES[kind] == "read_ok":
                await self.pass_read(reader, writer, length)
                writer.write(await reader.readexactly(SEAL.size))
            else:
                body = self.rewrite(NAMES[kind], await reader.readexactly(length))
                seal = await self.seal(NAMES[kind], header + body, reader, hello)
                writer.write(body + seal)
            await writer.drain()

    async def serve(self, reader, writer):
        try:
            rank_reader, rank_writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            self.listener.close()  # as if it had refused the connection itself
            writer.close()
            return
        hello = []
        ways = [asyncio.ensure_future(self.forward(reader, rank_writer, hello)),
                asyncio.ensure_future(self.forward(rank_reader, writer, hello))]
        ended, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in left:
            way.cancel()
        for way in ended:
            if not isinstance(way.exception(), (OSError, asyncio.IncompleteReadError)):
                print(f"frame_proxy: {way.exception()}", file=sys.stderr)
        writer.close()
        rank_writer.close()


async def main(options):
    ranks = [Rank(options, address) for address in options.target.split(",")]
    for rank in ranks:
        rank.listener = await asyncio.start_server(rank.serve, "127.0.0.1", 0)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    ports = [rank.listener.sockets[0].getsockname()[1] for rank in ranks]
    print(",".join(f"127.0.0.1:{port}" for port in ports), flush=True)
    await stop.wait()
    print(json.dumps({"schema": 1, "ranks": [rank.counts for rank in ranks]}), flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("target")
parser.add_argument("--ucx-version")
parser.add_argument("--hold-reads", type=int)
asyncio.run(main(parser.parse_args()))
