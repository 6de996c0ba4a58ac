# SPDX-License-Identifier: Apache-2.0
"""long_run.py BUILD KEPT: all fuzz targets of a build with -Dfuzzing=libfuzzer, in turns, until
each has had its share of --cpu-hours; whoever has had least goes first. What was found and what it
has cost so far is kept in KEPT, also between runs, so that hours add up; SIGTERM and SIGINT end a run
early, and what it has cost counts. Prints a line a target; exit status 1 if one failed, whose input
lies in KEPT then."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

CORPORA = Path(__file__).parent / "corpus"
INTERRUPTED = 72  # libFuzzer's exit status after SIGINT
EXECUTED = re.compile(rb"stat::number_of_executed_units: (\d+)")


class Target:
    """A program, and what is kept of it."""

    def __init__(self, program: Path, kept: Path) -> None:
        self.program = program
        self.name = program.name.removeprefix("fuzz_")
        self.process: subprocess.Popen[bytes] | None = None
        self.corpus = kept / self.name
        self.corpus.mkdir(parents=True, exist_ok=True)
        self.count = kept / f"{self.name}.json"
        self.had = {"cpu_seconds": 0.0, "executed": 0, "failures": 0}
        if self.count.exists():
            self.had = json.loads(self.count.read_text())

    def stop(self) -> None:
        """Ends its turn, if it has one."""
        if (process := self.process) is not None:
            process.send_signal(signal.SIGINT)

    def take_turn(self, seconds: int) -> None:
        """Runs it so long, and counts."""
        with open(self.corpus.with_suffix(".log"), "wb") as log:
            self.process = process = subprocess.Popen(
                [
                    self.program,
                    f"-max_total_time={seconds}",
                    "-timeout=100",  # by the clock: others may keep the machine busy
                    "-rss_limit_mb=2048",
                    "-entropic=0",  # which costs more than the inputs where they reach much code
                    "-print_final_stats=1",
                    "-print_funcs=0",  # looking up their names takes longer than the inputs
                    f"-artifact_prefix={self.corpus}-",
                    self.corpus,
                    CORPORA / self.name,
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,  # it hears of a Ctrl-C by stop() alone
            )
            _, status, used = os.wait4(process.pid, 0)
        self.process = None
        process.returncode = os.waitstatus_to_exitcode(status)
        told = EXECUTED.findall(self.corpus.with_suffix(".log").read_bytes())
        self.had["cpu_seconds"] += used.ru_utime + used.ru_stime
        self.had["executed"] += int(told[-1]) if told else 0
        self.had["failures"] += process.returncode not in (0, INTERRUPTED)
        unfinished = self.count.with_suffix(".new")
        unfinished.write_text(json.dumps(self.had))
        unfinished.replace(self.count)

    def line(self) -> str:
        """What it has had."""
        new = sum(1 for _ in self.corpus.iterdir())
        return (
            f"{self.name:12} {self.had['cpu_seconds'] / 3600:6.2f} CPU hours,"
            f" {self.had['executed']:12,} inputs, {new:6,} kept, {self.had['failures']} failures"
        )


class Turns:
    """Deals turns to who has had least and is not at one."""

    def __init__(self, targets: list[Target], share: float) -> None:
        self.targets = targets
        self.waiting = list(targets)
        self.share = share
        self.stopped = False
        self.lock = threading.Lock()

    def next(self) -> Target | None:
        """Whose turn it is; None when those that wait have had their share, or have failed."""
        with self.lock:
            self.waiting.sort(key=lambda t: t.had["cpu_seconds"])
            for target in [] if self.stopped else self.waiting:
                if target.had["cpu_seconds"] < self.share and not target.had["failures"]:
                    self.waiting.remove(target)
                    return target
        return None

    def stop(self, *_signal: object) -> None:
        """Ends all turns."""
        self.stopped = True
        for target in self.targets:
            target.stop()

    def deal(self, seconds: int) -> None:
        """One turn of so many seconds after the other."""
        while target := self.next():
            target.take_turn(seconds)
            with self.lock:
                self.waiting.append(target)


def main() -> int:
    """Runs them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("kept", type=Path)
    parser.add_argument("--cpu-hours", type=float, default=24.0, help="of all these targets together")
    parser.add_argument("--only", nargs="+", metavar="TARGET", help="catalog, link, tls, ...")
    parser.add_argument("--turn", type=int, default=300, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    programs = [p for p in sorted(asked.build.glob("tests/fuzz/fuzz_*")) if p.is_file()]
    if not programs:
        parser.error(f"no fuzz targets in {asked.build}: configure it with -Dfuzzing=libfuzzer")
    targets = [Target(p.resolve(), asked.kept.resolve()) for p in programs]
    if asked.only:
        if unknown := set(asked.only) - {t.name for t in targets}:
            parser.error(f"no such target: {', '.join(sorted(unknown))}")
        targets = [t for t in targets if t.name in asked.only]
    turns = Turns(targets, asked.cpu_hours * 3600 / len(targets))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, turns.stop)
    try:
        with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
            for done in [pool.submit(turns.deal, asked.turn) for _ in range(asked.jobs)]:
                done.result()
    finally:
        print("\n".join(t.line() for t in targets))
    return 1 if any(t.had["failures"] for t in targets) else 0


if __name__ == "__main__":
    sys.exit(main())
