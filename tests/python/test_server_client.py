# SPDX-License-Identifier: Apache-2.0
"""Servers and clients: what is put arrives."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fanin
import local_world
import numpy as np
import pytest
from fanin import _ffi, _records
from local_world import A_NAME, B_NAME, PUBLICATION, assert_step, client_of, empty, publish, servers
from safetensors.numpy import load_file

# ---------------------------------------------------------------------------------- pulls


def test_uneven_shards_of_three_ranks_are_put_together(client: fanin.Client) -> None:
    got = empty()
    result = client.pull_into(0, got)
    assert_step(got, 1)
    assert (result.step, result.tensors, result.bytes) == (1, 2, 2 * 24 * 4)
    assert result.path == "stream" and result.path_reason
    assert 0 < result.read <= result.total < 60
    assert [rank["rank"] for rank in result.ranks] == [0, 1, 2]
    assert len(bytes.fromhex(result.world_id)) == 16 and not result.reused


def test_waiting_reads_nothing(ranks: list[fanin.Server], client: fanin.Client) -> None:
    assert client.wait(0) == 1 == client.wait(0, step=1)
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(client.wait(0, at_least=2, timeout=30)))
    waiter.start()
    for server in ranks[:2]:
        local_world.publish_rank(server, 3)
    assert not got, "a rank has not committed it"
    local_world.publish_rank(ranks[2], 3)
    waiter.join(30)
    assert got == [3]
    for server in ranks:
        assert server.stats()["bytes_streamed"] == 0
    with pytest.raises(fanin.SupersededError, match="step 2"):
        client.wait(0, step=2)
    with pytest.raises(fanin.NotFoundError):
        client.wait(7)
    with pytest.raises(fanin.PullTimeoutError, match="rank 0"):
        client.wait(0, step=4, timeout=0.05)
    for server in ranks:
        server.pause(PUBLICATION, "offloaded")
    with pytest.raises(fanin.PausedError, match="offloaded"):
        client.wait(0, at_least=4)
    with pytest.raises(fanin.RequestError, match="timeout"):
        client.wait(0, timeout=0)


def test_parts_are_pulled_as_shards(client: fanin.Client) -> None:
    rows, columns = np.zeros((2, 8), np.float32), np.zeros((8, 1), np.float32)
    shards = fanin.pack(
        [
            fanin.shard_of(A_NAME, rows, shape=(3, 8), offset=(1, 0), writable=True),
            fanin.shard_of(B_NAME, columns, shape=(8, 3), offset=(0, 2), writable=True),
        ]
    )
    for _ in range(2):  # a pack may be used again
        rows[:], columns[:] = 0, 0
        client.pull_into("lora:0", shards)
        np.testing.assert_array_equal(rows, local_world.weights(1)[A_NAME][1:])
        np.testing.assert_array_equal(columns, local_world.weights(1)[B_NAME][:, 2:])


def test_steps_follow_each_other(ranks: list[fanin.Server], client: fanin.Client) -> None:
    got = empty()
    for step in (2, 3):
        publish(ranks, step)
        assert client.pull_into(0, got, step=step).step == step
        assert_step(got, step)
    assert client.pull_into(0, got, at_least=2).step == 3
    with pytest.raises(fanin.SupersededError, match="step 2") as caught:
        client.pull_into(0, got, step=2)
    assert not caught.value.retryable


def test_weights_may_arrive_rounded(client: fanin.Client) -> None:
    got = {name: np.zeros(v.shape, np.uint16) for name, v in local_world.weights(1).items()}
    client.pull_into(0, [fanin.shard_of(n, v, dtype="BF16") for n, v in got.items()], dtype="BF16")
    for name, value in local_world.weights(1).items():
        wide = (got[name].astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(wide, value, rtol=2**-8)
    half = {name: np.zeros(v.shape, np.float16) for name, v in local_world.weights(1).items()}
    client.pull_into(0, half, dtype="F16")
    np.testing.assert_array_equal(half[A_NAME], local_world.weights(1)[A_NAME].astype(np.float16))


def test_progress_is_told(client: fanin.Client) -> None:
    told: list[tuple[int, int]] = []
    client.pull_into(0, empty(), progress=lambda done, total: told.append((done, total)))
    assert told and {total for _, total in told} == {192}
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_what_each_rank_has_brought_is_told(client: fanin.Client) -> None:
    told: list[fanin.PullProgress] = []
    client.pull_into(0, empty(), rank_progress=told.append)
    first = told[0]
    assert (first.bytes_total, first.slowest) == (192, None)
    assert [rank.rank for rank in first.ranks] == list(range(len(first.ranks)))
    assert sum(rank.bytes_total for rank in first.ranks) == 192
    assert {rank.address for rank in first.ranks} <= {rank.address for rank in client.ranks()}
    slow = fanin.RankProgress(5, "10.0.0.3:6005", "stream", 0, 2_100_000_000, 12.7)
    assert str(fanin.PullProgress(1_000_000, 2_101_000_000, (slow,), slow)) == (
        "1.0 of 2101.0 MB; waits for rank 5 10.0.0.3:6005: 0.0 of 2100.0 MB, no byte for 12 s"
    )


def test_calls_of_other_threads_are_direct(ranks: list[fanin.Server]) -> None:
    seen: list[int] = []

    def work() -> None:
        with client_of(ranks) as client:
            client.pull_into(0, empty(), progress=lambda *_: seen.append(ident()))
            seen.append(ident())

    ident = threading.get_ident
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(set(seen)) == 1


# ---------------------------------------------------------------------------------- directories


def test_an_adapter_directory(client: fanin.Client, tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    result = client.pull_adapter(0, target, step=1)
    assert not result.reused
    assert_step(load_file(target / "adapter_model.safetensors"), 1)
    config = json.loads((target / "adapter_config.json").read_text())
    assert config["lora_alpha"] == 6 and config["peft_type"] == "LORA"
    assert client.pull_adapter(0, str(target)).reused
    assert client.pull_adapter(0, os.fsencode(tmp_path / "other"), spare_file=True).step == 1


def test_a_directory_that_cannot_be_made_is_the_hosts_fault(
    client: fanin.Client, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fanin.HostError) as caught:
        client.pull_adapter(0, tmp_path / "file" / "adapter")
    assert caught.value.sys_errno != 0
    for wrong in (None, 7, "a\0b", "\ud800"):
        with pytest.raises(fanin.RequestError, match="directory"):
            client.pull_adapter(0, wrong)  # type: ignore[arg-type]


def test_a_pull_has_a_size(client: fanin.Client, tmp_path: Path) -> None:
    calls: list[Callable[[int], fanin.PullResult]] = [
        lambda most: client.pull_adapter(0, tmp_path / "adapter", max_bytes=most),
        lambda most: client.pull_into(0, empty(), max_bytes=most),
    ]
    for call in calls:
        with pytest.raises(fanin.ConnectionFailedError, match="max_bytes") as caught:
            call(10)
        assert caught.value.name == "FANIN_ERR_LIMIT"
        for wrong in (0, -1, 1 << 64):
            with pytest.raises(fanin.RequestError, match="max_bytes"):
                call(wrong)
        assert not (tmp_path / "adapter").exists()
    assert all(call(1 << 20).step == 1 for call in calls)


@pytest.mark.parametrize(
    ("use_unix", "checksums", "told"),
    [(True, True, "local"), (False, True, True), (False, False, False)],
)
def test_what_was_checked_is_told(
    ranks: list[fanin.Server], tmp_path: Path, use_unix: bool, checksums: bool, told: bool | str
) -> None:
    with client_of(ranks, use_unix=use_unix, checksums=checksums) as client:
        for verify in (False, True):
            got, directory = empty(), tmp_path / str(verify)
            for result in (
                client.pull_into(0, got, verify=verify),
                client.pull_adapter(0, directory, verify=verify),
            ):
                assert (result.transport_checksums, result.verified) == (told, verify)
                assert (result.verify > 0) is verify
                assert {rank["checksums"] for rank in result.ranks if rank["bytes"]} == {told}
            assert_step(got, 1)
            said = json.loads((directory / "fanin.json").read_text())
            assert (said["transport_checksums"], said["verified"]) == (told, verify)


def test_fields_that_could_load_code_are_left_out(
    ranks: list[fanin.Server],
    client: fanin.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**json.loads(local_world.CONFIG["peft_config"]), "revision": "main"}
    monkeypatch.setattr(local_world, "CONFIG", {"peft_config": json.dumps(config)})
    publish(ranks, 2)
    for trusted in (False, True):
        client.pull_adapter(0, tmp_path / str(trusted), trust_config=trusted)
        written = json.loads((tmp_path / str(trusted) / "adapter_config.json").read_text())
        assert ("revision" in written) is trusted


# ---------------------------------------------------------------------------------- processes


# ---------------------------------------------------------------------------------- looking


def test_what_a_client_sees(ranks: list[fanin.Server], client: fanin.Client) -> None:
    seen = client.ranks()
    assert [rank.rank for rank in seen] == [0, 1, 2]
    assert {rank.world_id for rank in seen} == {ranks[0].world_id}
    assert all(rank.connected and not rank.status and rank.world_size == 3 for rank in seen)
    assert seen[1].server_name == "lora_param_server_1"
    assert seen[2].address == f"127.0.0.1:{ranks[2].port}"

    published = client.publications()
    assert [(p.rank, p.name, p.state, p.step, p.tensors) for p in published] == [
        (rank, PUBLICATION, "stable", 1, 2) for rank in range(3)
    ]
    assert [p.bytes for p in published] == [128, 64, 0]

    a, b = client.catalog(0)
    assert (a.name, a.dtype, a.shape, a.bytes) == (A_NAME, "F32", (3, 8), 96)
    assert [(o.rank, o.offset, o.extent, o.bytes) for o in a.owners] == [
        (0, (0, 0), (2, 8), 64),
        (1, (2, 0), (1, 8), 32),
    ]
    assert a.owners[0].packed and not b.owners[0].packed
    assert [entry.name for entry in client.catalog("0", B_NAME)] == [B_NAME]
    assert client.metadata("lora:0") == local_world.CONFIG
    trips = client.ping()
    assert [info.rank for info, _ in trips] == [0, 1, 2]
    assert all(0 < seconds < local_world.PATIENCE for _, seconds in trips)


def test_watching(ranks: list[fanin.Server], client: fanin.Client) -> None:
    seen: list[fanin.WatchEvent] = []

    def look(event: fanin.WatchEvent) -> bool | None:
        seen.append(event)
        if event.step == 3:
            return False
        publish(ranks, event.step + 1)
        return None

    client.watch(0, look, timeout=local_world.PATIENCE)
    assert [event.step for event in seen] == [1, 2, 3]
    assert all(event.spread >= 0 and event.slowest_rank in (0, 1, 2) for event in seen[1:])
    assert client.pull_into(0, empty()).step == 3  # connects again


def test_watching_while_nothing_happens(ranks: list[fanin.Server], client: fanin.Client) -> None:
    told: list[tuple[float, list[fanin.RankState]]] = []
    ranks[1].begin_update(PUBLICATION)

    def quiet(seconds: float, states: list[fanin.RankState]) -> bool | None:
        told.append((seconds, states))
        return False if states[1].state_age else None  # less than a millisecond is not known

    client.watch(0, lambda event: None, local_world.PATIENCE, quiet=quiet, quiet_after=0.001)
    seconds, states = told[-1]
    assert seconds > 0
    assert [(one.rank, one.state, one.step) for one in states] == [
        (0, "stable", 1),
        (1, "writing", 1),
        (2, "stable", 1),
    ]
    assert states[1].address == f"127.0.0.1:{ranks[1].port}"
    with pytest.raises(ZeroDivisionError):
        client.watch(0, lambda event: None, quiet=lambda *_: 1 / 0, quiet_after=0.001)
    with pytest.raises(fanin.RequestError, match="quiet_after"):
        client.watch(0, lambda event: None, quiet=quiet, quiet_after=-1)


def test_ages(ranks: list[fanin.Server], client: fanin.Client) -> None:
    """They are of the rank's own clock, in whole milliseconds; none is "not known"."""
    ranks[2].put("lora:new", [fanin.shard_of("x", np.zeros(4))])

    def of(rank: int, name: str = PUBLICATION) -> fanin.PublicationInfo:
        (found,) = (p for p in client.publications() if (p.rank, p.name) == (rank, name))
        return found

    local_world.until(lambda: of(1).commit_age)
    began = time.monotonic()
    ranks[1].begin_update(PUBLICATION)
    local_world.until(lambda: of(1).state_age)
    now = of(1)
    passed = time.monotonic() - began
    assert now.state == "writing" and now.state_age is not None and now.commit_age is not None
    assert 0 < now.state_age <= passed + 0.001
    assert now.commit_age >= now.state_age, "it was committed before it was written"
    ranks[1].commit(PUBLICATION, 2)
    local_world.until(lambda: of(1).state == "stable" and of(1).commit_age)
    assert (of(2, "lora:new").state, of(2, "lora:new").commit_age) == ("unpublished", None)


