# SPDX-License-Identifier: Apache-2.0
"""Operations of one parameter client that several threads ask for: each has its own time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import fanin
import local_world
import numpy as np
import pytest
from fanin.parameter_client import ParameterClient
from fanin.parameter_server import ParameterServer


@pytest.mark.parametrize(
    "operation",
    [
        lambda client: client.get("k", timeout=0.01),
        lambda client: client.batch_get(["k"], timeout=0.01),
        lambda client: client.refresh_catalog(),
    ],
    ids=["get", "batch_get", "refresh_catalog"],
)
def test_the_wait_for_another_threads_operation_is_in_the_timeout(
    operation: Callable[[ParameterClient], object],
) -> None:
    with ParameterServer("turns", 0) as server:
        server.put("k", np.ones(4, np.float32))
        with ParameterClient(
            "c", "turns", "127.0.0.1", server.port, timeout=local_world.PATIENCE
        ) as client:
            client.timeout = 0.01
            busy, go_on = threading.Event(), threading.Event()
            pull = client._client.pull_into

            def slow(*arguments: object, **options: object) -> object:
                busy.set()
                assert go_on.wait(local_world.PATIENCE)
                return pull(*arguments, **options)  # type: ignore[arg-type]

            client._client.pull_into = slow  # type: ignore[assignment, method-assign]
            other = threading.Thread(target=client.get, args=("k", None, local_world.PATIENCE))
            waited: list[BaseException] = []

            def wait() -> None:
                try:
                    operation(client)
                except fanin.PullTimeoutError as error:
                    waited.append(error)
                go_on.set()

            other.start()
            assert busy.wait(local_world.PATIENCE)
            waiting = threading.Thread(target=wait)
            waiting.start()
            refused = go_on.wait(local_world.PATIENCE / 3)
            go_on.set()
            waiting.join()
            other.join()
            assert refused and "another thread's" in str(waited[0])
            client._client.pull_into = pull  # type: ignore[method-assign]
            assert client.get("k", timeout=local_world.PATIENCE)[0] == 1
