# SPDX-License-Identifier: Apache-2.0
"""The processes of a campaign: a trainer's ranks, readers, and the board that all share."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pulse import Pulse
from stuck import doing

BOARD_RANKS, RANK_WORDS = 16, 8
BOARD_READERS, READER_WORDS = 32, 3
LIFE, STOPS, UPDATES, ACTS, WRONG, LATE, LONGEST = 0, 2, 3, 4, 5, 6, 7
_RANKS_AT = 3
_READERS_AT = _RANKS_AT + BOARD_RANKS * RANK_WORDS
PATIENCE = 300  # s, for who was killed, and for a machine that stands
# Of ranks that are told to end: in order, before they serve, before they listen to signals.
ORDERLY = (0, 3, -signal.SIGTERM)


@dataclass
class Found:
    """What must not be, in sentences; and when it may."""

    pulse: Pulse = field(default_factory=Pulse)
    wedged: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    starved: list[str] = field(default_factory=list)  # which may be
    slowest: tuple[float, str] = (0.0, "")  # recovery in seconds, and after what
    with_stacks: bool = True  # of whom does not end


class Board:
    """board.h, as words of 8 bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = 8 * (_READERS_AT + BOARD_READERS * READER_WORDS)
        path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), size)).cast("Q")

    def rank(self, rank: int, word: int) -> int:
        return self._words[_RANKS_AT + rank * RANK_WORDS + word]

    def total(self, word: int) -> int:
        return sum(self.rank(rank, word) for rank in range(BOARD_RANKS))

    def disturb_rank(self, rank: int) -> None:
        self._words[_RANKS_AT + rank * RANK_WORDS + STOPS] += 1

    def disturb_reader(self, reader: int) -> None:
        self._words[_READERS_AT + reader * READER_WORDS] += 1

    def reader_acts(self) -> int:
        return sum(self._words[_READERS_AT + at * READER_WORDS + 2] for at in range(BOARD_READERS))

    def silence_names(self, silent: bool) -> None:
        self._words[1] = silent

    def calm(self, ns: int) -> None:
        """After the step of that time the trainer rests; 0: it goes on."""
        self._words[2] = ns

    def end(self) -> None:
        self._words[0] = 1


