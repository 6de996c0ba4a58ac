#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How a campaign ends its processes, and what it tells of those that do not end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest.mock import Mock, patch

from processes import Board, Found, Limited, Trainer, life_word
from pulse import Pulse, state_of

ENDS = "import signal as s; print(flush=True); s.pause()"
STAYS = "import signal as s; s.signal(s.SIGTERM, s.SIG_IGN); print(flush=True); s.pause()"
FAILS = "import signal as s; s.signal(s.SIGTERM, lambda *_: exit(23)); print(flush=True); s.pause()"


class Recorded:
    """In a process's place: what is done to it."""

    def __init__(self) -> None:
        self.pid, self.signals = os.getpid(), []
        self.files: list[int] = []  # its limit of descriptors, at each signal

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.files.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)

    def wait(self, _: float) -> int:
        return 0


class Ends(unittest.TestCase):
    def setUp(self) -> None:
        place = self.enterContext(tempfile.TemporaryDirectory())
        self.found = Found()
        self.trainer = Trainer(Path(), Board(Path(place) / "board"), self.found, 1, 0, 1)

    def listening(self, program: str) -> subprocess.Popen[str]:
        """Has come so far that it minds signals."""
        words = [sys.executable, "-c", program]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.communicate)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def rank(self, process: object) -> Limited:
        self.trainer.ranks[0] = limited = Limited(process)
        return limited

    def test_launches_are_told_apart_by_age(self) -> None:
        words = []
        for _ in range(300):
            self.trainer.draw(20, 20, "reference")
            words.append(life_word(self.trainer.life))
            self.assertEqual(len(bytes.fromhex(self.trainer.life)), 16)
        self.assertEqual(words, sorted(set(words)))
        self.assertEqual(self.trainer.lives, set(words))

    def test_nothing_comes_after_sigterm(self) -> None:
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        process = Recorded()
        self.rank(process).limit(resource.RLIMIT_NOFILE, 64)
        self.trainer.signal(0, signal.SIGTERM)
        self.assertEqual(process.signals, [signal.SIGCONT, signal.SIGTERM])
        self.assertEqual(process.files[1], usual)

    def test_who_does_not_end_is_told_with_its_threads(self) -> None:
        process = self.listening(STAYS)
        limited = self.rank(process)
        process.send_signal(signal.SIGTERM)
        self.assertIsNone(limited.ends(0, "rank 0", self.found))
        told = self.found.hung[0].splitlines()
        self.assertIn(f"rank 0, process {process.pid}, does not end", told[0])
        self.assertRegex(told[1], rf"^  {process.pid} python.*: State [A-Z]")
        self.assertEqual(process.returncode, -signal.SIGKILL)

    def test_time_in_which_the_machine_stands_does_not_count(self) -> None:
        process, late = Recorded(), subprocess.TimeoutExpired("", 1)
        for stood, status in ((10**12, 0), (0, None)):
            process.wait = Mock(side_effect=[late, 0])
            self.found.pulse.stood = Mock(return_value=stood)
            with patch("processes.doing", return_value=[]):
                self.assertIs(self.rank(process).ends(0, "rank 0", self.found), status)

    def test_a_machine_stands_while_one_cpu_does(self) -> None:
        pulse, second = Pulse(), 10**9
        for cpu, at in ((0, 1), (1, 1), (0, 1.5), (1, 5), (0, 6), (1, 5.5), (0, 6.5), (1, 9)):
            pulse.beat(cpu, int(at * second))  # 1 stood from 1 to 5 and to 9, 0 from 1.5 to 6
        for begin, end, stood in (
            (0, 1, 0),
            (0, 3, 2),
            (2, 6, 4),
            (5.5, 7, 1.5),
            (9, 10, 1),
            (0, 10, 9),
        ):
            told = pulse.stood(int(begin * second), int(end * second))
            self.assertEqual(told, int(stood * second), (begin, end))

    def test_who_is_ready_and_gets_no_cpu_is_starved(self) -> None:
        pulse, second = Pulse(), 10**9
        looks = [
            (True, 0.0),
            (True, 0.001),
            (False, 0.002),
            (True, 0.003),
            (True, 0.2),
            (True, 0.21),
        ]
        for at, state in enumerate(looks):
            pulse.look({7: state, 8: (False, 0.0), 9: (True, float(at))}, at * second)
        for end, stood in ((1, 1), (4, 1), (5, 2)):
            self.assertEqual(pulse.stood(0, end * second), stood * second)
        self.assertEqual(state_of(os.getpid())[0], True)

    def test_a_rank_that_ends_badly_is_told(self) -> None:
        self.rank(self.listening(FAILS))
        self.trainer.signal(0, signal.SIGTERM)
        self.assertEqual(self.found.wedged, ["rank 0 ended with 23 when it was told to"])
        self.rank(self.listening(ENDS))
        self.trainer.signal(0, signal.SIGTERM)
        self.assertEqual(len(self.found.wedged), 1)


if __name__ == "__main__":
    unittest.main()
