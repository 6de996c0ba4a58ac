#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""relays.py [--readers N] [--ranks N] [--mbit N] [--mib N] [--modes one,direct,relay] [--turns N]
          [--kill N | --stop N | --late N] [--slow N] [--at F] [--by N] [--congestion NAME]
          [--far N [--line MBIT] [--no-places]] [--json]

What a fleet costs a trainer: N readers of its ranks, each in a network namespace of its own behind
one bridge, each link limited both ways. Modes take turns, each turn a new step:

  one     the first reader alone
  direct  all readers from the ranks
  relay   all readers by fanin.Relay, which hand on to each other what they have

Told are the time from the commit to the last reader's end, as a multiple of one pull (the median of
"one"), and the models that left the trainer: payload that its ranks have sent, and all bytes on
their links as a multiple of those of one pull, with what was lost on the way. Each reader compares
all bytes with the trainer's live memory after each step.

A fault strikes in the turns of "relay" when --at of one pull has passed: reader N is killed,
stopped, or begins only then (--late). Whoever was killed or stopped begins again in the next turn.
--slow: reader N sends at one --by-th of the rate, in all turns. The late or slow one's own time is
told by itself.

--far: the last N readers are at another site, behind one line of --line Mbit/s. They say so, unless
--no-places is given. Told is how many models cross the line, both ways together.

By TLS with a secret made for it. Needs root, ip, tc and the package; says what is
missing and exits with 77.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fanin
from switch import NETWORK, Switch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "engines"))
from worlds import Child, Control

RUN, PORT, WIDTH, TENSORS = "full:0", 6000, 4096, 16
MODES = ("one", "direct", "relay")
COUNTS = ("bytes_from_origin", "bytes_from_relays", "late", "taken_over")
PATIENCE = 20.0  # a step that takes so many times what it should has failed
_libc = ctypes.CDLL(None)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def tensors_at(
    options: argparse.Namespace, memory: mmap.mmap, rank: int | None
) -> list[fanin.Shard]:
    """The model's tensors, in *memory*: a rank's rows of each, or whole ones."""
    whole = options.mib * (1 << 20) // TENSORS // WIDTH
    rows = whole if rank is None else whole // options.ranks
    start, shards = address_of(memory), []
    for at in range(TENSORS):
        box = fanin.Box((rows * (rank or 0), 0), (rows, WIDTH), (0, 0), start + at * rows * WIDTH)
        shards.append(fanin.Shard(f"t{at:02}", "U8", (whole, WIDTH), (box,), owner=memory))
    return shards