def test_a_rank_that_says_nothing(ranks: list[fanin.Server]) -> None:
    """Which is not the same as one that refuses."""
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        others = [f"127.0.0.1:{one.getsockname()[1]}" for one in (mute, nobody)]
        with fanin.Client(use_ucx=False) as client:
            client.connect([f"127.0.0.1:{ranks[0].port}", *others])
            assert [info.rank for info in client.publications(timeout=1.5)] == [0]
            seen = {info.address: info for info in client.ranks()}
    assert [(seen[one].connected, seen[one].silent) for one in others] == [
        (False, True),
        (False, False),
    ]
    assert not seen[f"127.0.0.1:{ranks[0].port}"].silent
    assert seen[others[1]].status == "FANIN_ERR_UNREACHABLE"


def test_what_a_server_tells(ranks: list[fanin.Server], client: fanin.Client) -> None:
    server = ranks[1]
    client.pull_into(0, empty())
    assert (server.rank, server.world_size, server.name) == (1, 3, "lora_param_server")
    assert server.publications() == [PUBLICATION]
    assert sorted(server.names(PUBLICATION)) == [A_NAME, B_NAME]
    with pytest.raises(fanin.NotFoundError, match="lora:9"):
        server.names("lora:9")
    stats = server.stats()
    assert stats["commits"] == 1 and stats["tensors"] == 2 and stats["publications_paused"] == 0
    local_world.until(lambda: server.stats()["pulls_good"] == 1)
    text = server.prometheus()
    assert "# TYPE fanin_" in text and text.endswith("\n") and "\0" not in text


