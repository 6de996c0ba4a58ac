# SPDX-License-Identifier: Apache-2.0
"""Nine ways in which a run stalls at three in the morning, staged with ranks that are processes.

Each is asked for as somebody would who is woken: the answer has to come within two seconds, name
the culprit and say what to do.

With ``-s`` each case's question, time and answer are printed.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fanin
import numpy as np
import pytest
from local_world import (
    A_NAME,
    B_NAME,
    CONFIG,
    PATIENCE,
    PUBLICATION,
    ROWS,
    SLOWNESS,
    nixl_fetch,
    stop,
    weights,
)
from odd_ranks import NarrowWay, refuse

LIMIT = 2.0 * SLOWNESS  # seconds from the question to the answer
MODEL = "full:0"
MODEL_COLUMNS = 3 << 20  # 12 MiB a rank: more than the sockets on the way take


class Rank:
    """One rank's trainer, which does what it is told."""

    def __init__(self, world_id: bytes, rank: int) -> None:
        self.server = fanin.Server(
            world_id=world_id, rank=rank, world_size=len(ROWS), use_ucx=False, lease=0.0
        )
        first, last = ROWS[rank]
        whole = weights(1)
        self.shards = {
            A_NAME: (whole[A_NAME][first:last].copy(), (3, 8), (first, 0)),
            B_NAME: (whole[B_NAME][:, first:last].copy(), (8, 3), (0, first)),
        }

    def publish(self) -> int:
        own = self.server.rank
        self.server.put(
            PUBLICATION,
            [
                fanin.shard_of(name, array, shape=shape, offset=offset)
                for name, (array, shape, offset) in self.shards.items()
            ],
        )
        self.server.set_metadata(PUBLICATION, CONFIG)
        self.server.commit(PUBLICATION, 1)
        part = np.zeros((1, MODEL_COLUMNS), np.float32)
        whole = (len(ROWS), MODEL_COLUMNS)
        self.server.put(MODEL, [fanin.shard_of("w", part, shape=whole, offset=(own, 0))])
        self.server.commit(MODEL, 1)
        return self.server.port

    def begin(self) -> None:
        self.server.begin_update(PUBLICATION)

    def commit(self, step: int, what: str) -> None:
        for array, _, _ in self.shards.values():
            if what == "other weights":
                array += 1
        if what == "a NaN" and self.server.rank == 0:
            self.shards[A_NAME][0][0, 0] = np.nan
        self.server.commit(PUBLICATION, step)

    def pause(self, reason: str) -> None:
        self.server.pause(PUBLICATION, reason)

    def resume(self) -> None:
        self.server.resume(PUBLICATION)


def serve(world_id: bytes, rank: int, pipe: multiprocessing.connection.Connection) -> None:
    one = Rank(world_id, rank)
    while (order := pipe.recv()) is not None:
        name, arguments = order
        pipe.send(getattr(one, name)(*arguments))
    one.server.close()


class Trainer:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        world_id = os.urandom(16)
        self.pipes = []
        self.processes = []
        for rank in range(len(ROWS)):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=serve, args=(world_id, rank, there)))
            self.processes[-1].start()
            self.pipes.append(here)
        self.ports = self.all("publish")
        self.target = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.step = 1

    def one(self, rank: int, name: str, *arguments: Any) -> Any:
        self.pipes[rank].send((name, arguments))
        assert self.pipes[rank].poll(PATIENCE), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def all(self, name: str, *arguments: Any) -> list[Any]:
        return [self.one(rank, name, *arguments) for rank in range(len(ROWS))]

    def commit(self, what: str) -> None:
        self.step += 1
        self.all("commit", self.step, what)

    def update(self, what: str) -> None:
        self.all("begin")
        self.commit(what)

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with suppress(BrokenPipeError):  # it has failed, and said why
                pipe.send(None)
            process.join(PATIENCE)
            process.kill()


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    try:
        yield made
    finally:
        made.close()


@dataclass
class Answer:
    status: int
    text: str

    def __contains__(self, sentence: str) -> bool:
        return sentence in self.text


def command(*words: str | Path) -> list[str]:
    return [nixl_fetch(), *map(str, words)]


def tell(words: list[str], took: float, done: Answer) -> Answer:
    print(f"\n{took:.2f} s: nixl-fetch {shlex.join(words[1:])}\n{done.text}", end="")
    assert took < LIMIT, done.text
    return done


def ask(*words: str | Path, until: str = "") -> Answer:
    """What the command says, which is not long in coming.

    What needs time to show is asked for again *until* it is in the answer.
    """
    limit = time.monotonic() + PATIENCE
    while True:
        began = time.monotonic()
        done = subprocess.run(command(*words), capture_output=True, text=True, timeout=PATIENCE)
        took = time.monotonic() - began
        answer = Answer(done.returncode, done.stdout + done.stderr)
        if until in answer:
            return tell(command(*words), took, answer)
        assert time.monotonic() < limit, answer.text


def compare(trainer: Trainer, what: str) -> Answer:
    """``diff --wait-step``, which had the step before when an update came."""
    words = command("diff", "--wait-step", trainer.target, PUBLICATION)
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()  # it waits, and says for what
            assert f"waiting for step {trainer.step + 1} of {PUBLICATION}" in line
            trainer.update(what)
            began = time.monotonic()
            out, err = process.communicate(timeout=PATIENCE)
            took = time.monotonic() - began
        finally:
            process.kill()
    return tell(words, took, Answer(process.returncode, out + err))