def mapped(options: argparse.Namespace, rank: int) -> mmap.mmap:
    """The memory of a rank, of which every process has a view."""
    with open(f"{options.folder}/{rank}", "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


# ------------------------------------------------------------------------ the children


class Rank:
    """A rank of the trainer, whose bytes are new in each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._memory = mapped(options, options.index)
        self._server = fanin.Server(
            world_id=options.world, rank=options.index, world_size=options.ranks, base_port=PORT,
            bind=options.bind, open=True, allow=NETWORK, secret_file=options.secret_file,
            use_ucx=False,
        )  # fmt: skip
        self._server.put(RUN, tensors_at(options, self._memory, options.index))

    def step(self, number: int) -> dict[str, Any]:
        """When it was committed."""
        self._server.begin_update(RUN)
        self._memory[:] = os.urandom(len(self._memory))
        self._server.commit(RUN, number)
        return {"at": time.monotonic()}

    def sent(self) -> dict[str, Any]:
        return {"payload": self._server.stats()["bytes_streamed"]}


class Reader:
    """Pulls the whole model, directly or by a relay, into the same memory."""

    def __init__(self, options: argparse.Namespace, control: Control) -> None:
        self._control = control
        self._live = [mapped(options, rank) for rank in range(options.ranks)]
        self._memory = mmap.mmap(-1, options.mib << 20)
        self._packed = fanin.pack(tensors_at(options, self._memory, None))
        how: dict[str, Any] = {"secret_file": options.secret_file, "use_ucx": False}
        how |= {"streams_per_rank": 1}  # more of them starve each other on a slow link
        self._direct = fanin.Client(options.targets, **how)
        self._relay: Any = None
        self._before: dict[str, int] = {}
        if "relay" in options.modes:
            place = "" if options.no_places else "far" if self._is_far(options) else "near"
            self._relay = fanin.Relay(options.targets, network=NETWORK, place=place, **how)

    @staticmethod
    def _is_far(options: argparse.Namespace) -> bool:
        return bool(options.index > options.readers - options.far)

    def pull(self, mode: str, step: int, timeout: float) -> dict[str, Any]:
        if self._relay is not None:
            self._relay.release()
        by = self._relay if mode == "relay" else self._direct
        self._control.say("begun", at=time.monotonic())
        result = by.pull_into(RUN, self._packed, step=step, timeout=timeout)
        at = time.monotonic()
        told: dict[str, int] = {}
        if mode == "relay":  # bytes are since the relay was made
            now = self._relay.stats()
            told = now | {name: now[name] - self._before.get(name, 0) for name in COUNTS[:2]}
            self._before = now
        return {"at": at, "step": result.step, "right": self._right(), **told}

    def _right(self) -> bool:
        """Whether all bytes are those of the ranks."""
        own, piece = address_of(self._memory), len(self._memory) // TENSORS // len(self._live)
        return not any(
            _libc.memcmp(
                ctypes.c_void_p(own + (at * len(self._live) + rank) * piece),
                ctypes.c_void_p(address_of(live) + at * piece),
                ctypes.c_size_t(piece),
            )
            for rank, live in enumerate(self._live)
            for at in range(TENSORS)
        )


def child() -> None:
    control, options = Control(), argparse.Namespace(**json.loads(sys.argv[1]))
    made = Rank(options) if options.role == "rank" else Reader(options, control)
    control.say("here")
    control.obey(made)


# ---------------------------------------------------------------------------- measuring


class Lab:
    """The ranks on the first hosts, readers on the others."""

    def __init__(self, stack: ExitStack, options: argparse.Namespace) -> None:
        self._stack, self._options = stack, options
        hosts = options.ranks + options.readers
        self._switch = Switch(
            stack, hosts, options.mbit, options.congestion, options.far, options.line
        )
        self.ideal = options.mib * (1 << 20) * 8 / options.mbit / 1e6
        self._targets = [f"{self._switch.address(r)}:{PORT + r}" for r in range(options.ranks)]
        self._ranks = [self._start("rank", r, r) for r in range(options.ranks)]
        for rank in self._ranks:
            rank.expect("here")
        self._readers = {n: self._reader(n) for n in range(1, options.readers + 1)}
        for reader in self._readers.values():
            reader.expect("here")
        if options.slow:
            self._switch.up(self._host(options.slow), options.mbit / options.by)
        self._step = 0

    def _host(self, reader: int) -> int:
        return self._options.ranks - 1 + reader

    def _start(self, role: str, host: int, index: int) -> Child:
        options = {**vars(self._options), "role": role, "index": index}
        options |= {"bind": self._switch.address(host), "targets": self._targets}
        folder, inside = Path(self._options.folder), self._switch.inside(host)
        one = Child(f"{role}{index}", str(Path(__file__).resolve()), options, folder, inside)
        self._stack.callback(one.close)
        return one

    def _reader(self, number: int) -> Child:
        return self._start("reader", self._host(number), number)

    def _sent(self) -> tuple[int, int]:
        """Bytes that the ranks have sent: on their links, and payload."""
        payload = sum(rank.do("sent")["payload"] for rank in self._ranks)
        return sum(self._switch.sent(r) for r in range(self._options.ranks)), payload

    def turn(self, mode: str, one: float) -> dict[str, Any]:
        """A step; one: seconds of one pull, as far as is known."""
        options, faults = self._options, mode == "relay"
        self._step += 1
        victim = faults and (options.kill or options.stop)
        late = faults and options.late
        wait = PATIENCE * max(one, self.ideal) + 60
        if mode == "direct":
            wait *= options.readers
        waits = [n for n in self._readers if (mode != "one" or n == 1) and n != late]

        def begin(number: int) -> float:
            self._readers[number].tell("pull", mode=mode, step=self._step, timeout=wait)
            return float(self._readers[number].expect("begun", wait)["at"])

        for number in waits:
            begin(number)
        time.sleep(0.5)  # until their requests are parked at the ranks
        before = self._sent()
        crossed = self._switch.crossed() if options.far else 0
        for rank in self._ranks:
            rank.tell("step", number=self._step)
        start = max(rank.expect("done")["at"] for rank in self._ranks)
        began: dict[int, float] = {}
        if victim or late:
            time.sleep(max(0.0, start + options.at * one - time.monotonic()))
        if victim:
            how = signal.SIGKILL if options.kill else signal.SIGSTOP
            self._readers[victim].process.send_signal(how)
            waits.remove(victim)
        if late:
            began[late] = begin(late)
            waits.append(late)
        ends = {number: self._readers[number].expect("done", wait) for number in waits}
        sent, payload = (now - then for now, then in zip(self._sent(), before, strict=True))
        if victim:
            self._readers[victim].close()
            self._readers[victim] = self._reader(victim)
            self._readers[victim].expect("here")
        if not all(end["right"] and end["step"] == self._step for end in ends.values()):
            sys.exit(f"relays: WRONG BYTES in step {self._step}, {mode}: {ends}")
        took = {number: end["at"] - began.get(number, start) for number, end in ends.items()}
        own = late or (options.slow if mode == "relay" else 0)
        told: dict[str, Any] = {"own_s": took.pop(own)} if own in took else {}
        if mode == "relay":
            told |= {name: sum(end[name] for end in ends.values()) for name in COUNTS}
        last = max(took, key=took.__getitem__)
        told |= {"last": last, "first_s": min(took.values())}
        told |= {"sent": sent, "models": payload / (options.mib << 20)}
        if options.far:
            told |= {"line": (self._switch.crossed() - crossed) / (options.mib << 20)}
        return {"mode": mode, "seconds": took[last], **told}

    def measure(self) -> list[dict[str, Any]]:
        self.turn("one", self.ideal)  # processes are warm afterwards
        turns: list[dict[str, Any]] = []
        order = list(self._options.modes)
        for _ in range(self._options.turns):
            for mode in order:
                ones = [turn["seconds"] for turn in turns if turn["mode"] == "one"]
                turns.append(self.turn(mode, statistics.median(ones or [self.ideal])))
                print(f"step {self._step} {turns[-1]}", file=sys.stderr, flush=True)
            order.append(order.pop(0))
        return turns


def summary(turns: list[dict[str, Any]], ideal: float) -> dict[str, Any]:
    """Of each mode: medians beside those of one pull; without that mode, beside the link."""

    def median(own: list[dict[str, Any]], name: str) -> float:
        return statistics.median(turn[name] for turn in own if name in turn)

    ones = [turn for turn in turns if turn["mode"] == "one"]
    second = median(ones, "seconds") if ones else ideal
    found: dict[str, Any] = {"one_s": second, "link_s": ideal}
    for mode in dict.fromkeys(turn["mode"] for turn in turns):
        own = [turn for turn in turns if turn["mode"] == mode]
        ratios = [turn["seconds"] / second for turn in own]
        told = {"times": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        told["models"] = median(own, "models")
        if ones:
            told["link"] = median(own, "sent") / median(ones, "sent")
        if "line" in own[0]:
            told["line"] = median(own, "line")
        if "own_s" in own[0]:
            told["own"] = median(own, "own_s") / second
        found[mode] = told
    return found


def show(found: dict[str, Any], options: argparse.Namespace) -> None:
    fleet = f"{options.readers} readers of {options.ranks} ranks, {options.mbit:g} Mbit/s"
    link = f"one pull {found['one_s']:.2f} s (link {found['link_s']:.2f})"
    print(f"{fleet}, {options.mib} MiB: {link}")
    for mode in options.modes:
        own = found[mode]
        line = f"{mode:7} {own['times']:5.2f} x ({own['least']:.2f} to {own['most']:.2f})"
        line += f", {own['models']:.2f} models"
        line += f", {own['link']:.2f} on the link" if "link" in own else ""
        line += f", {own['line']:.2f} across the line" if "line" in own else ""
        print(line + (f"; the other one {own['own']:.2f} x" if "own" in own else ""))


def modes_of(text: str) -> list[str]:
    modes = text.split(",")
    if not set(modes) <= set(MODES):
        raise ValueError(text)
    return modes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mbit", type=float, default=20)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--modes", type=modes_of, default=list(MODES))
    parser.add_argument("--turns", type=int, default=3)
    for fault in ("kill", "stop", "late", "slow"):
        parser.add_argument(f"--{fault}", type=int, default=0, help="the reader, from 1")
    parser.add_argument("--at", type=float, default=0.4, help="of one pull; 0.4")
    parser.add_argument("--by", type=float, default=10, help="with --slow; 10")
    parser.add_argument("--far", type=int, default=0, help="readers at another site; 0")
    parser.add_argument("--line", type=float, default=10, help="Mbit/s, with --far; 10")
    parser.add_argument("--no-places", action="store_true")
    parser.add_argument("--congestion", help="TCP's control; this machine's")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if max(options.kill, options.stop, options.late, options.slow) > options.readers:
        parser.error("there is no such reader")
    if not 0 <= options.far < options.readers:
        parser.error("--far leaves one reader at the trainer's site")
    if bool(options.kill) + bool(options.stop) + bool(options.late) > 1:
        parser.error("give one of --kill, --stop and --late")
    if options.mib * 256 % (TENSORS * options.ranks):
        parser.error(f"{options.ranks} ranks cannot share {options.mib} MiB evenly")
    return options


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        child()
        return
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces go in any case
    with ExitStack() as stack:
        options.folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="relays-"))
        options.world = os.urandom(16).hex()
        options.secret_file = f"{options.folder}/secret"
        Path(options.secret_file).write_text(os.urandom(32).hex() + "\n", encoding="ascii")
        os.chmod(options.secret_file, 0o600)
        for rank in range(options.ranks):
            with open(f"{options.folder}/{rank}", "wb") as file:
                file.truncate((options.mib << 20) // options.ranks)
        try:
            lab = Lab(stack, options)
        except OSError as error:
            print(f"relays: skipped: {error}", file=sys.stderr)
            sys.exit(77)
        turns = lab.measure()
        found = summary(turns, lab.ideal)
    print(json.dumps({"turns": turns, **found}, indent=2)) if options.json else show(found, options)


if __name__ == "__main__":
    main()
