# SPDX-License-Identifier: Apache-2.0
"""What a process that does not go on is doing: the state and the stack of each of its threads."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

_STATUS = ("State", "TracerPid", "SigPnd", "ShdPnd", "SigBlk")
_FRAME = re.compile(r"#\d+ +(?:0x[0-9a-f]+ in )?([^ ]+) \(")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _frames(pid: int) -> dict[int, str]:
    """By thread, the innermost first; nothing where there is no gdb, or another tracer."""
    command = ["gdb", "-nx", "-batch", "-p", str(pid), "-ex", "thread apply all backtrace 24"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[int, str] = {}
    for part in re.split(r"^Thread ", text, flags=re.MULTILINE)[1:]:
        number = re.search(r"LWP (\d+)", part.partition("\n")[0])
        if number:
            found[int(number[1])] = " < ".join(_FRAME.findall(part))
    return found


def _thread(task: Path, frames: str) -> str:
    status = dict(re.findall(r"^(\w+):\s*(.*)$", _read(task / "status"), re.MULTILINE))
    told = ", ".join(f"{name} {status.get(name, '?')}" for name in _STATUS)
    kernel = re.findall(r"\] ([^+]+)\+", _read(task / "stack"))
    return f"{task.name} {_read(task / 'comm')}: {told}; {' < '.join(kernel)}; {frames}"


def doing(pid: int) -> Iterator[str]:
    """A line a thread, and the same of who traces it."""
    tracers = set()
    frames = _frames(pid)
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        yield _thread(task, frames.get(int(task.name), "no stack"))
        traced = re.search(r"^TracerPid:\s*(\d+)$", _read(task / "status"), re.MULTILINE)
        tracers.add(int(traced[1]) if traced else 0)
    for tracer in sorted(tracers - {0}):
        yield f"traced by {_thread(Path(f'/proc/{tracer}/task/{tracer}'), '')}"
