# SPDX-License-Identifier: Apache-2.0
"""Scripts that want a network of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SUPPORT = Path(__file__).parents[1] / "support"


def _alone(script: str) -> list[str]:
    """The command; skips the test where there are no network namespaces."""
    alone = ["unshare", "--map-root-user", "--net"]
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs unshare and ip")
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no network namespaces here")
    return [*alone, sys.executable, "-B", str(_SUPPORT / script)]


def run_alone(script: str) -> str:
    """What a script of tests/support prints, in a network namespace of its own; skips the test
    where there are none."""
    told = subprocess.run(_alone(script), capture_output=True, text=True, check=False, timeout=300)
    assert told.returncode == 0, told.stderr
    return told.stdout


class Alone:
    """A script of tests/support in a network namespace of its own, which answers each line of JSON
    by one; a `with` block ends it. Skips the test where there are none, or the script says that
    something is missing."""

    def __init__(self, script: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(_alone(script), stdin=pipe, stdout=pipe, text=True)
        missing = self._answer()["missing"]
        if missing:
            self.__exit__()
            pytest.skip(f"no such network here: {missing}")

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the script has ended"
        return dict(json.loads(line))

    def ask(self, **fields: Any) -> dict[str, Any]:
        """The script's answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()
        return self._answer()