# ---------------------------------------------------------------------------------- updates


def test_snapshots_are_read_during_updates() -> None:
    value = np.full((4, 4), 1, np.float32)
    got = np.zeros((4, 4), np.uint16)
    shard = fanin.shard_of("x", got, dtype="BF16", writable=True)
    with servers(1) as (server,), client_of([server]) as client:
        server.put("full:w", [fanin.shard_of("x", value)])
        server.commit("full:w", 1, snapshot=True, cast="BF16", wait=True)
        server.begin_update("full:w")
        value[:] = 2
        client.pull_into("full:w", [shard])
        assert (got == 0x3F80).all()  # 1.0
        server.commit("full:w", 2, snapshot=True, cast="BF16")
        client.pull_into("full:w", [shard], step=2)
        assert (got == 0x4000).all()  # 2.0


def test_paused_publications_say_why(ranks: list[fanin.Server], client: fanin.Client) -> None:
    got = empty()
    for server in ranks:
        server.pause(PUBLICATION, "asleep until the next rollout")
    with pytest.raises(fanin.PausedError, match="asleep until the next rollout") as caught:
        client.pull_into(0, got)
    assert caught.value.retryable and caught.value.rank in (0, 1, 2)
    assert {p.state for p in client.publications()} == {"paused"}
    assert ranks[0].stats()["publications_paused"] == 1
    for server in ranks:
        server.resume(PUBLICATION)
        with pytest.raises(fanin.StateError):
            server.resume(PUBLICATION)
    assert client.pull_into(0, got).step == 1
    assert_step(got, 1)


