# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus for tests, as tools/setup unpacks it, or the system's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from local_world import PATIENCE, until

TREE = Path(__file__).parents[2]
MONITORING = TREE / "docs" / "monitoring"


def tool(name: str) -> str | None:
    """Where ``prometheus`` or ``promtool`` is."""
    return shutil.which(name, path=TREE / ".deps" / "prometheus") or shutil.which(name)


def needed(name: str) -> str:
    """The same; skips the test where there is none."""
    return tool(name) or pytest.skip(f"no {name}: run tools/setup test")


class Prometheus:
    """One that runs. Its answers are those of its API."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, **fields: str) -> Any:
        """The data of ``/api/v1/<path>``; what it finds wrong with an expression fails the test."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{fields}: {error.read().decode()}") from None

    def value(self, expression: str) -> list[Any]:
        """What the expression gives now: ``{"metric": labels, "value": [when, text]}`` each."""
        result = self.ask("query", query=expression)["result"]
        assert isinstance(result, list)
        return result


@contextmanager
def running(folder: Path, jobs: dict[str, str]) -> Iterator[Prometheus]:
    """Scrapes *jobs*, addresses by name, five times a second; has the rules of docs/monitoring."""
    config = {
        "global": {
            "scrape_interval": "200ms",
            "scrape_timeout": "200ms",
            "evaluation_interval": "200ms",
        },
        "rule_files": [str(MONITORING / "alerts.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [address]}]}
            for job, address in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    log = folder / "log"
    with log.open("w") as end:
        process = subprocess.Popen(
            [
                needed("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            cwd=folder,
            stderr=end,
        )
    lines = ('msg="Listening on" address=', "ready to receive web")  # in any order

    def has_begun() -> bool:
        text = log.read_text()
        return all(line in text for line in lines)

    try:
        until(lambda: process.poll() is not None or has_begun())
        listening = re.search(lines[0] + r"(\S+)\s", log.read_text())
        assert listening, log.read_text()
        yield Prometheus(listening.group(1))
    finally:
        process.kill()
        process.wait(PATIENCE)
