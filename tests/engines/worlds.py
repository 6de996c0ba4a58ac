# SPDX-License-Identifier: Apache-2.0
"""Worlds of real processes for the engine tests: trainers of torch.distributed, and workers.

A child process runs one of the scripts beside this file and talks with the test in lines of JSON:
it tells events on its standard output, the test tells it things on its standard input. Everything
else that it prints goes to a log file, of which a failing test shows the end. Every wait has a
deadline, and the end of a `with` ends all children of it.
"""

from __future__ import annotations

import collections.abc
import contextlib
import datetime
import faulthandler
import importlib.util
import json
import os
import pathlib
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent


def package_folder() -> pathlib.Path:
    """Where the tests find fanin, the tree's or an installed one; it is not imported here."""
    spec = importlib.util.find_spec("fanin")
    if spec is None or spec.origin is None:
        raise ImportError("no package fanin: install the wheel, or set PYTHONPATH to python/")
    return pathlib.Path(spec.origin).resolve().parents[1]


PYTHON = package_folder()
PATIENCE = 180.0  # seconds; a machine of two cores that runs other tests as well is slow

# ------------------------------------------------------------------------ the test's side


def child_environment(**more: str) -> dict[str, str]:
    """The environment of every child: the package that the tests have, no network, one core."""
    environment = dict(os.environ)
    paths = [str(PYTHON), str(HERE), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    environment.update(PYTHONUNBUFFERED="1", GLOO_SOCKET_IFNAME="lo")
    environment.update(more)
    return environment


class Child:
    """One process; its events come through a thread, so that no wait is without an end."""

    def __init__(
        self,
        name: str,
        script: str,
        options: Any,
        folder: pathlib.Path,
        inside: collections.abc.Sequence[str] = (),
        **more: str,
    ):
        """inside: a command that runs it, as that which enters a network namespace.

        more: variables of its environment.
        """
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-W", "ignore", HERE / script, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(**more),
                text=True,
            )
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.events.put(None)

    def tell(self, what: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"event": what, **fields}) + "\n")
        self.process.stdin.flush()

    def expect(self, what: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """The next event, which must be this one."""
        try:
            event = self.events.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(
                f"{self.name}: no {what!r} in {timeout:.0f} s\n{self.doing()}"
            ) from None
        if event is None:
            self.events.put(None)
            code = self.wait(timeout)
            raise AssertionError(f"{self.name}: ended ({code}) before {what!r}\n{self.tail()}")
        assert event["event"] == what, f"{self.name}: {event}, not {what!r}\n{self.tail()}"
        return event

    def do(self, what: str, timeout: float = PATIENCE, **fields: Any) -> dict[str, Any]:
        """Tells it, and waits until it is done."""
        self.tell(what, **fields)
        return self.expect("done", timeout)

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit status; negative: the signal that killed it."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name}: still there after {timeout:.0f} s\n{self.tail()}"
            ) from None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def doing(self, patience: float = 5.0) -> str:
        """The stacks of its threads, which it writes to its log when it is asked."""
        size = self.log.stat().st_size
        self.process.send_signal(signal.SIGUSR2)
        limit = time.monotonic() + patience
        while self.log.stat().st_size == size and time.monotonic() < limit:
            time.sleep(0.1)
        return self.tail(120)

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {self.name} | {line}" for line in text[-lines:])

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert stream is not None
                stream.close()


@contextlib.contextmanager
def child(
    name: str, script: str, options: Any, folder: pathlib.Path
) -> collections.abc.Iterator[Child]:
    one = Child(name, script, options, folder)
    try:
        yield one
    finally:
        one.close()