# ---------------------------------------------------------------------------------- owners


def test_a_server_holds_what_it_lends() -> None:
    def array() -> tuple[np.ndarray, weakref.ref[np.ndarray]]:
        value = np.zeros((2, 2), np.float32)
        return value, weakref.ref(value)

    def alive(*references: weakref.ref[np.ndarray]) -> list[bool]:
        gc.collect()
        return [reference() is not None for reference in references]

    with servers(1) as (server,):
        (a, a_ref), (b, b_ref), (c, c_ref), (d, d_ref) = (array() for _ in range(4))
        server.put("lora:0", [fanin.shard_of("a", a), fanin.shard_of("b", b)])
        server.put("lora:1", [fanin.shard_of("c", c)])
        del a, b, c
        assert alive(a_ref, b_ref, c_ref) == [True] * 3
        with pytest.raises(fanin.RequestError, match="a"):  # it exists
            server.put("lora:0", [fanin.shard_of("a", d)])
        server.put("lora:0", [fanin.shard_of("a", d)], replace=True)
        del d
        assert alive(a_ref, b_ref, c_ref, d_ref) == [False, True, True, True]
        with pytest.raises(fanin.NotFoundError):
            server.remove("lora:0", "z")
        server.remove("lora:0", "a")
        assert alive(d_ref, b_ref) == [False, True]
        server.remove("lora:1")
        assert alive(c_ref, b_ref) == [False, True]
        assert not server._transit
    assert alive(b_ref) == [False]


