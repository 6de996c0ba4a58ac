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


def done(body: str, *arguments: str) -> None:
    """The script comes to its end, and its client is as good as new."""
    ended = run_script(SET_UP + body + END, *arguments)
    assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr


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
    done(body, str(tmp_path))


def test_connecting() -> None:
    body = """
other = fanin.Client(use_ucx=False, connect_timeout=3600)
assert interrupted(other.connect, [silent_address], after=lambda: other._uses)
other.connect([address])
assert other.pull_into(0, into).step == 1
# The constructor connects too; what it made is closed.
interrupt_when(lambda: any(not c.closed and c._uses for c in fanin._puller._open))
try:
    fanin.Client([silent_address], use_ucx=False, connect_timeout=3600)
except KeyboardInterrupt:
    assert all(c in (client, other) for c in fanin._puller._open)
else:
    raise AssertionError("not interrupted")
"""
    done(SILENT + body)


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
    done(body)


def test_the_default_ends_the_program_as_usual() -> None:
    ended = run_script(
        SET_UP + "interrupt_when(lambda: client._uses)\nclient.pull_into(0, into, step=99)\n"
    )
    assert ended.returncode == -2, ended.stderr
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"


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
    done(body)


# What is raised again and again. HELD pulls while a callback holds the pull until the main thread
# has cancelled it, and tells whether the pull had ended when it raised.
HELD = """
import itertools
cancels, out, ended = [], threading.Event(), []
cancel_own = client._cancel_own

def cancel(use):
    sys.settrace(None)
    cancel_own(use)
    cancels.append(use)
    if len(cancels) == 1:
        after_cancel()

def after_cancel():
    pass

client._cancel_own = cancel

def cancelled(times):
    until(lambda: len(cancels) >= times or out.is_set())

def held(*signals):
    del cancels[:], ended[:]
    out.clear()
    def progress(*_):
        if not cancels and not out.is_set():
            for times, number in enumerate(signals, 1):
                os.kill(os.getpid(), number)
                cancelled(times)
            before_end()
            ended.append(not out.is_set())
    try:
        client.pull_into(0, into, progress=progress)
    finally:
        out.set()
        assert ended == [True], "the call has returned, and writes still"
        assert not client._uses

def before_end():
    pass
"""

# Raises at one step of Python's in the main thread, inside of the client's own code.
STRIKE = """
MODULES = ("fanin.client", "fanin._puller", "fanin.session", "fanin._calls")
fanin._calls._AT_ONCE = 1  # one is raised: there is no need to go through all that are for more

class Struck(BaseException):
    pass

def strike_at(step):
    left = [step]
    def trace(frame, event, _):
        if frame.f_globals["__name__"] not in MODULES:
            return None
        frame.f_trace_opcodes = True
        if event in ("call", "opcode"):
            left[0] -= 1
            if left[0] < 0:
                raise Struck
        return trace
    return trace

def struck(call, step):
    # Whether it got so far.
    sys.settrace(strike_at(step))
    try:
        call()
    except Struck:
        return True
    finally:
        sys.settrace(None)
    return False
"""


def test_a_second_signal_waits_for_the_end_too() -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
try:
    held(signal.SIGINT, signal.SIGTERM)
    raise AssertionError("not interrupted")
except SystemExit as error:
    assert error.code == 143
"""
    done(HELD + body)


def test_an_interrupted_call_keeps_nothing() -> None:
    body = """
import gc, weakref
gc.disable()
class Memory(np.ndarray):
    pass

def tried():
    memory = np.zeros(1 << 16, np.float32).view(Memory)
    assert interrupted(client.pull_into, 0, {"x": memory}, step=99)
    return weakref.ref(memory)

print(tried()())
"""
    ended = run_script(SET_UP + body + END)
    assert (ended.stdout, ended.returncode) == ("None\ndone\n", 0), ended.stderr


def test_what_is_raised_at_any_step_of_the_clean_up_waits_for_the_end() -> None:
    body = """
def after_cancel():
    trace = strike_at(step)
    frame = sys._getframe(1)
    while frame is not None:
        frame.f_trace, frame = trace, frame.f_back
    sys.settrace(trace)

def before_end():
    cancelled(2)  # after what was raised, or when the wait has looked again without it

for step in itertools.count():
    try:
        held(signal.SIGINT)
    except Struck:
        pass
    except KeyboardInterrupt:
        break  # the clean-up has fewer steps
    assert client.pull_into(0, into, timeout=20).step == 1
assert step > 5
"""
    done(HELD + STRIKE + body)


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("client.pull_into(0, into)", ""),
        ("client.disconnect()", "client.connect([address])"),
        ("session = client.begin(0, into); session.read(); session.end()", ""),
        ("client.begin(0, into).abandon()", ""),
    ],
    ids=["pull_into", "disconnect", "session", "abandon"],
)
def test_a_client_is_free_whatever_step_was_interrupted(call: str, after: str) -> None:
    body = f"""
def once():
    {call}

for step in range(100_000):
    further = struck(once, step)
    assert not client._uses, step
    {after}
    assert client.pull_into(0, into, timeout=20).step == 1, step
    if not further:
        break
assert 50 < step < 99_999
"""
    done(STRIKE + body)


def test_close_may_be_interrupted_at_any_step() -> None:
    body = """
for step in range(100_000):
    other = fanin.Client([address], use_ucx=False)
    further = struck(other.close, step)
    other.close()
    assert other.closed
    if not further:
        break
assert 20 < step < 99_999
"""
    done(STRIKE + body)


def test_a_call_that_the_main_thread_has_left_is_still_one() -> None:
    """More is raised than any clean-up could take: the client and the memory are its helper's."""
    body = """
import gc, weakref
from fanin._calls import Work

def never(*_):
    raise SystemExit

inside, go_on = threading.Event(), threading.Event()
def progress(*_):
    if not inside.is_set():
        inside.set()
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait()

room = {"x": np.ones(1 << 16, np.float32)}
memory = weakref.ref(room["x"])
end, Work.end = Work.end, never
try:
    client.pull_into(0, room, progress=progress)
except SystemExit:
    pass
Work.end = end
del room
gc.collect()
assert memory() is not None
try:
    client.ping()
    raise AssertionError("two calls at a time")
except fanin.StateError as error:
    assert "pull_into()" in str(error), error
closing = threading.Thread(target=client.close)
closing.start()
until(lambda: client._left_cancelled is False and closing.is_alive())
assert not client.closed
go_on.set()
closing.join()
assert client.closed
gc.collect()
assert memory() is None
client = fanin.Client([address], use_ucx=False, path="stream")
"""
    done(body)
