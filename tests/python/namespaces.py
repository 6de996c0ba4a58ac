# SPDX-License-Identifier: Apache-2.0
"""Scripts that want a network of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SUPPORT = Path(__file__).parents[1] / "support"


def run_alone(script: str) -> str:
    """What a script of tests/support prints, in a network namespace of its own; skips the test
    where there are none."""
    alone = ["unshare", "--map-root-user", "--net"]
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs unshare and ip")
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no network namespaces here")
    told = subprocess.run(
        [*alone, sys.executable, "-B", str(_SUPPORT / script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert told.returncode == 0, told.stderr
    return told.stdout