def test_a_refused_put_keeps_what_was_there() -> None:
    with servers(1) as (server,):
        old, new = np.zeros(2, np.float32), np.zeros(2, np.float32)
        server.put("lora:0", [fanin.shard_of("a", old)])
        reference = weakref.ref(old)
        del old
        twice = [fanin.shard_of("a", new), fanin.shard_of("a", new)]
        with pytest.raises(fanin.RequestError, match="twice") as caught:
            server.put("lora:0", twice, replace=True)
        assert "a" in caught.value.key
        gc.collect()
        assert reference() is not None


# ---------------------------------------------------------------------------------- refusals


def test_pulls_that_are_refused(client: fanin.Client) -> None:
    got = empty()
    with pytest.raises(fanin.NotFoundError, match="lora:other"):
        client.pull_into("other", got)
    with pytest.raises(fanin.NotFoundError) as missing:
        client.pull_into(0, {"no.such.tensor": np.zeros(3, np.float32)})
    assert "no.such.tensor" in missing.value.key and missing.value.remedy
    with pytest.raises(fanin.PeerError) as contradiction:
        client.pull_into(0, {A_NAME: np.zeros((3, 8), np.int32)})
    assert contradiction.value.name == "FANIN_ERR_MISMATCH"
    assert A_NAME in contradiction.value.key
    got[A_NAME].flags.writeable = False
    with pytest.raises(fanin.RequestError, match="read-only"):
        client.pull_into(0, got)
    for arguments, said in [
        ({"step": 1, "at_least": 1}, "both"),
        ({"step": -1}, "step"),
        ({"step": 1.5}, "step"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"max_attempts": -1}, "max_attempts"),
        ({"dtype": "floaty"}, "no dtype"),
        ({"dtype": "I8"}, "converted"),
        ({"stream": fanin.Stream(-1, 0)}, "stream"),
    ]:
        with pytest.raises(fanin.RequestError, match=said):
            client.pull_into(0, empty(), **arguments)  # type: ignore[arg-type]
    with pytest.raises(fanin.RequestError, match="no tensor"):
        client.pull_into(0, {})
    with pytest.raises(fanin.RequestError, match="is no run"):
        client.pull_into("a/b", empty())


