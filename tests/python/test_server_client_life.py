# SPDX-License-Identifier: Apache-2.0
"""Servers and clients among threads and processes: who may use them, and how they end."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fanin
import local_world
import numpy as np
import pytest
from local_world import client_of, empty, run_script, servers

# ---------------------------------------------------------------------------------- one thread


def test_a_client_is_used_by_one_thread_at_a_time(client: fanin.Client) -> None:
    refused: list[fanin.StateError] = []

    def progress(done: int, total: int) -> None:
        for use in (client.ping, client.ranks, client.disconnect):
            with pytest.raises(fanin.StateError) as caught:
                use()
            refused.append(caught.value)
        with pytest.raises(fanin.StateError) as closed:
            client.close()
        refused.append(closed.value)

    client.pull_into(0, empty(), progress=progress)
    assert refused
    assert all("pull_into()" in str(error) for error in refused)
    assert client.pull_into(0, empty()).step == 1


def test_a_refused_call_prepares_nothing(client: fanin.Client) -> None:
    """What the call that is under way reads is its own."""
    got = empty()
    packed = fanin.pack(fanin.shard_of(name, got[name], writable=True) for name in got)
    prepared: list[object] = []

    def again(*_: int) -> None:
        for use in (client.pull_into, client.begin):
            with pytest.raises(fanin.StateError, match="under way"):
                use(0, packed)
        prepared.append(packed.prepared)

    client.pull_into(0, packed, progress=again)
    assert prepared and set(prepared) == {None}
    client.pull_into(0, packed)
    assert packed.prepared is not None


def test_cancel_from_another_thread(client: fanin.Client) -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            client.pull_into(0, empty(), step=99)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    local_world.until(lambda: client._uses)
    client.cancel()
    thread.join(local_world.PATIENCE)
    assert isinstance(raised[0], fanin.CancelledError) and not raised[0].retryable
    assert client.pull_into(0, empty()).step == 1


def test_cancel_of_no_call_cancels_the_next(client: fanin.Client) -> None:
    client.cancel()
    with pytest.raises(fanin.CancelledError):
        client.pull_into(0, empty())
    assert client.pull_into(0, empty()).step == 1


def test_close_ends_the_call_of_another_thread(ranks: list[fanin.Server]) -> None:
    client = client_of(ranks)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            client.pull_into(0, empty(), step=99)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    local_world.until(lambda: client._uses)
    client.close()
    thread.join(local_world.PATIENCE)
    assert client.closed and isinstance(raised[0], fanin.CancelledError)
    client.close()
    client.cancel()
    with pytest.raises(fanin.StateError, match="closed"):
        client.ping()


def test_what_a_callback_raises_is_raised(ranks: list[fanin.Server], client: fanin.Client) -> None:
    class Stop(Exception):
        pass

    def fail(*_: object) -> None:
        raise Stop

    for _ in range(20):  # the cancel comes too late for some, and for none of the next
        with pytest.raises(Stop):
            client.pull_into(0, empty(), progress=fail)
        assert client.pull_into(0, empty()).step == 1
    with pytest.raises(Stop):
        client.watch(0, fail)
    assert client.pull_into(0, empty()).step == 1
    with pytest.raises(TypeError):
        client.pull_into(0, empty(), progress=lambda: None)  # type: ignore[misc, arg-type]


def test_a_server_is_used_by_many_threads() -> None:
    failures: list[BaseException] = []
    with servers(1) as (server,):

        def work(run: int) -> None:
            try:
                for step in range(1, 30):
                    server.begin_update(f"lora:{run}")
                    shard = fanin.shard_of("x", np.zeros(4, np.float32))
                    server.put(f"lora:{run}", [shard], replace=True)
                    server.commit(f"lora:{run}", step)
                    server.stats(), server.publications(), server.prometheus()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(run,)) for run in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert server.stats()["commits"] == 4 * 29


# ---------------------------------------------------------------------------------- the end


def test_closed_servers() -> None:
    with servers(1) as (server,):
        server.close(drain=0)
        server.close()
        assert server.closed and server.port
        for call in (server.stats, server.publications, server.prometheus):
            with pytest.raises(fanin.StateError, match="closed"):
                call()
        with pytest.raises(fanin.StateError, match="closed"):
            server.put("lora:0", [])


def test_close_waits_for_calls_of_other_threads() -> None:
    entered, go_on = threading.Event(), threading.Event()
    with servers(1) as (server,):

        def call(handle: object) -> int:
            entered.set()
            go_on.wait(local_world.PATIENCE)
            assert server._handle is not None
            return 0

        user = threading.Thread(target=server._enter, args=(call,))
        user.start()
        entered.wait(local_world.PATIENCE)
        with pytest.raises(fanin.StateError, match="do not end"):
            server._close(0, 0.0)
        closer = threading.Thread(target=server.close)
        closer.start()
        go_on.set()
        user.join(local_world.PATIENCE)
        closer.join(local_world.PATIENCE)
        assert server.closed and server._handle is None


def test_forgotten_handles_are_freed() -> None:
    with servers(1) as (server,):
        client = client_of([server])
        local_world.until(lambda: server.stats()["sessions"] == 1)
        with pytest.warns(ResourceWarning, match="fanin.Client"):
            del client
            gc.collect()
        local_world.until(lambda: server.stats()["sessions"] == 0)
    forgotten = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, use_ucx=False)
    port = forgotten.port
    with pytest.warns(ResourceWarning, match="fanin.Server"):
        del forgotten
        gc.collect()
    with pytest.raises(fanin.UnreachableError):
        fanin.Client([f"127.0.0.1:{port}"], use_ucx=False)


# ---------------------------------------------------------------------------------- processes

SET_UP = """
import os, sys, threading
import numpy as np
import fanin
import local_world

server = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, use_ucx=False)
weights = np.zeros(4, np.float32)
server.put("lora:0", [fanin.shard_of("x", weights)])
server.commit("lora:0", 1)
client = fanin.Client([f"127.0.0.1:{server.port}"], use_ucx=False)
into = {"x": np.ones(4, np.float32)}
client.pull_into(0, into)
assert not into["x"].any()
"""


@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('the trainer broke')", 1, "ValueError: the trainer broke"),
        ("server.begin_update('lora:0')\nraise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        # In the middle of a pull of another thread, which the end of the process ends.
        (
            "pull = lambda: client.pull_into(0, into, step=99)\n"
            "threading.excepthook = lambda _: None\n"
            "threading.Thread(target=pull, daemon=True).start()\n"
            "local_world.until(lambda: client._uses)\n",
            0,
            "",
        ),
        # Cycles and module globals that only the finalization takes apart.
        ("class Holder: pass\nh = Holder(); h.me = h; h.all = (server, client)\nsys.h = h", 0, ""),
    ],
    ids=["plain", "sys.exit", "exception", "interrupt", "busy thread", "cycle"],
)
def test_a_process_that_just_ends_ends_cleanly(then: str, code: int, said: str) -> None:
    done = run_script(SET_UP + then)
    assert done.returncode == code, done.stderr
    assert done.stderr.strip().splitlines()[-1:] == ([said] if said else []), done.stderr
    assert "Fatal" not in done.stderr and "ResourceWarning" not in done.stderr


def test_handles_belong_to_the_process_that_made_them() -> None:
    done = run_script(
        SET_UP
        + """
def refused(call, *arguments):
    try:
        call(*arguments)
    except fanin.ProcessError as error:
        assert "parent process" in str(error), error
        return True
    return False

child = os.fork()
if child == 0:
    status = 1
    try:
        assert refused(server.stats) and refused(server.commit, "lora:0", 2)
        assert refused(server.put, "lora:0", []) and refused(server.remove, "lora:0")
        assert refused(client.ping) and refused(client.pull_into, 0, into)
        assert refused(client.disconnect)
        client.cancel(), client.close(), server.close()
        del server, client  # __del__ leaves alone what is the parent's
        # Handles of its own, with a log of its own, work.
        with fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, use_ucx=False) as own:
            own.put("lora:1", [fanin.shard_of("x", weights)])
            own.commit("lora:1", 7)
            with fanin.Client([f"127.0.0.1:{own.port}"], use_ucx=False) as reader:
                assert reader.pull_into(1, into).step == 7
        status = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    os._exit(status)
assert os.waitpid(child, 0)[1] == 0
# What the child did and left has not touched the parent's.
assert client.pull_into(0, into).step == 1
assert server.stats()["sessions_opened"] >= 1
print("done")
"""
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_a_forked_child_may_exit_as_usual() -> None:
    done = run_script(
        SET_UP
        + """
child = os.fork()
if child == 0:
    sys.exit(0)  # runs the exit handlers that were the parent's
assert os.waitpid(child, 0)[1] == 0
assert client.pull_into(0, into).step == 1
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def is_open(name: str) -> bool:
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if name in os.readlink(link):
                return True
    return False


def test_one_cancel_ends_one_call(tmp_path: Path) -> None:
    """Also where the call looks at nothing but a directory, which it reads whole."""
    weights, place = np.ones(48 << 20, dtype=np.float32), tmp_path / "model"
    with fanin.Server(world_id="ab" * 16, rank=0, world_size=1, use_ucx=False) as rank:
        rank.put("full:0", [fanin.shard_of("w", weights)])
        rank.commit("full:0", 1)
        client = client_of([rank])
        assert not client.pull_model("0", place).reused
        with ThreadPoolExecutor() as pool:
            for _ in range(100):
                again = pool.submit(client.pull_model, "0", place)
                local_world.until(lambda again=again: again.done() or is_open(str(place)))
                client.cancel()
                if "while reading" in str(again.exception(local_world.PATIENCE)):
                    break
                with contextlib.suppress(fanin.CancelledError):  # it came too soon, or too late
                    client.pull_model("0", place)
            else:
                pytest.fail("never cancelled while it read")
        assert client.pull_model("0", place).reused
        client.close()


@pytest.mark.parametrize("call", ["ranks()", "ping(0.2)"])
def test_who_outlives_the_client_at_exit_is_refused(call: str) -> None:
    """No helper thread runs any more then."""
    done = run_script(
        SET_UP
        + f"""
import builtins

class Last:
    def __del__(self, client=client, wrong=fanin.StateError, out=sys.stdout):
        try:
            client.{call}
        except wrong as error:
            out.write(error.message + chr(10)), out.flush()

builtins.kept_to_the_last = Last()
"""
    )
    assert (done.stdout, done.returncode) == ("the client is closed\n", 0), done.stderr
