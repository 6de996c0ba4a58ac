#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""campaign.py --programs DIR [--seed N] [--faults N | --seconds N] [--sanitized] [--secret]
            [--cuda LIBRARY] [--relays | --deltas] [--mutant NAME]

Seeded faults over readers and a trainer that never rest. DIR: where the build has put the programs.
Round after round a few faults of the list below come over each other, then all is made whole, and
every reader has to pull again by itself, with the client that it had. What is counted: results with
a wrong byte or step, memory that was written after a failed call had returned, calls that overran
their time by 10 s (hung), readers that did not recover within a minute (wedged), descriptors and
threads that stayed (leaked), calls of the trainer that failed although nothing had been done to it,
and updates that readers held up for longer than their lease. One line of figures on standard
output, with the slowest recovery; exit status 1 if one of these is not 0. On a busy machine, a load
of more than four for each CPU, readers have another minute, in which the trainer rests, and are no
fault but told (starved). Time in which the machine stood does not count: one of its CPUs, or one of
these processes, which was ready and got none. After each 500 faults the figures so far go to
standard error.

--faults: how many (default 40). --seconds: as many as fit. --sanitized: the programs are built with
a sanitizer, which needs the address space that one fault takes away. --secret: all have a launch's
secret, so that TCP is TLS. --cuda: the weights lie in memory of devices 0 and 1, or of one, by the
driver LIBRARY, libcuda.so.1 or the build's stand-in for it; exit status 77 if it has none.
--relays: readers hand on to each other, and one lies. --deltas: steps change little, and readers
pull patches; that none of them does is a fault, too. --mutant: with programs that are wrong in one
way, and exit status 0 only if it was found: unchecked (readers do not ask the ranks at the end),
base (with --deltas: they apply patches to whatever there is), trusting (with --relays: they do not
verify what one that lies has brought), byte, stale, write, hang, wedge, leak, leak-rank, late,
starve. With the right to mount, the adapters of one reader lie on a file system that a fault fills.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from links import WAYS, Links
from processes import (
    ACTS,
    LATE,
    LONGEST,
    PATIENCE,
    UPDATES,
    WRONG,
    Board,
    Found,
    Limited,
    Reader,
    Trainer,
    life_word,
)
from stuck import doing

WORLD = 3
SOCKETS = WORLD * (1 + 2)  # of a reader: to each rank one that asks, and one for each thread
THREADS = 32  # of a reader within a pull, and of a driver
DRIVER_FILES = 500  # and its descriptors
CLOSING = 5.0  # s, until a rank has noticed that a peer is gone
LEFT = 5  # exit status of a reader whose client is gone and has left some of these
TIMEOUT = 3000  # ms, of a reader's calls
HUNG = 10_000  # ms beyond it
RECOVERY = 60.0
SLOW = 15.0  # s, of a recovery, from which on readers' calls are told
STORIES = 2  # a round; each takes half a minute at worst
BUSY = 4  # so many that want to run for each CPU; this takes two
REST = 10**9  # ns until a trainer that is to rest does
# Path, whether over the bad links, whether into adapters.
READERS = (
    ("stream-unix", False, False),
    ("stream-tcp", True, False),
    ("stream-tcp", True, True),
    ("cma", False, False),
    ("cma", False, True),
    ("auto", False, True),
)
# The same where the weights lie on devices: of those into memory the destinations as well.
DEVICE_READERS = (
    ("cuda_ipc", False, False),
    ("stream-unix", False, False),
    ("stream-tcp", True, False),
    ("auto", False, False),
    ("stream-tcp", True, True),
    ("auto", False, True),
)
# Readers that hand on to each other what they have read, beside one that does not. At another site
# all verify, as one alters what it hands on.
RELAYS = (
    ("relay-unix", False, False),
    ("relay-tcp", True, False),
    ("stream-tcp", True, True),
    ("relay-unix", False, False),
    ("relay-verify", False, False),
    ("relay-liar", False, False),
)
# Readers of patches, beside those that read none.
DELTAS = (
    ("stream-unix", False, False),
    ("stream-tcp", True, False),
    ("stream-tcp", True, True),
    ("stream-unix", False, False),
    ("cma", False, False),
)
# Sockets more of a relay, of its server, and to and from the others; and files of its clients.
OF_RELAYS = 64
NAMED = 2  # this reader knows its ranks by name
EVILS = ("leases", "flood", "deaf", "garbage", "frames", "idle")
# What must find a mutant out.
FOUND = {
    "unchecked": "wrong",
    "base": "wrong",
    "byte": "wrong",
    "stale": "wrong",
    "write": "written",
    "hang": "hung",
    "wedge": "wedged",
    "leak": "leaked",
    "leak-rank": "leaked",
    "late": "late updates",
    "starve": "starved",
    "trusting": "wrong",
}
UNRULY = ("unchecked", "base")  # mutants that are one program
PROGRESS = 500  # faults
SKIPPED = 77
SPACE = 1 << 20  # bytes that a limit leaves
DISK = 8 << 20
SHM = "/dev/shm"
CLAIMS: list[socket.socket] = []  # of ports, as long as this process lives