@dataclass
class Limited:
    """A process whose limits can be lowered, and put back."""

    process: subprocess.Popen[str]
    _old: dict[int, tuple[int, int]] = field(default_factory=dict)

    def limit(self, what: int, value: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            old = resource.prlimit(self.process.pid, what)
            self._old.setdefault(what, old)
            resource.prlimit(self.process.pid, what, (value, old[1]))

    def heal(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            for what, old in self._old.items():
                resource.prlimit(self.process.pid, what, old)
        self._old.clear()

    def ends(self, seconds: float, who: str, found: Found) -> int | None:
        """Its exit status; None: it had to be killed, and what it did instead is told."""
        began, left = time.monotonic_ns(), seconds
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(min(left, 1.0))
            now = time.monotonic_ns()
            stood = min(found.pulse.stood(began, now) / 1e9, PATIENCE)
            left = seconds + stood - (now - began) / 1e9
            if left <= 0:
                break
        lines = [f"{who}, process {self.process.pid}, does not end"]
        if found.with_stacks:
            lines += doing(self.process.pid)
        found.hung.append("\n  ".join(lines))
        self.process.kill()
        self.process.wait(PATIENCE)
        return None

    def descriptors(self) -> int:
        """Open now."""
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/fd"))
        except OSError:
            return 0

    def _has(self) -> tuple[Counter[str], Counter[str]]:
        """Its threads by name, and its descriptors by what they are of."""
        folder = Path(f"/proc/{self.process.pid}")
        threads, files = Counter[str](), Counter[str]()
        for task in folder.glob("task/*/comm"):
            with contextlib.suppress(OSError):
                threads[task.read_text().strip()] += 1
        for descriptor in folder.glob("fd/*"):
            with contextlib.suppress(OSError):
                files[os.readlink(descriptor).partition(":[")[0]] += 1
        return threads, files

    def open_now(self) -> tuple[int, int, int]:
        """Descriptors that are no sockets, sockets, and threads."""
        threads, files = self._has()
        return files.total() - files["socket"], files["socket"], threads.total()

    def names(self) -> str:
        """Its threads, and what its descriptors are of, with how many of each."""
        threads, files = self._has()
        return f"threads {dict(sorted(threads.items()))}, files {dict(sorted(files.items()))}"

    def address_space(self) -> int:
        """Bytes; 0: it has ended."""
        try:
            return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[0]) * 4096
        except OSError:
            return 0


def life_word(life: str) -> int:
    """As the board has a world id in hexadecimal."""
    return int.from_bytes(bytes.fromhex(life)[:8], sys.byteorder)


def make_life(number: int) -> str:
    """A world id whose word is greater than those of lower numbers."""
    word = number << 32 | secrets.randbits(32)
    return word.to_bytes(8, sys.byteorder).hex() + secrets.token_hex(8)


class Trainer:
    """Ranks on neighbouring ports, and launches of them."""

    def __init__(
        self, program: Path, board: Board, found: Found, world: int, port: int, seed: int
    ) -> None:
        self.world, self.port, self.life = world, port, ""
        self._found = found
        self.lives: set[int] = set()
        self._program, self._board, self._seed = program, board, seed
        self._start = 0
        self._settings = ("20", "50", "reference")
        self.ranks: list[Limited | None] = [None] * world
        self.log: list[str] = []
        self._lock = threading.Lock()

    def draw(self, period: int, lease: int, kind: str) -> None:
        """A launch to come: what starts from now on belongs to it. Milliseconds."""
        self.life = make_life(len(self.lives) + 1)
        self.lives.add(life_word(self.life))
        self._start = time.monotonic_ns()
        self._settings = (str(period), str(lease), kind)

    def start(self, rank: int) -> None:
        words = self._words(self._board, rank, self.port, self.life, self._start)
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.ranks[rank] = Limited(process)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _words(self, board: Board, rank: int, port: int, life: str, start: int) -> list[str]:
        self._seed += 1
        place = [str(board.path), str(rank), str(self.world), str(port), life]
        return [str(self._program), *place, str(self._seed), str(start), *self._settings]

    def start_liar(
        self, board: Board, rank: int, port: int, life: str, secret: str
    ) -> subprocess.Popen[bytes]:
        """Says that it is that rank, listens on *port* and is ahead of all; its bytes are wrong."""
        words = self._words(board, rank, port - rank, life, self._start - 100 * 10**9)
        env = os.environ | {"CAMPAIGN_MUTANT": "liar", "FANIN_SECRET_FILE": secret}
        return subprocess.Popen(words, stderr=subprocess.DEVNULL, env=env)

    def serves(self, rank: int) -> bool:
        """Whether that rank runs and has begun to serve the present launch."""
        which = self.ranks[rank]
        alive = which is not None and which.process.poll() is None
        return alive and self._board.rank(rank, LIFE) == life_word(self.life)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            with self._lock:
                self.log = [*self.log[-200:], line.rstrip()]

    def signal(self, rank: int, number: int) -> None:
        """Ends are waited for.

        Without memory or descriptors a rank does not get to its end, so it is healed first. After
        SIGTERM it is left alone: a sanitizer stops all threads at the end to look for leaks, a
        SIGCONT takes back what is to stop them, and then it waits for ever.
        """
        which = self.ranks[rank]
        if which is None:
            return
        self._board.disturb_rank(rank)
        if number == signal.SIGTERM:
            which.heal()
        with contextlib.suppress(ProcessLookupError):
            which.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            status = which.ends(30, f"rank {rank}", self._found)
            if number == signal.SIGTERM and status not in (None, *ORDERLY):
                self._found.wedged.append(f"rank {rank} ended with {status} when it was told to")
            self.ranks[rank] = None

    def heal(self) -> None:
        """All ranks run, and are of the launch that was drawn last."""
        for rank, which in enumerate(self.ranks):
            if which is not None:
                which.heal()
                self._board.disturb_rank(rank)
            if which is None or which.process.poll() is not None:
                self.start(rank)

    def end(self) -> None:
        """They were healed, and the board has said that it is over."""
        for rank, which in enumerate(self.ranks):
            status = which.ends(60, f"rank {rank}", self._found) if which is not None else 0
            if status:
                self._found.wedged.append(f"rank {rank} ended with {status}")


@dataclass
class Call:
    """A line of a reader."""

    verdict: str
    status: str
    took: int  # ms
    allowed: int
    life: str
    began: int  # ns
    disturbed: bool
    text: str


class Reader:
    """One worker, and what it has said."""

    def __init__(
        self,
        program: Path,
        board: Board,
        index: int,
        path: str,
        directory: Path | None,
        lives: set[int],
    ) -> None:
        self.index, self.path, self.directory = index, path, directory
        self._lives = lives
        self._program, self._board = program, board
        self.last_good: Call | None = None
        self.verdicts: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.texts: dict[str, str] = {}  # by status, the last one
        self.patches = 0  # good calls that have read them
        self.lies = 0  # of relays, that it has found
        self.wholes: Counter[str] = Counter()  # and those that could not, by why
        self.bad: list[Call] = []
        self.latest: deque[Call] = deque(maxlen=6)
        self.long: list[Call] = []  # that overran their time
        self.heard = time.monotonic()
        self.limited: Limited | None = None

    def start(self, seed: int, timeout: int, addresses: list[str]) -> None:
        words = [str(self._board.path), str(self.index), str(seed), self.path, str(timeout)]
        process = subprocess.Popen(
            [self._program, *words, str(self.directory or "-"), *addresses],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.limited = Limited(process)
        self.heard = time.monotonic()
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            words, _, text = line.rstrip("\n").partition("|")
            parts = words.split(" ")
            if len(parts) == 8:  # a killed one's last line may be short
                self._take(Call(*parts[:2], *map(int, parts[2:4]), parts[5], int(parts[6]),
                                parts[7] == "1", text))  # fmt: skip

    def _take(self, call: Call) -> None:
        self.heard = time.monotonic()
        self.latest.append(call)
        self.verdicts[call.verdict] += 1
        self.statuses[call.status] += 1
        self.texts[call.status] = call.text
        self.lies += "brought other bytes than the trainer holds" in call.text
        if call.verdict == "good" and int(call.life, 16) not in self._lives:
            call.verdict, call.text = "wrong", f"of a launch that is none: {call.life}"
            self.verdicts["good"] -= 1
            self.verdicts["wrong"] += 1
        if call.verdict == "good":
            self.last_good = call
            self.patches += call.text.startswith("patches")
            if call.text.startswith("whole"):
                self.wholes[call.text] += 1
        elif call.verdict != "failed":
            self.bad.append(call)
        if not call.disturbed and call.took > call.allowed:
            self.long.append(call)

    def overrun(self, pulse: Pulse) -> int:
        """Milliseconds, without those in which the machine stood."""
        worst = 0
        for call in self.long:
            end = call.began + call.took * 10**6
            over = call.took - call.allowed - pulse.stood(call.began, end) // 10**6
            worst = max(worst, over)
        return worst

    def disturb(self) -> Limited:
        assert self.limited is not None
        self._board.disturb_reader(self.index)
        return self.limited

    def heal(self) -> None:
        self.disturb().heal()

    def calls(self) -> Iterator[str]:
        """Its latest calls."""
        for call in self.latest:
            ago = (time.monotonic_ns() - call.began) / 1e9
            yield f"{ago:.1f} s ago, for {call.took} ms: {call.verdict} {call.status} {call.text}"

    def story(self) -> Iterator[str]:
        """Its latest calls, and what it does now."""
        yield from self.calls()
        if self.limited is not None:
            yield from doing(self.limited.process.pid)
