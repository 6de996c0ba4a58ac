# SPDX-License-Identifier: Apache-2.0
"""KeyboardInterrupt ends blocking calls of the main thread. Each in a process of its own: where a
signal that comes too late would strike is nobody's guess."""

from __future__ import annotations

import pytest
from local_world import run_script

SET_UP = """
import os, signal, sys, threading
import numpy as np
import fanin
from local_world import until

server = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, use_ucx=False)
server.put("lora:0", [fanin.shard_of("x", np.zeros(1 << 16, np.float32))])
server.commit("lora:0", 1)
address = f"127.0.0.1:{server.port}"
client = fanin.Client([address], use_ucx=False, path="stream")
into = {"x": np.ones(1 << 16, np.float32)}
client.pull_into(0, into)

def interrupt_when(condition):
    def work():
        until(condition)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=work).start()

def interrupted(call, *arguments, after=None, **options):
    # Whoever waits for the call's own end waits for longer than this process may take.
    interrupt_when(after or (lambda: client._uses))
    try:
        call(*arguments, timeout=3600, **options)
    except KeyboardInterrupt:
        return True
    return False
"""

END = """
assert not client._uses
# The interrupt that came with a call's end is not left to the next one.
assert client.pull_into(0, into, timeout=20).step == 1
assert client.pull_into(0, into, timeout=20).step == 1
print("done")
"""

# A listener that accepts, by its backlog, and never answers.
SILENT = """
import socket
silent = socket.create_server(("127.0.0.1", 0))
silent_address = f"127.0.0.1:{silent.getsockname()[1]}"
"""


@pytest.mark.parametrize(
    "body",
    [
        "assert interrupted(client.pull_into, 0, into, step=99)",
        "assert interrupted(client.pull_adapter, 0, sys.argv[1] + '/adapter', step=99)\n"
        "assert os.listdir(sys.argv[1]) in ([], ['.adapter.lock'])",
        "assert interrupted(client.watch, 0, lambda event: None)",
        "assert interrupted(client.catalog, 'unknown')\n",
        # Twice: an interrupt in the middle of the first one's clean-up is no harm.
        "assert interrupted(client.pull_into, 0, into, step=99)\n"
        "assert interrupted(client.pull_into, 0, into, step=99)",
    ],
    ids=["pull_into", "pull_adapter", "watch", "catalog", "twice"],
)
def test_blocking_calls(body: str, tmp_path: object) -> None:
    if "catalog" in body:
        # A run that was never committed: what the call waits for does not come.
        body = "server.put('lora:unknown', [fanin.shard_of('x', into['x'])])\n" + body
    done = run_script(SET_UP + body + END, str(tmp_path))
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_connecting() -> None:
    body = """
other = fanin.Client(use_ucx=False, connect_timeout=3600)
assert interrupted(other.connect, [silent_address], after=lambda: other._uses)
other.connect([address])
assert other.pull_into(0, into).step == 1
# The constructor connects too; what it made is closed.
interrupt_when(lambda: any(not c.closed and c._uses for c in fanin.client._open))
try:
    fanin.Client([silent_address], use_ucx=False, connect_timeout=3600)
except KeyboardInterrupt:
    assert all(c in (client, other) for c in fanin.client._open)
else:
    raise AssertionError("not interrupted")
"""
    done = run_script(SET_UP + SILENT + body + END)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_an_interrupt_in_a_pull_that_is_ending() -> None:
    body = """
for round in range(30):
    started, sent = threading.Event(), threading.Event()
    def work():
        started.wait()
        os.kill(os.getpid(), signal.SIGINT)
        sent.set()
    threading.Thread(target=work).start()
    try:
        client.pull_into(0, into, progress=lambda *_: (started.set(), sent.wait()))
        for _ in range(1000):  # the interrupt is due any moment
            sent.wait()
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        pass
    assert client.pull_into(0, into, timeout=20).step == 1
"""
    done = run_script(SET_UP + body + END)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_the_default_ends_the_program_as_usual() -> None:
    done = run_script(
        SET_UP + "interrupt_when(lambda: client._uses)\nclient.pull_into(0, into, step=99)\n"
    )
    assert done.returncode == -2, done.stderr
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_a_signal_handler_may_cancel() -> None:
    body = """
signal.signal(signal.SIGINT, lambda *_: client.cancel())
interrupt_when(lambda: client._uses)
try:
    client.pull_into(0, into, step=99)
    raise AssertionError("not cancelled")
except fanin.CancelledError:
    pass
"""
    done = run_script(SET_UP + body + END)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
