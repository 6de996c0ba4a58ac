# SPDX-License-Identifier: Apache-2.0
"""nixl_info.json: what is written is read back, here and by nixl-fetch, and nothing half-made."""

from __future__ import annotations

import http.client
import json
import os
import stat
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fanin._http import ask_json, base_url
from fanin.errors import HostError, NotFoundError, PullTimeoutError, RequestError
from fanin.info import (
    TrainerInfo,
    addresses_of,
    join_address,
    read_info,
    secret_arguments,
    secret_here,
    split_address,
    wait_stable,
    write_info,
)
from local_world import nixl_fetch

WORLD = "00112233445566778899aabbccddeeff"


def ranks(host: str, base: int, count: int, first: int = 0) -> list[str]:
    return [f"{host}:{base + rank}" for rank in range(first, first + count)]


CASES: dict[str, TrainerInfo] = {
    "one host": TrainerInfo(tuple(ranks("10.0.0.1", 6000, 4)), WORLD, "0", "job", 12),
    "nothing else": TrainerInfo(("node-1:6000",)),
    "ephemeral ports": TrainerInfo(("127.0.0.1:40001", "127.0.0.1:39999", "127.0.0.1:50000")),
    "two hosts, ports by global rank": TrainerInfo(
        tuple(ranks("a", 6000, 2) + ranks("b", 6000, 2, 2)), run="run-7"
    ),
    "two hosts, ports by local rank": TrainerInfo(tuple(ranks("a", 6000, 4) + ranks("b", 6000, 4))),
    "interleaved": TrainerInfo(("a:6000", "b:6001", "a:6002", "b:6003"), run="007"),
    "ipv6": TrainerInfo(("[fd00::1]:6000", "[fd00::1]:6001", "[fd00::2]:6002")),
    "ipv6 on one host": TrainerInfo(("[::1]:6000", "[::1]:6001")),
    "port below the rank's base": TrainerInfo(("a:5", "a:1")),
    "large step": TrainerInfo(("a:1",), step=2**64 - 1),
    "step zero": TrainerInfo(("a:1",), step=0),
    "secret": TrainerInfo(("a:1",), secret_file="/run/secret/launch"),
    "publications": TrainerInfo(("a:1",), run="0", publications=("lora:0", "full:0", "full:x")),
}


@pytest.mark.parametrize("info", CASES.values(), ids=CASES.keys())
def test_round_trip(tmp_path: Path, info: TrainerInfo) -> None:
    path = write_info(tmp_path, info)
    assert path == tmp_path / "nixl_info.json"
    assert read_info(tmp_path) == read_info(path) == read_info(str(path)) == info
    assert addresses_of(path) == addresses_of(str(tmp_path)) == addresses_of(info) == info.addresses
    assert wait_stable(tmp_path, 0) == wait_stable(path, 0) == info
    assert sorted(os.listdir(tmp_path)) == ["STABLE", "nixl_info.json"]


def test_short_form_is_what_others_write() -> None:
    assert CASES["one host"].to_json() == {
        "run_idx": 0,
        "world_size": 4,
        "world_id": WORLD,
        "server_name": "job",
        "step": 12,
        "host": "10.0.0.1",
        "base_port": 6000,
    }
    assert CASES["two hosts, ports by local rank"].to_json()["hosts"] == [
        {"host": "a", "base_port": 6000, "ranks": [0, 1, 2, 3]},
        {"host": "b", "base_port": 5996, "ranks": [4, 5, 6, 7]},
    ]
    assert CASES["interleaved"].to_json()["run_idx"] == "007"
    assert CASES["ipv6"].to_json()["hosts"][0]["host"] == "fd00::1"


def test_counted_ranks_follow_those_before(tmp_path: Path) -> None:
    hosts = [
        {"host": "a", "base_port": 6000, "ranks": [2, 0]},
        {"host": "b", "base_port": 7000, "ranks": 1},
        {"host": "c", "base_port": 0, "ranks": [3]},
    ]
    (tmp_path / "nixl_info.json").write_text(json.dumps({"hosts": hosts}))
    assert read_info(tmp_path).addresses == ("a:6000", "b:7001", "a:6002", "c:3")


# ------------------------------------------------------------- nixl-fetch


