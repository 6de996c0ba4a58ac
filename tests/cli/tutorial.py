#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tutorial.py PAGE [SECONDS]: runs a tutorial's ```sh blocks in order, in one bash -e in the current
folder, and compares what each prints with the ```text block behind it: the words of each line that
is shown stand together in a line that was printed. Numbers differ from run to run, but for those of
ranks, runs and exit statuses. Not compared are lines that begin with a number, which are rows of a
table, a pull's path and checksums, which are the machine's, and lines of three dots. SECONDS: what
all blocks may take, 60 unless it is given. On a busy machine ranks do not answer in milliseconds: a
page that differs with a --timeout of some is run once more with ten times as many, in a new folder.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

LIMIT = 60.0
WORD = r"\b(?:rank|run|status) \d+|(?<![\w.:/])[A-Za-z_-]{3,}(?!\w)"
ASIDE = r"\s*(\d|\.\.\.$|path |checksums )"


def steps(page: str) -> list[tuple[str, str]]:
    """Each block of commands with the screen behind it, or with nothing."""
    found: list[tuple[str, str]] = []
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S):
        if kind == "sh":
            found.append((text, ""))
        elif kind == "text":
            commands, screen = found[-1]
            assert not screen, f"two screens behind: {commands}"
            assert re.search(WORD, text), f"a screen that shows nothing: {text}"
            found[-1] = (commands, text)
    assert any(screen for _, screen in found), "a page without screens"
    return found


def run(script: str, limit: float) -> int | None:
    """The exit status; None if it ran past the limit. Leaves no process behind."""
    shell = subprocess.Popen(["bash", "-e", "-c", script], start_new_session=True)
    try:
        return shell.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(shell.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        shell.wait()


def missing(screen: str, printed: str) -> list[str]:
    """Lines of the screen whose words are in no printed line together."""
    lines = [set(re.findall(WORD, line)) for line in printed.splitlines()]
    shown = [line for line in screen.splitlines() if not re.match(ASIDE, line)]
    return [line for line in shown if not any(set(re.findall(WORD, line)) <= one for one in lines)]


def wrong(page: str, limit: float) -> list[str]:
    """What it does and shows that differ, told in lines."""
    blocks, told = steps(page), []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder, str(i)) for i in range(len(blocks))]
        pairs = zip(outputs, blocks, strict=True)
        status = run("\n".join(f"exec >{out} 2>&1\n{block[0]}" for out, block in pairs), limit)
        for out, (commands, screen) in zip(outputs, blocks, strict=True):
            printed = out.read_text() if out.exists() else ""
            lacking = missing(screen, printed)
            if lacking or status != 0:
                told.append(f"$ {commands}{printed}")
            told += [f"not printed: {line}" for line in lacking]
    if status != 0:
        told.append(f"the commands ended with {'no status in time' if status is None else status}")
    return told


def main() -> int:
    page = pathlib.Path(sys.argv[1]).read_text()
    limit = float(sys.argv[2]) if len(sys.argv) > 2 else LIMIT
    told = wrong(page, limit)
    patient = re.sub(r"--timeout (\d+)ms", r"--timeout \g<1>0ms", page)
    if told and patient != page:
        os.mkdir("patient")
        os.chdir("patient")
        told = wrong(patient, 2 * limit)
    print(*told, sep="\n")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
