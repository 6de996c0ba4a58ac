# SPDX-License-Identifier: Apache-2.0
"""A benchmark's other processes: the same script once more, told by lines and answering in JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def start(script: str, *words: str) -> subprocess.Popen[str]:
    """Runs *script* with *words*."""
    return subprocess.Popen(
        [sys.executable, script, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> Any:
    """What it says next; None: that it is ready. Ends this process if that one has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit("a process ended: its message is above")
    return json.loads(line) if line.strip() != "ready" else None


def say(process: subprocess.Popen[str], line: str = "") -> None:
    """Has it go on."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
