# SPDX-License-Identifier: Apache-2.0
"""``nixl-fetch verify --engine``: the command, Python behind it, an engine and real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fanin.info import write_info
from fleet import FakeVLLM, WholeTrainer
from local_world import nixl_fetch

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "verify.json"


@pytest.fixture
def engine() -> Iterator[FakeVLLM]:
    with FakeVLLM() as one:
        one.held = 1
        yield one


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[WholeTrainer]:
    with WholeTrainer() as one:
        one.commit(1, digests=True)
        write_info(tmp_path, one.info)
        yield one


def verify(*words: str, path: str | None = None, **more: str) -> Any:
    """*path*: where python3 is looked for; this Python's."""
    places = path or os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [nixl_fetch(), "verify", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": places, **more},
    )


def test_what_is_served_is_what_is_trained(
    engine: FakeVLLM, trainer: WholeTrainer, tmp_path: Path
) -> None:
    done = verify(str(tmp_path), "--engine", engine.url)
    assert done.returncode == 0 and not done.stderr, done
    assert "step 1: 1 tensors of 2 ranks are served by 2 workers as they are trained" in done.stdout
    engine.wrong = 5
    addresses = ",".join(trainer.info.addresses)
    done = verify("--engine", engine.url, addresses, "full:0", "--timeout", "60")
    assert done.returncode == 14, done
    assert "differs: w: other values than those that are trained (F32)\n" in done.stdout
    done = verify(addresses, "--engine", engine.url, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 14 and told["result"] == "differs" and told["step"] == 1
    known = json.loads(SCHEMA.read_text())["oneOf"][1]
    assert set(known["required"]) <= told.keys() <= known["properties"].keys()


def test_who_cannot_be_asked(engine: FakeVLLM, trainer: WholeTrainer, tmp_path: Path) -> None:
    done = verify(str(tmp_path), "--engine", "http://127.0.0.1:1")
    assert done.returncode == 11 and "127.0.0.1:1" in done.stderr, done
    done = verify(str(tmp_path), "--engine", engine.url, "--expect-world-id", "b" * 32, "--json")
    assert done.returncode == 14, done
    assert json.loads(done.stdout)["error"]["status"] == "FANIN_ERR_WORLD"
    for more in (["--dir", "d"], ["d"], ["--path", "cma"]):
        done = verify(str(tmp_path), "full:0", *more, "--engine", engine.url)
        assert done.returncode == 2 and "--engine and " in done.stderr, done


def test_without_python_or_its_package(
    engine: FakeVLLM, trainer: WholeTrainer, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = verify(str(tmp_path), "--engine", engine.url, path=str(empty))
    assert done.returncode == 15 and "cannot run python3: No such file" in done.stderr, done
    if Path(nixl_fetch()).read_bytes().startswith(b"#!"):
        return  # the package's own command, which is not there without it
    (empty / "fanin.py").write_text("raise ImportError('no fanin here')")
    done = verify(str(tmp_path), "--engine", engine.url, "--json", PYTHONPATH=str(empty))
    assert done.returncode == 15 and "cannot verify: no fanin here: put a python3" in done.stderr
    assert "fanin's package" in json.loads(done.stdout)["error"]["remedy"]
