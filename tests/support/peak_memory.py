#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""peak_memory.py --place DIR LIMIT COMMAND...

Runs a command that makes files below DIR and fails if it ever needs more than LIMIT bytes. Needed
is what the kernel counts as resident, shared pages included, and, where DIR is a tmpfs, pages of
those files that the command does not map. Prints the command's standard output; the peak goes to
standard error. Exit status: the command's, or 99 beyond the limit.
"""
import argparse
import os
import pathlib
import subprocess
import sys
import threading
import time

PAUSE_S = 0.002


def resident(pid):
    """Anonymous, file and shared memory in bytes; None when the process has ended."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "RssShmem" not in fields:
        return None
    return [int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem")]


def is_tmpfs(directory):
    run = subprocess.run(["stat", "-f", "-c", "%T", directory], check=True, capture_output=True)
    return run.stdout.strip() == b"tmpfs"


def file_bytes(directory):
    """Memory of the files below, which come and go."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name), follow_symlinks=False).st_blocks * 512
            except OSError:
                pass
    return total


class Watch(threading.Thread):
    """Samples often: how much of the files is not mapped shows only in passing."""

    def __init__(self, pid, directory, tmpfs):
        super().__init__()
        self.pid, self.directory, self.tmpfs = pid, directory, tmpfs
        self.peak, self.samples, self.other_shared = 0, 0, 0
        self.stop = threading.Event()

    def sample(self):
        files = file_bytes(self.directory) if self.tmpfs else 0
        parts = resident(self.pid)
        if parts is None:
            return
        anonymous, mapped, shared = parts
        # Nor since: a file may have come and been mapped while this looked.
        if files == 0 and (not self.tmpfs or file_bytes(self.directory) == 0):
            self.other_shared = max(self.other_shared, shared if self.tmpfs else 0)
        self.samples += 1
        self.peak = max(self.peak, anonymous + mapped + max(shared, self.other_shared + files))

    def run(self):
        while not self.stop.wait(PAUSE_S):
            self.sample()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", required=True)
    parser.add_argument("limit", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    tmpfs = is_tmpfs(options.place)
    begin = time.monotonic()
    # On a busy processor the watch comes first: it sleeps most of the time.
    child = subprocess.Popen(["nice", "-n", "5", *options.command])
    watch = Watch(child.pid, options.place, tmpfs)
    watch.start()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    watch.stop.set()
    watch.join()
    peak = max(watch.peak, usage.ru_maxrss * 1024)
    print(f"peak: {peak} bytes ({usage.ru_maxrss * 1024} resident, {watch.peak} with files' pages in "
          f"{watch.samples} samples of {time.monotonic() - begin:.1f} s), the limit is {options.limit}",
          file=sys.stderr)
    if child.returncode != 0:
        return child.returncode if child.returncode > 0 else 128 - child.returncode
    if watch.samples < 10:
        print("too few samples to say anything", file=sys.stderr)
        return 99
    return 99 if peak > options.limit else 0


if __name__ == "__main__":
    sys.exit(main())