def test_nixl_fetch_reads_what_is_written(tmp_path: Path) -> None:
    with served(tmp_path, ["--world-size", "3", "--name", "job"]) as (info, _):
        path = write_info(
            tmp_path / "step", TrainerInfo(info.addresses, info.world_id, info.run, "job", 1)
        )
        done = subprocess.run(
            [nixl_fetch(), "pull", str(path), "--out", str(tmp_path / "adapter"), "--json"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "adapter" / "adapter_config.json").exists()
        assert json.loads((tmp_path / "adapter" / "fanin.json").read_text())["world_id"] == (
            info.world_id
        )


@pytest.mark.parametrize("size", [1, 3])
def test_reads_what_nixl_fetch_writes(tmp_path: Path, size: int) -> None:
    with served(tmp_path, ["--world-size", str(size), "--run", "5"]) as (info, ready):
        assert info.run == "5"
        assert info.world_id == ready["world_id"]
        assert list(info.addresses) == [rank["address"] for rank in ready["ranks"]]


class served:
    """A nixl-fetch that serves a small adapter; gives what its file and its first line say."""

    def __init__(self, directory: Path, options: list[str]) -> None:
        self.file = directory / "written.json"
        self.command = [nixl_fetch(), "serve", "--adapter-shape", "small", "--json"]
        self.command += ["--info", str(self.file), *options]

    def __enter__(self) -> tuple[TrainerInfo, dict[str, Any]]:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        try:
            return read_info(self.file), json.loads(line)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


# ------------------------------------------------------------- bad files

GOOD = {"host": "a", "base_port": 6000, "world_size": 2}
TWO = [{"host": "a", "base_port": 6000, "ranks": 1}, {"host": "b", "base_port": 6000, "ranks": 1}]
BAD = [
    ("", "no valid JSON"),
    ('{"host": "a", "base_port": 60', "no valid JSON"),
    ('{"host": "a", "host": "b"}', "'host' is there twice"),
    ("[1]", "not a JSON object"),
    ("[" * 100000, "no valid JSON"),
    ({**GOOD, "host": None}, "host: is missing"),
    ({**GOOD, "host": 5}, "host: 5 is no host"),
    ({**GOOD, "host": "a b"}, "'a b' is no host"),
    ({**GOOD, "host": "a/b"}, "'a/b' is no host"),
    ({**GOOD, "base_port": None}, "base_port: None is not an integer from 1 to 65535"),
    ({**GOOD, "base_port": 0}, "base_port: 0 is not"),
    ({**GOOD, "base_port": 6000.0}, "base_port: 6000.0 is not"),
    ({**GOOD, "base_port": True}, "base_port: True is not"),
    ({**GOOD, "base_port": "6000"}, "base_port: '6000' is not"),
    ({**GOOD, "base_port": 65535}, "rank 1 would listen on port 65536"),
    ({**GOOD, "world_size": None}, "world_size: is missing"),
    ({**GOOD, "world_size": 0}, "world_size: 0 is not an integer from 1 to 65536"),
    ({**GOOD, "world_size": 65537}, "world_size: 65537 is not"),
    ({**GOOD, "world_id": "12"}, "world_id: world id '12' is not 32 hex digits"),
    ({**GOOD, "world_id": "0" * 32}, "world_id: the world id is all zero"),
    ({**GOOD, "world_id": "g" * 32}, "world_id: "),
    ({**GOOD, "run_idx": "a b"}, "run_idx: run 'a b' is not 1 to 64"),
    ({**GOOD, "run_idx": 1.5}, "run_idx: run 1.5 is not 1 to 64"),
    ({**GOOD, "step": -1}, "step: -1 is not"),
    ({**GOOD, "step": 2**64}, "step: "),
    ({**GOOD, "server_name": ""}, "server_name: '' is no name"),
    ({**GOOD, "secret_file": "launch"}, "secret_file: 'launch' is no absolute path"),
    ({**GOOD, "secret_file": 7}, "secret_file: 7 is no absolute path"),
    ({"hosts": {}}, "hosts: is not a list"),
    ({"hosts": []}, "hosts: 0 ranks"),
    ({"hosts": [3]}, r"hosts\[0\].ranks"),
    ({"hosts": TWO, "world_size": 3}, "world_size: is 3, but the hosts have 2 ranks"),
    ({"hosts": [{**TWO[0], "ranks": [0, 0]}]}, r"hosts\[0\].ranks: rank 0 is named twice"),
    ({"hosts": [{**TWO[0], "ranks": [1]}]}, r"hosts\[0\].ranks: 1 is not an integer from 0 to 0"),
    ({"hosts": [{**TWO[0], "ranks": ["0"]}]}, r"hosts\[0\].ranks: '0' is not"),
    ({"hosts": [{**TWO[0], "ranks": -1}]}, r"hosts\[0\].ranks: -1 is not"),
    ({"hosts": [{"host": "a", "base_port": 0, "ranks": 1}]}, "rank 0 would listen on port 0"),
    ({"hosts": [{"base_port": 1, "ranks": 1}]}, r"hosts\[0\].host: is missing"),
    ({"hosts": [TWO[0], {**TWO[1], "host": "a", "base_port": 5999}]}, "a:6000 is given for rank 0"),
]


@pytest.mark.parametrize(("content", "problem"), BAD, ids=range(len(BAD)))
def test_bad_files_name_file_and_field(tmp_path: Path, content: Any, problem: str) -> None:
    path = tmp_path / "nixl_info.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(RequestError, match=problem) as caught:
        read_info(tmp_path)
    assert str(path) in caught.value.message


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    content = write_info(tmp_path, CASES["interleaved"]).read_bytes().rstrip()
    for length in range(len(content)):
        (tmp_path / "cut.json").write_bytes(content[:length])
        with pytest.raises(RequestError, match="cut.json"):
            read_info(tmp_path / "cut.json")


def test_publications_of_other_kinds_are_left_out(tmp_path: Path) -> None:
    place = tmp_path / "nixl_info.json"
    text = '{"host": "h", "base_port": 1, "world_size": 1, "publications": %s}'
    place.write_text(text % '["full:0", "kv:0", "full:0", "x"]')
    assert read_info(place).publications == ("full:0",)
    for wrong in ('"full:0"', "[0]", '["full:"]', '["full:a/b"]'):
        place.write_text(text % wrong)
        with pytest.raises(RequestError, match="publications"):
            read_info(place)
    with pytest.raises(RequestError, match="'0' is no publication"):
        TrainerInfo(("a:1",), publications=("0",))


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        read_info(tmp_path)
    with pytest.raises(HostError):
        read_info("a\0b/nixl_info.json")
    (tmp_path / "latin.json").write_bytes(b'{"host": "\xff"}')
    with pytest.raises(RequestError, match="no valid JSON"):
        read_info(tmp_path / "latin.json")


# ------------------------------------------------------------- writing order


def test_the_marker_comes_last_and_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays the order of what reaches the disk: rename, sync, marker, sync; marker gone first."""
    events: list[str] = []

    def record(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "fsync":
                directory = stat.S_ISDIR(os.fstat(args[0]).st_mode)
                events.append("sync directory" if directory else "sync file")
            else:
                events.append(f"{name} {Path(args[-1]).name}")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "unlink"):
        record(name)
    made = ["sync file", "rename nixl_info.json", "sync directory", "sync file", "sync directory"]
    write_info(tmp_path, CASES["nothing else"])
    assert events == ["unlink STABLE", *made]
    events.clear()
    write_info(tmp_path, CASES["one host"])
    assert events == ["unlink STABLE", "sync directory", *made]


@pytest.mark.parametrize("point", ["rename", "fsync"])
def test_a_failed_writing_leaves_no_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    write_info(tmp_path, CASES["one host"])
    real = os.fsync

    def fail(*args: Any) -> None:
        if point == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode):
            return real(args[0])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, point, fail)
        with pytest.raises(HostError, match="No space left"):
            write_info(tmp_path, CASES["nothing else"])
    assert os.listdir(tmp_path) == ["nixl_info.json"]
    assert read_info(tmp_path) == CASES["one host"]
    with pytest.raises(PullTimeoutError, match="STABLE"):
        wait_stable(tmp_path, 0)


def test_readers_never_see_a_half_written_file(tmp_path: Path) -> None:
    infos = [CASES["one host"], CASES["two hosts, ports by local rank"]]
    write_info(tmp_path, infos[0])
    stop = threading.Event()
    problems: list[BaseException] = []
    seen = set()

    def read() -> None:
        try:
            while not stop.is_set():
                seen.add(read_info(tmp_path))
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(60):
        write_info(tmp_path, infos[i % 2])
    stop.set()
    thread.join()
    assert not problems
    assert seen <= set(infos) and seen


def test_no_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot write"):
        write_info(tmp_path / "file", CASES["one host"])
    with pytest.raises(RequestError, match="port 1, and") as caught:
        write_info(tmp_path / "new", TrainerInfo(("a:9", "a:10", "b:1")))
    assert caught.value.rank == 2
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------- waiting


def test_wait_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PullTimeoutError, match="step_1 is not there after 0.01 s"):
        wait_stable(tmp_path / "step_1", 0.01)
    (tmp_path / "step_1").mkdir()
    with pytest.raises(PullTimeoutError, match="STABLE is not there"):
        wait_stable(tmp_path / "step_1", 0.01)
    (tmp_path / "step_1" / "STABLE").touch()
    with pytest.raises(TimeoutError, match="nixl_info.json is not there"):
        wait_stable(tmp_path / "step_1", 0.01)


def test_wait_returns_when_the_trainer_has_written(tmp_path: Path) -> None:
    place = tmp_path / "broadcast" / "step_3"
    waiting = threading.Event()
    result: list[TrainerInfo] = []

    def wait() -> None:
        waiting.set()
        result.append(wait_stable(place, 30))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    write_info(place, CASES["ipv6"])
    thread.join(30)
    assert result == [CASES["ipv6"]]


# ------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("a:1", ("a:1",)),
        (" a:1 , b:2 ", ("a:1", "b:2")),
        ("[::1]:1,[fe80::1%eth0]:2", ("[::1]:1", "[fe80::1%eth0]:2")),
        (["a:1", "b:2"], ("a:1", "b:2")),
        ([["a", 1], ("::1", 2), ("[::2]", "3")], ("a:1", "[::1]:2", "[::2]:3")),
        ((x for x in ["a:1"]), ("a:1",)),
    ],
)
def test_addresses(target: Any, expected: tuple[str, ...]) -> None:
    assert addresses_of(target) == expected


@pytest.mark.parametrize("written", ["fe80::1%25eth0", "fe80::1%eth0"])
def test_urls_of_link_local_addresses(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 6874 has %25 in a URL, the kernel's resolver a plain %."""
    asked: list[str] = []

    def connect(connection: http.client.HTTPConnection) -> None:
        asked.append(connection.host)
        raise OSError("nobody is there")

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect)
    url = base_url(f"http://[{written}]:8000/v1")
    with pytest.raises(OSError, match="nobody"):
        ask_json("GET", url, "/nixl/status", deadline=time.monotonic() + 5)
    assert asked == ["fe80::1%eth0"]


