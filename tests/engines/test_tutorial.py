# SPDX-License-Identifier: Apache-2.0
"""The tutorial of real engines does and prints what it says; the others: cli/tutorials.bats."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vllm_server import TREE, plugin_path

PATIENCE = 540.0  # seconds; most of it is vLLM's start on a machine that runs other tests as well
PAGE = TREE / "docs" / "tutorials" / "fsdp2-to-vllm.md"
OURS = ("FANIN_LIBRARY", "FANIN_UCX_LIBRARY")  # say where the package is, if it is not installed


def a_readers_environment(scratch: Path) -> dict[str, str]:
    """The packages that the page asks for in the PATH, and nothing that it does not say."""
    private = ("FANIN_", "HF_", "NIXL_", "OMP_", "TOKENIZERS_", "VLLM_")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in OURS or not name.startswith(private)
    }
    commands = [Path(sys.executable).parent, Path(os.environ["NIXL_FETCH"]).parent]
    environment["PATH"] = os.pathsep.join([*map(str, commands), environment["PATH"]])
    before = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    if packages := [*plugin_path(scratch), *before]:
        environment["PYTHONPATH"] = os.pathsep.join(packages)
    return environment


def test_from_fsdp2_into_a_running_vllm(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(TREE / "tests/cli/tutorial.py"), str(PAGE), str(PATIENCE)],
        cwd=folder,
        env=a_readers_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE + 60,
    )
    logs = [f"{log.name}:\n{log.read_text()[-4000:]}" for log in sorted(folder.glob("*.log"))]
    assert done.returncode == 0, "\n".join([done.stdout, *logs])
