# SPDX-License-Identifier: Apache-2.0
"""What killed pulls have left is removed, and nothing else."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from fanin import HostError, RequestError, sweep_adapter_directory


def leave(parent: Path, name: str) -> Path:
    half = parent / f".{name}.fanin-tmp-0123456789abcdef"
    half.mkdir()
    (half / "adapter_model.safetensors").write_bytes(b"half")
    (parent / f".{name}.fanin-lock").touch()
    return half


def test_sweep(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    leave(tmp_path, "dead")
    alive = leave(tmp_path, "alive")
    with open(tmp_path / ".alive.fanin-lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep_adapter_directory(tmp_path) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == [".alive.fanin-lock", alive.name]
    assert sweep_adapter_directory(str(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_sweep_refuses(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="missing"):
        sweep_adapter_directory(tmp_path / "missing")
    with pytest.raises(RequestError):
        sweep_adapter_directory("a\0b")
    half = leave(tmp_path, "dead")
    tmp_path.chmod(0o777)
    with pytest.raises(RequestError, match="other users"):
        sweep_adapter_directory(tmp_path)
    assert half.exists()