class Campaign:
    """All of it. One thread."""

    def __init__(self, options: argparse.Namespace, place: Path) -> None:
        seed, programs = options.seed, options.programs
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.found = Found(with_stacks=not options.mutant)
        self._usual: dict[int, tuple[int, ...]] = {}
        self._usual_names: dict[int, str] = {}  # of the last look
        self._usual_of_ranks: tuple[int, ...] = ()
        self._slowness, self._mutant = 4 if options.sanitized else 1, options.mutant
        self._recovery = 20.0 if self._mutant else RECOVERY
        self._cuda = options.cuda is not None
        device = "-cuda" if options.cuda else ""
        reader = "campaign-reader" + ("-unchecked" if self._mutant in UNRULY else device)
        self._deltas, self._relays = options.deltas, options.relays
        host = RELAYS if options.relays else DELTAS if options.deltas else READERS
        self._specs = DEVICE_READERS if options.cuda else host
        self._programs, self._secret = programs, options.secret
        self._place, self._filling = place, place / "disk" / "filling"
        self.board, self._other_board = Board(place / "board"), Board(place / "other-board")
        port = free_ports(WORLD)
        trainer = programs / f"campaign-trainer{device}"
        self.trainer = Trainer(trainer, self.board, self.found, WORLD, port, seed)
        self._strangers: list[subprocess.Popen[bytes]] = []
        self.links = Links([port + rank for rank in range(WORLD)], seed)
        self.readers = [self._reader(programs / reader, at) for at in range(len(self._specs))]
        self._kinds: dict[str, Callable[[], bool | None]] = {
            "relaunch": self._relaunch,
            "relaunch-term": lambda: self._relaunch(signal.SIGTERM),
            "relaunch-unheard": lambda: self._unheard(self._relaunch),
            "rolling": self._rolling,
            "rolling-term": lambda: self._rolling(signal.SIGTERM),
            "rolling-unheard": lambda: self._unheard(self._rolling),
            "staggered": self._staggered,
            "staggered-term": lambda: self._staggered(signal.SIGTERM),
            "names-silent": self._names_silent,
            "liar": self._liar,
            **{f"evil-{kind}": self._evil(kind) for kind in EVILS},
            "rank-killed": self._rank_killed,
            "rank-stopped": self._rank_stopped,
            "rank-descriptors": self._rank_descriptors,
            "reader-stopped": lambda: self._signal_reader(signal.SIGSTOP),
            "reader-killed": self._reader_killed,
            "reader-descriptors": self._reader_descriptors,
            "file-size": self._file_size,
            **{f"link-{way}": self._spoiler(way) for way in WAYS},
        }
        if not options.sanitized and not options.cuda:  # the stand-in driver needs its own
            self._kinds["reader-memory"] = self._reader_memory
            self._kinds["rank-memory"] = self._rank_memory
        if os.path.ismount(place / "disk"):
            self._kinds["disk-full"] = self._disk_full

    def _reader(self, program: Path, at: int) -> Reader:
        path, _, adapters = self._specs[at]
        directory = None
        if adapters:
            last = at == len(self._specs) - 1
            directory = self._place / ("disk" if last else f"reader{at}") / "adapters"
            directory.mkdir(parents=True)
        return Reader(program, self.board, at, path, directory, self.trainer.lives)

    def _addresses(self, at: int) -> list[str]:
        ports = [self.trainer.port + rank for rank in range(WORLD)]
        if self._specs[at][1]:
            ports = [link.port for link in self.links.links]
        hosts = [f"rank{r}.campaign" if at == NAMED else "127.0.0.1" for r in range(WORLD)]
        return [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]

    def _processes(self) -> list[int]:
        """Numbers of ranks and readers that may be running."""
        every = [*self.trainer.ranks, *(reader.limited for reader in self.readers)]
        return [limited.process.pid for limited in every if limited is not None]

    def _start_reader(self, reader: Reader) -> None:
        seed = self.random.randrange(1, 1 << 48)
        reader.start(seed, TIMEOUT, self._addresses(reader.index))

    # ------------------------------------------------------------------------------ faults

    def _draw(self) -> None:
        """Where updates wait for nobody, only snapshots are sure to be read between two."""
        if self._mutant == "unchecked":  # what it believes must be overtaken
            self.trainer.draw(10, 0, "reference")
            return
        if self._mutant == "trusting":  # and what it reads must be of the liar's step
            self.trainer.draw(500, 100, "snapshot")
            return
        kinds = ("snapshot", "snapshot", "snapshot") if self._deltas else ("snapshot",)
        kind = self.random.choice(("reference", *kinds))
        slow = (500,) if self._relays else ()  # of which readers hand on more
        period = self.random.choice((20, 50, *slow)) * self._slowness
        lease = self.random.choice((20, 100, 0) if kind == "snapshot" else (20, 100))
        self.trainer.draw(period, lease * self._slowness, kind)

    def _relaunch(self, number: int = signal.SIGKILL) -> None:
        """All ranks end; those of the next launch come one by one."""
        for rank in range(WORLD):
            self.trainer.signal(rank, number)
        self._draw()
        for rank in range(WORLD):
            self.trainer.start(rank)
            time.sleep(self.random.random() * 0.1)

    def _rolling(self, number: int = signal.SIGKILL) -> None:
        """Ranks of two launches stand beside each other."""
        self._draw()
        self._staggered(number)

    def _staggered(self, number: int = signal.SIGKILL) -> None:
        """One rank after the other is restarted, within its launch."""
        for rank in self.random.sample(range(WORLD), WORLD):
            self.trainer.signal(rank, number)
            self.trainer.start(rank)
            time.sleep(self.random.random() * 0.1)

    def _unheard(self, end: Callable[[], None]) -> None:
        """No link tells its readers that somebody has ended."""
        for rank in range(WORLD):
            self.links.spoil(rank, "swallow")
        end()

    def _rank(self) -> int:
        return self.random.randrange(WORLD)

    def _rank_killed(self) -> None:
        """The next heal() starts it again, within its launch."""
        self.trainer.signal(self._rank(), signal.SIGKILL)

    def _rank_stopped(self) -> None:
        self.trainer.signal(self._rank(), signal.SIGSTOP)

    def _limited_rank(self) -> Limited | None:
        """One that serves: what is still starting may end itself for want of anything."""
        rank = self._rank()
        if not self.trainer.serves(rank):
            return None
        self.board.disturb_rank(rank)
        return self.trainer.ranks[rank]

    def _rank_descriptors(self) -> bool:
        which = self._limited_rank()
        if which is not None:
            which.limit(resource.RLIMIT_NOFILE, which.descriptors() + self.random.randrange(3))
        return which is not None

    def _rank_memory(self) -> bool:
        which = self._limited_rank()
        if which is not None:
            which.limit(resource.RLIMIT_AS, which.address_space() + self.random.randrange(SPACE))
        return which is not None

    def _names_silent(self) -> None:
        """Connections are made anew meanwhile."""
        self.board.silence_names(True)
        for rank in range(WORLD):
            self.links.spoil(rank, "cut")
        time.sleep(self.random.random() * 0.2)
        for rank in range(WORLD):
            self.links.heal(rank)

    def _liar(self) -> None:
        """A link leads to who says that it is the rank, and is ahead of the others.

        Who knows no secret is the rank of this launch to the letter; where there is none, it is of
        another launch, or another rank.
        """
        rank, port = self._rank(), free_ports(1)
        claims, life, secret = rank, self.trainer.life, ""
        if self._secret:
            secret = str(make_secret(self._place, f"secret-{port}"))
        elif self.random.random() < 0.5:
            life = secrets.token_hex(16)
        else:
            claims = (rank + 1) % WORLD
        liar = self.trainer.start_liar(self._other_board, claims, port, life, secret)
        self._strangers.append(liar)
        self.links.lead(rank, port)

    def _evil(self, kind: str) -> Callable[[], None]:
        def start() -> None:
            ports = [str(self.trainer.port + rank) for rank in range(WORLD)]
            words = [str(self._programs / "campaign-evil"), str(self.board.path), kind]
            env = os.environ | {"FANIN_SECRET_FILE": ""}
            seed = str(self.random.randrange(1, 1 << 48))
            process = subprocess.Popen([*words, seed, *ports], env=env)
            self._strangers.append(process)

        return start

    def _any_reader(self) -> Reader:
        return self.random.choice(self.readers)

    def _signal_reader(self, number: int) -> None:
        self._any_reader().disturb().process.send_signal(number)

    def _reader_killed(self) -> None:
        reader = self._any_reader()
        process = reader.disturb().process
        process.kill()
        process.wait(PATIENCE)
        self._start_reader(reader)

    def _reader_descriptors(self) -> None:
        limited = self._any_reader().disturb()
        limited.limit(resource.RLIMIT_NOFILE, limited.descriptors() + self.random.randrange(4))

    def _reader_memory(self) -> None:
        limited = self._any_reader().disturb()
        limited.limit(resource.RLIMIT_AS, limited.address_space() + self.random.randrange(SPACE))

    def _file_size(self) -> None:
        """Not of who may have memory of devices: the stand-in keeps it in a file."""
        able = [r for r in self.readers if r.directory is not None]
        if self._specs is DEVICE_READERS:
            able = [r for r in able if r.path == "stream-tcp"]
        reader = self.random.choice(able)
        reader.disturb().limit(resource.RLIMIT_FSIZE, self.random.randrange(SPACE))

    def _disk_full(self) -> None:
        with contextlib.suppress(OSError), self._filling.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))

    def _spoiler(self, way: str) -> Callable[[], None]:
        return lambda: self.links.spoil(self._rank(), way)

    # ------------------------------------------------------------------------------ rounds

    def run(self, most: int, seconds: float) -> None:
        self.found.pulse.start(self._processes)
        self._draw()
        for rank in range(WORLD):
            self.trainer.start(rank)
        for reader in self.readers:
            self._start_reader(reader)
        self._recover("before the first fault")
        self._note_usual_of_ranks()
        until = time.monotonic() + seconds
        while self.faults.total() < most and time.monotonic() < until and not self.broken():
            self._round(most)
        self._look_for_leaks()

    def _round(self, most: int) -> None:
        before = self.faults.total()
        count = min(self.random.randrange(1, 5), most - self.faults.total())
        names = [self.random.choice(list(self._kinds)) for _ in range(count)]
        for name in names:
            self.faults[name] += self._kinds[name]() is not False
            time.sleep(self.random.random() * 0.3)
        self._heal()
        self._recover(" + ".join(names))
        self._look_at_ranks(" + ".join(names))
        if before // PROGRESS != self.faults.total() // PROGRESS:
            print(time.strftime("%H:%M:%S"), self.line()[0], file=sys.stderr, flush=True)

    def _heal(self) -> None:
        self.board.silence_names(False)
        self._end_strangers()
        self._filling.unlink(missing_ok=True)
        self.trainer.heal()
        for rank in range(WORLD):
            self.links.heal(rank)
        for reader in self.readers:
            reader.heal()

    def _end_strangers(self) -> None:
        for process in self._strangers:
            process.kill()
            process.wait(PATIENCE)
        self._strangers.clear()

    def _recover(self, after: str) -> None:
        """Every reader has pulled from this launch, from now on.

        Where the machine is so busy that the trainer may overtake a reader all the time, the
        trainer rests for those that are left: they were starved, and are wedged if they cannot
        pull from a trainer at rest.
        """
        began = time.monotonic()
        missing = self._await(list(self.readers))
        self.found.slowest = max(self.found.slowest, (time.monotonic() - began, after))
        if missing and self._is_busy():
            self.board.calm(time.monotonic_ns() + REST)
            left = self._await(missing)
            self.board.calm(0)
            starved = [reader for reader in missing if reader not in left]
            self.found.starved += [f"reader {reader.index} after {after}" for reader in starved]
            missing = left
        for reader in missing:
            heard = int(reader.heard * 1e9)
            silent = (time.monotonic_ns() - heard - self._stood(heard)) / 1e9
            told = [f"reader {reader.index} ({reader.path}) after {after}"]
            if not self._mutant and reader in missing[:STORIES]:
                told += reader.story()
            kind = self.found.hung if silent * 1e3 > TIMEOUT + HUNG else self.found.wedged
            kind.append("\n  ".join(told))
        if not missing and sum(self.faults.values()) < 30:
            self._note_usual()

    def _is_busy(self) -> bool:
        load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
        return load > BUSY * cpus or self._mutant == "starve"

    def _await(self, missing: list[Reader]) -> list[Reader]:
        """Those that have not pulled in time; while the machine stands, that does too."""
        began = now = time.monotonic_ns()
        told = False
        while missing and now - began - self._stood(began) < self._recovery * 1e9:
            time.sleep(0.005)
            now = time.monotonic_ns()
            if now - began > SLOW * 1e9 and not told and not self._mutant:
                told = True  # what comes of it may be good, and what it waited for is gone then
                for reader in missing:
                    lines = [f"reader {reader.index} ({reader.path}) is slow:", *reader.calls()]
                    print("\n  ".join(lines), file=sys.stderr, flush=True)
            self.trainer_lives()
            missing = [reader for reader in missing if not self._has_recovered(reader, began)]
        return missing

    def _stood(self, since: int) -> int:
        return self.found.pulse.stood(since, time.monotonic_ns())

    def trainer_lives(self) -> None:
        for rank, which in enumerate(self.trainer.ranks):
            if which is not None and which.process.poll() not in (None, 0):
                self.found.wedged.append(f"rank {rank} ended with {which.process.returncode}")
                self.trainer.start(rank)

    def _has_recovered(self, reader: Reader, since: int) -> bool:
        good = reader.last_good
        life = life_word(self.trainer.life)
        return good is not None and good.began > since and int(good.life, 16) == life

    def _note_usual(self) -> None:
        """The most that readers have open in one of the first rounds: within a pull it is more than
        between two, and one look may meet either. Sockets and threads are as many as a reader may
        have: which ranks two threads share, each by a connection of its own, differs from pull to
        pull, and a path has other threads than the next. Of a client that is gone none are left."""
        for _ in range(20):
            for reader in self.readers:
                if reader.limited is not None:
                    relays = OF_RELAYS * reader.path.startswith("relay")
                    most = (relays, SOCKETS + relays, THREADS)
                    usual = self._usual.get(reader.index, most)
                    now = reader.limited.open_now()
                    self._usual[reader.index] = tuple(map(max, now, usual))
                    self._usual_names[reader.index] = reader.limited.names()
            time.sleep(0.002)

    def _serving(self) -> Iterator[tuple[str, Limited]]:
        for rank, which in enumerate(self.trainer.ranks):
            if which is not None and self.trainer.serves(rank):
                yield f"rank {rank}", which

    def _note_usual_of_ranks(self) -> None:
        """Readers may come and go: a rank has three sockets of its own, and theirs. A driver makes
        threads and opens files when it likes."""
        sockets = 3 + len(self.readers) * SOCKETS // WORLD
        usual = (DRIVER_FILES, sockets, THREADS) if self._cuda else (0, sockets, 0)
        for _, which in self._serving():
            usual = tuple(map(max, usual, which.open_now()))
        self._usual_of_ranks = usual

    def _look_at_ranks(self, after: str) -> None:
        """In each round, as ranks do not grow old here."""
        for who, which in self._serving():
            began = time.monotonic_ns()
            while True:
                now = which.open_now()
                over = any(map(int.__gt__, now, self._usual_of_ranks))
                waited = time.monotonic_ns() - began - self._stood(began)
                if not over or self._mutant or waited > CLOSING * 1e9:
                    break
                time.sleep(0.01)
            if over:
                self.found.leaked.append(
                    f"{who} after {after}: {now} files, sockets and threads, in the beginning at "
                    f"most {self._usual_of_ranks}; {which.names()}"
                )

    def _look_for_leaks(self) -> None:
        for reader in self.readers:
            usual = self._usual.get(reader.index)
            if usual is None or reader.limited is None:
                continue
            least: tuple[int, ...] = reader.limited.open_now()
            for _ in range(50):  # between two pulls it has less than within one
                least = tuple(map(min, least, reader.limited.open_now()))
                time.sleep(0.01)
            if any(now > before for now, before in zip(least, usual, strict=True)):
                told = (
                    f"reader {reader.index}: {least} files, sockets and threads, in the beginning "
                    f"{usual}; {reader.limited.names()}, in the beginning "
                    f"{self._usual_names[reader.index]}"
                )
                lines = [told, *doing(reader.limited.process.pid)]
                self.found.leaked.append("\n  ".join(lines))

    # ------------------------------------------------------------------------------ the end

    def broken(self) -> bool:
        found = self.found.wedged + self.found.hung
        found += self.found.starved + self.found.leaked if self._mutant else []
        return bool(found or any(reader.bad for reader in self.readers))

    def wrong(self) -> int:
        """Results with a wrong byte or step."""
        return sum(reader.verdicts["wrong"] for reader in self.readers)

    def end(self) -> None:
        """All is made whole first: who ends is left alone (Trainer.signal())."""
        self._end_strangers()
        for process in [*self.trainer.ranks, *(reader.limited for reader in self.readers)]:
            if process is not None:
                process.heal()
        self.board.end()
        for reader in self.readers:
            if reader.limited is None:
                continue
            who = f"reader {reader.index}"
            patience = 1 if self._mutant == "hang" else (TIMEOUT + HUNG) / 1e3
            code = reader.limited.ends(patience, who, self.found)
            if code == LEFT:
                self.found.leaked.append(
                    f"{who}: its client is gone and has left sockets or threads"
                )
            elif code:
                self.found.wedged.append(f"{who} ended with {code}")
        self.trainer.end()

    def bad(self) -> dict[str, int]:
        """What must be 0."""
        verdicts = sum((reader.verdicts for reader in self.readers), Counter())
        vain = {"campaigns without patches": int(self._patches() == 0)} if self._deltas else {}
        return vain | {
            "wrong": self.wrong(),
            "written": verdicts["written"],
            "hung": len(self.found.hung),
            "wedged": len(self.found.wedged),
            "leaked": len(self.found.leaked),
            "trainer's failed calls": self.board.total(WRONG),
            "late updates": self.board.total(LATE),
        }

    def _patches(self) -> int:
        return sum(reader.patches for reader in self.readers)

    def _lies(self) -> int:
        return sum(reader.lies for reader in self.readers)

    def line(self) -> tuple[str, bool]:
        """The figures, and whether all is well."""
        verdicts = sum((reader.verdicts for reader in self.readers), Counter())
        bad = self.bad()
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        figures = ", ".join(f"{what} {count}" for what, count in bad.items())
        slow, after = self.found.slowest
        overrun = max(reader.overrun(self.found.pulse) for reader in self.readers)
        return (
            f"{verdicts.total()} calls, {verdicts['good']} good, {self._patches()} by patches;"
            f" {self.board.total(UPDATES)}"
            f" updates, {self.board.total(ACTS)} acts of the trainer,"
            f" {self.board.reader_acts()} of readers, {self._lies()} lies found;"
            f" {self.faults.total()} faults"
            f" ({kinds}); {figures}; starved {len(self.found.starved)}, {self.found.pulse.told()};"
            f" slowest recovery {slow:.1f} s ({after}); worst overrun {overrun} ms",
            not any(bad.values()) and overrun < HUNG,
        )

    def complaints(self) -> Iterator[str]:
        """What explains most comes last."""
        for reader in self.readers:
            for status, count in reader.statuses.items():
                last = reader.texts[status]
                yield f"reader {reader.index} ({reader.path}): {count} {status}, last: {last}"
        for reader in self.readers:
            for because, count in reader.wholes.items():
                yield f"reader {reader.index} ({reader.path}): {count} {because}"
        for reader in self.readers:
            for call in reader.bad[:5]:
                yield f"reader {reader.index} ({reader.path}): {call.verdict}: {call.text}"
        yield from self.trainer.log
        longest = max(self.board.rank(rank, LONGEST) for rank in range(WORLD))
        yield f"longest update beyond its time: {longest} ns"
        yield from self.found.starved + self.found.leaked + self.found.wedged + self.found.hung