@pytest.mark.parametrize("method", ["pull_into", "begin"])
def test_torchs_memory_is_written_after_its_current_stream(
    client: fanin.Client, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    waited: list[int] = []
    asked: list[object] = []
    options = client._options

    def current_stream(device: int) -> SimpleNamespace:
        return SimpleNamespace(
            cuda_stream=100 + device,
            device_index=device,
            synchronize=lambda: waited.append(device),
        )

    def watched(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return options(*arguments)

    shards = [fanin.shard_of(name, array) for name, array in empty().items()]
    on_gpus = [dataclasses.replace(s, device=3 - 2 * (i % 2)) for i, s in enumerate(shards)]
    cuda = SimpleNamespace(is_initialized=lambda: True, current_stream=current_stream)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(client, "_options", watched)
    call = getattr(client, method)
    for given, stream in [(on_gpus, None), (on_gpus, fanin.Stream(7, 1)), (shards, None)]:
        with contextlib.suppress(fanin.FaninError):  # there is no CUDA here
            call(0, given, timeout=5, **({"stream": stream} if stream else {}))
    assert asked[:2] == [fanin.Stream(101, 1), fanin.Stream(7, 1)]
    assert waited == [3]
    assert asked[2] is None  # host memory


def test_a_step_that_never_comes(client: fanin.Client) -> None:
    with pytest.raises(fanin.PullTimeoutError) as caught:
        client.pull_into(0, empty(), step=7, timeout=0.1)
    assert caught.value.phase == "wait" and isinstance(caught.value, TimeoutError)


def test_connections_that_are_refused(ranks: list[fanin.Server]) -> None:
    address = local_world.addresses(ranks)[0]
    with servers(1) as (gone,):
        port = gone.port
    with pytest.raises(fanin.UnreachableError) as caught:
        fanin.Client([f"127.0.0.1:{port}"], use_ucx=False)
    assert caught.value.address == f"127.0.0.1:{port}" and caught.value.retryable
    for wrong, said in [
        ([address, address], "twice"),
        (["nowhere"], "nowhere"),
        ([7], "int, not str"),
        (address, "one string"),
        ([], "address"),
    ]:
        with pytest.raises(fanin.RequestError, match=said):
            fanin.Client(wrong, use_ucx=False)  # type: ignore[arg-type]
    with pytest.raises(fanin.PeerError):
        fanin.Client([address], use_ucx=False)  # two ranks are missing
    for options in ({"server_name": "other"}, {"world_id": os.urandom(16)}):
        with pytest.raises(fanin.PeerError) as world:
            client_of(ranks, **options)
        assert world.value.name == "FANIN_ERR_WORLD"
    client_of(ranks, world_id=ranks[0].world_id, server_name="lora_param_server").close()
    with pytest.raises(fanin.RequestError, match="all zero"):
        client_of(ranks, world_id="0" * 32)
    with (
        fanin.Client(use_ucx=False) as lonely,
        pytest.raises(fanin.StateError, match="address"),
    ):
        lonely.pull_into(0, empty())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "carrier pigeon"}, "no path"),
        ({"world_id": b"short"}, "16 bytes"),
        ({"streams_per_rank": 17}, "17"),
        ({"threads": 65}, "65"),
        ({"connect_timeout": 0}, "connect_timeout"),
        ({"threads": "many"}, "threads"),
    ],
)
def test_client_arguments(options: dict[str, object], said: str) -> None:
    with pytest.raises(fanin.RequestError, match=said):
        fanin.Client(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 1}, "rank"),
        ({"rank": -1}, "rank"),
        ({"world_id": b"\0" * 16}, "world id"),
        ({"world_id": "not hex"}, "world id"),
        ({"world_id": 1 << 70}, "world id"),
        ({"base_port": 65536}, "base_port"),
        ({"bind": "localhost"}, "numeric"),
        ({"bind": "0.0.0.0", "open": True, "allow": "10.0.0.0/8"}, "wildcard"),
        ({"lease": -1}, "lease"),
        ({"lease": 1e12}, "lease"),
        ({"name": ""}, "name"),
        ({"name": b"x"}, "bytes, not str"),
        ({"data_threads": 0}, "data_threads is not 1 to 16"),
        ({"nice": 20}, "nice is not -20 to 19"),
        ({"data_threads": 17}, "data_threads is not 1 to 16"),
    ],
)
def test_server_arguments(options: dict[str, object], said: str) -> None:
    good: dict[str, object] = {"world_id": os.urandom(16), "rank": 0, "world_size": 1}
    with pytest.raises(fanin.RequestError, match=said):
        fanin.Server(**{**good, **options}, use_ucx=False)  # type: ignore[arg-type]