def test_a_rank_stuck_in_its_update(trainer: Trainer) -> None:
    trainer.one(1, "begin")
    answer = ask("status", trainer.target, PUBLICATION)
    for rank in (0, 2):
        trainer.one(rank, "begin")
    trainer.commit("other weights")
    assert answer.status == 12
    assert "rank 1: in its update for " in answer
    assert f"its last step is {trainer.step - 1}" in answer
    assert "nobody can read it until its trainer commits: see what that process does" in answer


def test_a_rank_that_is_stopped(trainer: Trainer) -> None:
    pid = trainer.processes[2].pid
    assert pid is not None
    stop(pid)
    try:
        answer = ask("status", trainer.target, PUBLICATION)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.status == 13
    assert "rank 2 does not answer (stopped?)" in answer
    assert "see on its host whether the process is stopped" in answer


def test_a_rank_that_is_slow(trainer: Trainer, tmp_path: Path) -> None:
    way = NarrowWay(trainer.ports[1], 1 << 16)
    target = f"127.0.0.1:{trainer.ports[0]},{way.address},127.0.0.1:{trainer.ports[2]}"
    words = command("pull", target, MODEL, tmp_path / "model", "--path", "stream", "--quiet")
    with subprocess.Popen(
        [*words, "--trace", str(tmp_path / "pull.json")], stdout=subprocess.DEVNULL
    ) as pull:
        try:
            answer = ask("status", trainer.target, MODEL, until="is slow")
        finally:
            way.wide.set()
        assert pull.wait(PATIENCE) == 0
    way.listener.shutdown(socket.SHUT_RDWR)
    assert "rank 1 is slow: readers have waited " in answer
    assert "see its host's network and CPU" in answer
    answer = ask("trace", tmp_path / "pull.json")
    assert answer.status == 0
    assert "slowest: rank 1, " in answer
    assert " in read, " in answer


def test_an_engine_that_holds_leases(trainer: Trainer) -> None:
    with fanin.Client(trainer.target.split(","), use_ucx=False) as client:
        into = np.zeros((len(ROWS), MODEL_COLUMNS), np.float32)
        packed = fanin.pack([fanin.shard_of("w", into, writable=True)])
        with client.begin(MODEL, packed):
            answer = ask("status", trainer.target, MODEL, until="has held a lease")
    assert "engine of this user has held a lease for 2" in answer
    assert "see what that engine does" in answer


def test_a_trainer_whose_weights_do_not_change(
    trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "nothing is wrong" in ask("status", trainer.target, PUBLICATION)
    with fanin.Client(trainer.target.split(","), use_ucx=False) as engine:
        engine.pull_adapter(0, tmp_path / "before")
        answer = compare(trainer, "the same weights")
        engine.pull_adapter(0, tmp_path / "after")
        trainer.update("other weights")
        engine.pull_adapter(0, tmp_path / "later")
    assert answer.status == 0
    assert "nothing changed: all 2 tensors are equal: did the optimizer write?" in answer
    same = [r.getMessage() for r in caplog.records if "the very bytes" in r.getMessage()]
    assert len(same) == 1, caplog.text  # the engine's own log says so, too
    assert (
        f"lora:0 step {trainer.step - 1} has the very bytes of step {trainer.step - 2}" in same[0]
    )
    assert "nixl-fetch diff --wait-step" in same[0]


def test_a_nan_in_one_tensor(trainer: Trainer) -> None:
    answer = compare(trainer, "a NaN")
    assert answer.status == 1
    assert "1 of 2 tensors changed, the most " in answer
    assert f"1 tensor has NaN in B: {A_NAME}" in answer


def test_readers_that_are_always_overtaken(trainer: Trainer) -> None:
    into = {name: np.zeros(shape, np.float32) for name, shape in ((A_NAME, (3, 8)),)}
    packed = fanin.pack(fanin.shard_of(n, a, writable=True) for n, a in into.items())
    with fanin.Client(trainer.target.split(","), use_ucx=False, path="stream") as client:
        for _ in range(16):
            session = client.begin(0, packed)
            trainer.update("other weights")
            with pytest.raises(fanin.StaleError):
                session.end()
    answer = ask("status", trainer.target, PUBLICATION)
    assert "readers are too slow or updates too soon: " in answer
    assert "let readers pull right after a commit" in answer


def test_a_paused_run(trainer: Trainer) -> None:
    trainer.all("pause", "evaluating")
    answer = ask("status", trainer.target, PUBLICATION)
    trainer.all("resume")
    assert answer.status == 12
    assert all(f"rank {rank} is paused for " in answer for rank in range(len(ROWS)))
    assert ": evaluating" in answer
    assert answer.text.count("readers wait until the trainer resumes the run") == 1


@contextmanager
def another_release() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, args=(listener,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)


def test_a_rank_of_another_release(trainer: Trainer) -> None:
    with another_release() as other:
        addresses = [*trainer.target.split(",")[:2], other]
        answer = ask("status", ",".join(addresses), PUBLICATION)
    assert answer.status == 14
    assert (
        f"{other} is of another release: " in answer or "rank 2 is of another release: " in answer
    )
    assert "install one release of fanin for trainer and engines" in answer