def free_ports(count: int) -> int:
    """The first of *count* neighbours that nobody listens on, below those of tests/support/lab.c.

    Not by the seed: another campaign with the same one may run beside this, and find them free
    while their ranks are away. A name that the kernel gives to one process keeps it from them.
    """
    numbers = random.SystemRandom()
    while True:
        first = numbers.randrange(10_000, 20_000, count)
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0fanin-campaign-{first}")
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        CLAIMS.append(claim)
        return first


def make_secret(place: Path, name: str = "secret") -> Path:
    """The file that ranks and readers know each other by."""
    path = place / name
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return path


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A file system of its own at place/disk, where that is allowed."""
    (place / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "campaign", str(place / "disk")]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place / "disk")], check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--sanitized", action="store_true")
    parser.add_argument("--cuda")
    parser.add_argument("--mutant", choices=FOUND)
    parser.add_argument("--secret", action="store_true")
    parser.add_argument("--relays", action="store_true")
    parser.add_argument("--deltas", action="store_true")
    options = parser.parse_args()
    most = options.faults or (1 << 40 if options.seconds else 40)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    memory = SHM if os.access(SHM, os.W_OK) else None  # no disk that others keep busy
    place = Path(tempfile.mkdtemp(prefix="campaign", dir=memory))
    os.environ["FANIN_SECRET_FILE"] = str(make_secret(place)) if options.secret else ""
    os.environ["CAMPAIGN_MUTANT"] = options.mutant or ""
    os.environ["CAMPAIGN_DELTAS"] = "yes" if options.deltas else ""
    if options.cuda:
        os.environ["FANIN_CUDA_LIBRARY"] = options.cuda
        if subprocess.run([options.programs / "campaign-trainer-cuda"]).returncode == SKIPPED:
            print(f"skipped: {options.cuda} has no device")
            return SKIPPED
    try:
        with small_disk(place):
            campaign = Campaign(options, place)
            try:
                campaign.run(most, options.seconds or float("inf"))
            finally:
                campaign.end()
            line, good = campaign.line()
            if options.mutant:
                figures = campaign.bad() | {"starved": len(campaign.found.starved)}
                good = figures[FOUND[options.mutant]] > 0
            for complaint in () if good else campaign.complaints():
                print(complaint, file=sys.stderr)
            print(f"seed {options.seed}: {line}")
            return 0 if good else 1
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
