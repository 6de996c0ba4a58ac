# SPDX-License-Identifier: Apache-2.0
"""A rank that ends gives its port and its name back while it still answers by the connections that
it has: whoever takes them then is not the rank."""

from __future__ import annotations

import os

import fanin
import numpy as np
import pytest
from local_world import PATIENCE, publish, run_script, servers, weights
from odd_ranks import NarrowWay

SCRIPT = """
import os, socket, struct, sys, threading
import fanin, numpy as np
from local_world import PATIENCE

by_name, uid = sys.argv[1] == "name", int(sys.argv[2])
HELLO = b"\\x85\\x01\\x01\\x02\\x01\\x04\\x01\\x05\\xc4\\x10" + bytes(range(16)) + b"\\x06\\xa4test"


def frame(kind, request, body):
    return b"FAN1" + struct.pack("<HHQII", 1, kind, request, len(body), 0) + body


def take_frame(peer):
    head = peer.recv(24, socket.MSG_WAITALL)
    if len(head) < 24:
        return None, 0, b""
    kind, request, length = struct.unpack("<HQI", head[6:20])
    return kind, request, peer.recv(length, socket.MSG_WAITALL) if length else b""


def bind(port):
    while True:
        taken = socket.socket(socket.AF_UNIX if by_name else socket.AF_INET)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            name = f"\\0fanin-{os.geteuid()}-127.0.0.1:{port}"
            taken.bind(name if by_name else ("127.0.0.1", port))
            taken.listen()
            return taken
        except OSError:
            taken.close()


def pretend(port, go, taken):
    # All that the rank says of itself, it says to everybody.
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as rank:
        rank.sendall(frame(1, 1, HELLO))
        said = take_frame(rank)[2]
    if uid:
        os.setuid(uid)
    os.write(taken, b"x")
    os.read(go, 1)
    listener = bind(port)
    os.write(taken, b"x")
    while True:
        peer, _ = listener.accept()
        while (got := take_frame(peer))[0]:
            if got[0] == 1:
                peer.sendall(frame(2, got[1], said))
            else:
                peer.sendall(frame(20, got[1], b"\\xee" * 4096))


server = fanin.Server(world_id="ab" * 16, rank=0, world_size=1, use_ucx=False)
server.put("full:0", [fanin.shard_of("w", np.ones(1024, dtype=np.float32))])
server.commit("full:0", 1)
(go, went), (have, taken) = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    pretend(server.port, go, taken)
try:
    os.read(have, 1)
    client = fanin.Client(
        [f"127.0.0.1:{server.port}"],
        path="stream",
        use_unix=by_name,
        use_ucx=False,
        checksums=False,
    )
    into = np.zeros(1024, dtype=np.float32)
    client.catalog("full:0", timeout=PATIENCE)
    holder = fanin.Client([f"127.0.0.1:{server.port}"], path="stream", use_ucx=False)
    held = holder.begin("full:0", {"w": into.copy()}, timeout=PATIENCE)  # keeps the rank there
    os.write(went, b"x")
    ending = threading.Thread(target=lambda: server.close(drain=PATIENCE))
    ending.start()
    os.read(have, 1)
    try:
        client.pull_into("full:0", {"w": into}, timeout=5)
        print("read", into[0])
    except fanin.FaninError as error:
        print(error.message, "|", error.remedy, "|", bool(into.any()))
    client.close()
    holder.close()
    ending.join()
finally:
    os.kill(child, 9)
    os.waitpid(child, 0)
"""

BETWEEN = """
import os, socket
import fanin
from local_world import PATIENCE, client_of, publish, servers, weights


def take(port, have):
    os.setuid(65534)
    with socket.create_server(("127.0.0.1", port)) as taken:
        os.write(have, b"x")
        while True:
            with taken.accept()[0] as peer:
                peer.recv(1)
                peer.sendall(b"HTTP/1.1 400 Bad Request\\r\\n\\r\\n")


def pulled(client, step):
    into = {name: value * 0 for name, value in weights(1).items()}
    assert client.pull_into(0, into, timeout=PATIENCE).step == step
    assert all((into[name] == value).all() for name, value in weights(step).items())


with servers(1) as ranks:
    publish(ranks, 1)
    port, client = ranks[0].port, client_of(ranks, use_unix=False)
    pulled(client, 1)
have, taken = os.pipe()
child = os.fork()
if child == 0:
    take(port, taken)
os.read(have, 1)
for _ in range(2):
    try:
        pulled(client, 1)
    except fanin.FaninError as error:
        print(error.message)
os.kill(child, 9)
os.waitpid(child, 0)
with servers(1, base_port=port) as ranks:
    publish(ranks, 2)
    pulled(client, 2)
client.close()
"""


def told(way: str, uid: int) -> str:
    done = run_script(SCRIPT, way, str(uid))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_name_that_another_process_has_taken() -> None:
    assert "has its Unix name no more: another process answers there" in told("name", 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_port_that_another_user_has_taken() -> None:
    message, remedy, changed = told("port", 65534).split(" | ")
    assert "is a process of uid 65534, and this one is of uid 0" in message
    assert "trust_other_users" in remedy and changed == "False\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_port_that_another_user_has_given_back() -> None:
    """The client that was refused it pulls from the next launch there as if nothing had been."""
    done = run_script(BETWEEN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank 0 at 127.0.0.1:") == 2, done.stdout


def test_who_has_gone_is_no_stranger() -> None:
    """The kernel does not tell whose a connection was that is closed."""
    with servers(1) as ranks:
        publish(ranks, 1)
        way = NarrowWay(ranks[0].port, 1 << 40, drops=2)
        with fanin.Client([way.address], path="stream", use_unix=False, use_ucx=False) as client:
            into = {name: np.zeros_like(value) for name, value in weights(1).items()}
            assert client.pull_into(0, into, timeout=PATIENCE).step == 1
        way.listener.close()