@pytest.mark.parametrize(
    "target",
    [
        "",
        " ",
        "a:1,",
        "a:0",
        "a:65536",
        "a:1x",
        ":1",
        "::1:5",
        "[]:5",
        "a:1,a:1",
        [],
        [["a"]],
        [["a", 1.5]],
        [["a", True]],
        [["", 1]],
        [5],
        5,
        b"a:1",
        {"a": 1},
        None,
        "a:\u0661",
    ],
)
def test_no_addresses(target: Any) -> None:
    with pytest.raises(RequestError):
        addresses_of(target)


def test_addresses_of_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        addresses_of("nowhere")
    with pytest.raises(NotFoundError):
        addresses_of(tmp_path / "x")


def test_split_and_join() -> None:
    for text in ("a:1", "[::1]:65535", "10.0.0.1:6000"):
        assert join_address(*split_address(text)) == text
    with pytest.raises(RequestError):
        join_address("a:b]", 5)
    with pytest.raises(RequestError):
        join_address("a", 0)


def test_which_secret_a_client_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FANIN_SECRET_FILE", raising=False)
    assert secret_here() is None and secret_arguments(None) == {}
    assert secret_arguments("/a") == {"secret_file": "/a"}
    monkeypatch.setenv("FANIN_SECRET_FILE", "b")  # of this process: it goes before
    assert secret_here() == os.path.abspath("b") and secret_arguments("/a") == {}
    monkeypatch.setenv("FANIN_SECRET_FILE", "")  # none at all
    assert secret_here() is None and secret_arguments("/a") == {}


def test_info_checks_its_fields() -> None:
    for bad in (
        {"world_id": "x"},
        {"run": "a b"},
        {"step": -1},
        {"server_name": ""},
        {"secret_file": "x"},
    ):
        with pytest.raises(RequestError):
            TrainerInfo(("a:1",), **bad)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        TrainerInfo(())
    assert TrainerInfo([["a", 1]]).addresses == ("a:1",)  # type: ignore[arg-type]
    assert TrainerInfo(("a:1",), world_id=WORLD.upper()).world_id == WORLD
