#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What scrapes of Server.serve_metrics() cost a trainer: CPU time, less that of as long without."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import fanin
import numpy as np

FRESH = 1.05  # seconds after which a page is made anew
SCRAPER = """
import sys, time, urllib.request
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    with urllib.request.urlopen(sys.argv[1]) as page:
        assert b"fanin_commits_total" in page.read()
    print(flush=True)
    time.sleep(float(sys.argv[3]))
"""


def spent(url: str | None, seconds: float) -> tuple[float, int]:
    """This process' CPU seconds meanwhile, and how many pages were scraped."""
    if url is None:
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before, 0
    command = [sys.executable, "-c", SCRAPER, url, str(seconds), str(FRESH)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as scraper:
        assert scraper.stdout is not None
        scraper.stdout.read(1)  # it has come up
        before = time.process_time()
        pages = len(scraper.stdout.read())
        return time.process_time() - before, pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20, help="of each half of a round")
    parser.add_argument("--every", type=float, default=15, help="seconds between scrapes")
    given = parser.parse_args()
    with fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, use_ucx=False) as server:
        server.put("lora:0", [fanin.shard_of("a", np.zeros((64, 64), np.float32))])
        server.commit("lora:0", 1)
        url = f"http://{server.serve_metrics().address}/metrics"
        costs = []
        for _ in range(given.rounds):
            idle, _none = spent(None, given.seconds)
            busy, pages = spent(url, given.seconds)
            costs.append((busy - idle) / pages)
            print(f"idle {1e3 * idle:.2f} ms, {pages} scrapes {1e3 * busy:.2f} ms", flush=True)
    one = statistics.median(costs)
    print(
        f"a scrape {1e3 * one:.2f} ms ({1e3 * min(costs):.2f} to {1e3 * max(costs):.2f}), "
        f"every {given.every:g} s {100 * one / given.every:.4f} % of a core; "
        f"load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
