# SPDX-License-Identifier: Apache-2.0
"""The examples, as their users run them; that with Ray is in test_ray.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fanin.info import addresses_of
from vllm_server import VllmServer, save_model
from worlds import child_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "python" / "examples"
PATIENCE = 240.0


@contextmanager
def trainer(folder: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    """Two ranks; the log is in *folder*, and so is nixl_info.json once it yields."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(EXAMPLES / "trainer.py"), "--info", str(folder), "--base-port", "0"]
    command += ["--steps", str(steps), "--pause", "0.2"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, text=True, env=child_environment()
        )
    try:
        limit = time.monotonic() + PATIENCE
        while not (folder / "STABLE").exists():
            assert process.poll() is None and time.monotonic() < limit, (folder / "log").read_text()
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


def worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "engine.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=child_environment()
    )


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="the worker writes to /dev/shm")
def test_trainer_and_worker(tmp_path: Path) -> None:
    with trainer(tmp_path, 10000):
        loaded = worker(str(tmp_path), "--load", "tiny", "--steps", "2")
        assert loaded.returncode == 0, loaded.stderr
        assert len(re.findall(r"^    loaded; next token", loaded.stdout, re.MULTILINE)) == 2
        addresses = ",".join(addresses_of(tmp_path))
        pulled = worker(addresses, "--steps", "3")
        assert pulled.returncode == 0, pulled.stderr
        steps = [
            int(n) for n in re.findall(r"^step (\d+): .* from 2 ranks", pulled.stdout, re.MULTILINE)
        ]
        assert len(steps) == 3 and steps == sorted(set(steps))


def test_the_trainer_ends_by_itself(tmp_path: Path) -> None:
    with trainer(tmp_path, 2) as process:
        assert process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    assert "step 2: loss" in (tmp_path / "log").read_text()
    gone = worker(str(tmp_path), "--timeout", "5")
    assert gone.returncode == 1
    assert gone.stderr.startswith("engine.py: ") and "remedy" in gone.stderr


def test_a_whole_model_into_a_vllm(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    backend = ("--weight-transfer-config", '{"backend": "fanin"}')
    development = {"VLLM_SERVER_DEV_MODE": "1"}
    with VllmServer(model, tmp_path, *backend, environment=development, adapters=False) as engine:
        engine.wait_ready()
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", str(EXAMPLES / "weights.py"), "--model", str(model)]
        command += ["--engine", engine.url, "--base-port", "0", "--steps", "3", "--rate", "0.01"]
        done = subprocess.run(
            [*command, "--ids", "5", "9", "13"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=child_environment(),
        )
        assert done.returncode == 0, done.stderr
        said = re.findall(rf"^  {engine.url}: (.*)$", done.stdout, re.MULTILINE)
        assert len(said) == 3 and len(set(said)) > 1
        assert engine.ask("GET", "/weight_info")["weight_version"] == "step-3"
        # The trainer is gone; the engine serves on with its last step.
        assert engine.tokens(engine.base, [5, 9, 13], 4)