class World:
    """The ranks of one torch.distributed job; each gets the options and tells 'ready'."""

    def __init__(self, size: int, options: dict[str, Any], folder: pathlib.Path, script: str):
        folder.mkdir(parents=True, exist_ok=True)
        options = {**options, "rendezvous": f"file://{folder}/rendezvous"}
        self.ranks: list[Child] = []
        try:
            for rank in range(size):
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
                self.ranks.append(Child(f"rank{rank}", script, options, folder, **numbers))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def tell(self, what: str, **fields: Any) -> None:
        for rank in self.ranks:
            rank.tell(what, **fields)

    def expect(self, what: str, timeout: float = PATIENCE) -> list[dict[str, Any]]:
        """The next event of every rank; all must be this one."""
        limit = time.monotonic() + timeout
        found = []
        for rank in self.ranks:
            try:
                found.append(rank.expect(what, max(limit - time.monotonic(), 0.1)))
            except AssertionError as error:
                others = (one.doing() for one in self.ranks if one is not rank)
                raise AssertionError("\n".join([str(error), *others])) from None
        return found

    def do(self, what: str, timeout: float = PATIENCE, **fields: Any) -> list[dict[str, Any]]:
        """Tells all ranks, and waits until each has told that it is done."""
        self.tell(what, **fields)
        return self.expect("done", timeout)

    def wait(self, timeout: float = PATIENCE) -> list[int]:
        limit = time.monotonic() + timeout
        return [rank.wait(max(limit - time.monotonic(), 0.1)) for rank in self.ranks]


@contextlib.contextmanager
def case_world(size: int, folder: pathlib.Path, script: str) -> collections.abc.Iterator[World]:
    """Ranks whose script is run_cases(), for run_case()."""
    with World(size, {}, folder, script) as ranks:
        ranks.expect("ready")
        yield ranks
        ranks.tell("exit")
        assert set(ranks.wait()) == {0}


def run_case(ranks: World, case: str, *arguments: Any, **options: Any) -> None:
    """On all ranks at once."""
    told = ranks.do("run", case=case, arguments=arguments, options=options)
    for rank, answer in enumerate(told):
        assert answer["error"] is None, f"rank {rank}: {answer['error']}"


# ------------------------------------------------------------------------ the child's side


class Control:
    """A child's line to its test. Standard output is the line's; what prints goes to the log."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._pending = b""
        faulthandler.register(signal.SIGUSR2, all_threads=True)

    def say(self, what: str, **fields: Any) -> None:
        self._out.write(json.dumps({"event": what, **fields}) + "\n")
        self._out.flush()

    def hear(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """What the test says next; a test that is gone or silent ends this process."""
        heard = self.heard(timeout)
        if heard is None:
            raise SystemExit("the test says nothing")
        return heard

    def heard(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """What the test said, None if nothing came in time."""
        limit = time.monotonic() + timeout
        while b"\n" not in self._pending:
            if not select.select([0], [], [], max(limit - time.monotonic(), 0.0))[0]:
                return None
            more = os.read(0, 65536)
            if not more:
                raise SystemExit("the test is gone")
            self._pending += more
        line, self._pending = self._pending.split(b"\n", 1)
        heard: dict[str, Any] = json.loads(line)
        return heard

    def obey(self, target: Any, end: str = "exit") -> dict[str, Any]:
        """Calls the methods that the test names, and tells what they return; the command that ends
        it."""
        while (command := self.hear(timeout=3600.0))["event"] != end:
            name = command.pop("event")
            self.say("done", **(getattr(target, name)(**command) or {}))
        return command


def join_world(options: dict[str, Any], backend: str = "gloo") -> tuple[int, int]:
    """Makes this process a rank of the test's world; its number and the world's size."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend,
        init_method=options["rendezvous"],
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    return rank, size


def run_cases(cases: collections.abc.Mapping[str, Any]) -> None:
    """A rank's whole life: it runs those of *cases* that the test names, and tells what each
    raised."""
    import torch.distributed as dist

    control = Control()
    join_world(json.loads(sys.argv[1]))
    control.say("ready")
    while (command := control.hear())["event"] != "exit":
        try:
            cases[command["case"]](*command["arguments"], **command.get("options", {}))
        except BaseException:
            control.say("done", error=traceback.format_exc())
        else:
            control.say("done", error=None)
    dist.destroy_process_group()