def test_a_port_that_is_taken() -> None:
    with servers(1) as (server,), pytest.raises(fanin.RequestError) as caught:
        fanin.Server(world_id="ab" * 16, rank=0, world_size=1, base_port=server.port)
    assert caught.value.name == "FANIN_ERR_EXISTS" and str(server.port) in str(caught.value)


@pytest.mark.parametrize("run", [3, "3", "lora:3"])
def test_a_server_takes_runs_as_a_client_does(run: int | str, tmp_path: Path) -> None:
    with servers(1) as (server,), fanin.Client([f"127.0.0.1:{server.port}"]) as client:
        name = "base_model.model.q_proj.lora_{}.weight"
        for part, shape in (("A", (2, 4)), ("B", (4, 2))):
            server.put(run, [fanin.shard_of(name.format(part), np.zeros(shape, np.float32))])
        server.set_metadata(run, {"lora_alpha": "2", "base_model_name_or_path": "base"})
        server.commit(run, 1)
        assert client.pull_adapter(run, str(tmp_path / "a"), step=1).step == 1
        server.begin_update(run)
        server.abort_update(run)
        server.commit(run, 2)
        server.pause(run)
        server.resume(run)
        server.withdraw(run)
        assert server.names(run) == [name.format("A"), name.format("B")]
        server.remove(run, name.format("B"))
        server.remove(run)
        assert server.publications() == []


def test_calls_of_a_server_that_are_refused() -> None:
    good = fanin.shard_of("a", np.zeros(2, np.float32))
    with servers(1) as (server,):
        for publication in (".", "", "lora:a b", "lora:\0", "dora:0", 1.5, True, None):
            with pytest.raises(fanin.RequestError):
                server.put(publication, [good])  # type: ignore[arg-type]
        with pytest.raises(fanin.RequestError):
            server.commit("lora:0", 1)
        server.put("lora:0", [good])
        server.commit("lora:0", 5)
        server.begin_update("lora:0")
        with pytest.raises(fanin.RequestError, match="5"):
            server.commit("lora:0", 5)
        with pytest.raises(fanin.RequestError, match="no dtype"):
            server.commit("lora:0", 6, cast="floaty")
        with pytest.raises(fanin.RequestError, match="step"):
            server.commit("lora:0", "6")  # type: ignore[arg-type]
        with pytest.raises(fanin.FaninError):
            server.commit("lora:0", 6, stream=fanin.Stream(0, 0))  # no CUDA here
        with pytest.raises(fanin.RequestError, match='the stream is "torch.*s.cuda_stream'):
            server.commit("lora:0", 6, stream="torch's")  # type: ignore[arg-type]
        server.commit("lora:0", 6)
        with pytest.raises(fanin.StateError):
            server.commit("lora:0", 7)
        with pytest.raises(fanin.RequestError, match="metadata"):
            server.set_metadata("lora:0", {"r": 8})  # type: ignore[dict-item]


def test_entries_are_read_with_the_layout_of_the_c_structures() -> None:
    assert _records.ENTRY.size == ctypes.sizeof(_ffi.Entry)
    assert _records.OWNER.size == ctypes.sizeof(_ffi.Owner)
    owners = (_ffi.Owner * 2)()
    for index, owner in enumerate(owners):
        owner.rank, owner.bytes, owner.region, owner.region_offset = index + 1, 10, 11, 12
        owner.offset[:], owner.extent[:], owner.packed = range(20, 28), range(30, 38), index == 1
    entry = _ffi.Entry(ctypes.sizeof(_ffi.Entry), b"n\xff", 15, 3)
    entry.shape[:], entry.bytes, entry.owners, entry.n_owners = range(40, 48), 9, owners, 2
    got = _records.entry_at(ctypes.addressof(entry))
    held = [
        fanin.Owner(rank, (20, 21, 22), (30, 31, 32), 10, 11, 12, packed)
        for rank, packed in ((1, False), (2, True))
    ]
    assert got == fanin.Entry("n\ufffd", "BF16", (40, 41, 42), 9, tuple(held))
