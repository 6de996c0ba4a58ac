# SPDX-License-Identifier: Apache-2.0
"""What all tests of this folder start with."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fanin
import pytest
from local_world import addresses, client_of, publish, servers

# Shells have what they run in the background ignore SIGINT, and processes inherit that; tests
# interrupt themselves and their children.
if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The python3 that nixl-fetch starts is the one that has the package's modules.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests may be coroutines: each has a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 60))
    return True


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what tests/support/make-certificates makes."""
    if not shutil.which("openssl"):
        pytest.skip("needs the command openssl")
    made = tmp_path_factory.mktemp("certificates")
    subprocess.run([Path(__file__).parents[1] / "support" / "make-certificates", made], check=True)
    return made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test enters in it is closed when the test is over."""
    with ExitStack() as result:
        yield result


@pytest.fixture
def ranks() -> Iterator[list[fanin.Server]]:
    """Three ranks that have published step 1; their updates do not wait for readers."""
    with servers(lease=0.0) as made:
        publish(made, 1)
        yield made


@pytest.fixture
def client(ranks: list[fanin.Server]) -> Iterator[fanin.Client]:
    with client_of(ranks) as made:
        yield made


@pytest.fixture
def target(ranks: list[fanin.Server]) -> str:
    return ",".join(addresses(ranks))


@pytest.fixture
def engine() -> Iterator[Any]:
    """What answers as a vLLM does."""
    from fleet import FakeVLLM

    with FakeVLLM() as made:
        yield made
