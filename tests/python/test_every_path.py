# SPDX-License-Identifier: Apache-2.0
"""Every kind of destination on every path of host memory, out of other processes: what a build by
another compiler than the library's own tests' must do as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fanin
import local_world
import numpy as np
import pytest
from local_world import A_NAME, B_NAME, assert_step, empty, packed
from safetensors.numpy import load_file

STEP = 3
PATHS: dict[str, dict[str, Any]] = {
    "cma": {"path": "cma"},
    "stream-unix": {"path": "stream"},
    "stream-tcp": {"path": "stream", "use_unix": False},
    "auto": {},
}
Got = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def trainer() -> Iterator[local_world.Processes]:
    world = local_world.Processes(use_ucx=False)
    try:
        world.publish(STEP)
        yield world
    finally:
        assert world.close() == [0, 0, 0]


@pytest.fixture(params=PATHS)
def client(request: Any, trainer: local_world.Processes) -> Iterator[fanin.Client]:
    options = PATHS[request.param]
    with fanin.Client(trainer.addresses, use_ucx=False, **options) as made:
        yield made


def by_name(client: fanin.Client, _: Path) -> Got:
    got = empty()
    client.pull_into("0", got, timeout=local_world.PATIENCE)
    return got


def by_one_description(client: fanin.Client, _: Path) -> Got:
    got = empty()
    tensors = packed(got)
    for _again in range(2):  # cold, and warm
        for value in got.values():
            value[:] = 0
        client.pull_into("0", tensors, timeout=local_world.PATIENCE)
    return got


def with_strides(client: fanin.Client, _: Path) -> Got:
    a, b = np.zeros((8, 6), np.float32), np.zeros((3, 8, 2), np.float32)
    got = {A_NAME: a.T[::-2], B_NAME: b.transpose(1, 0, 2)[::-1, :, 0]}
    client.pull_into("0", got, timeout=local_world.PATIENCE)
    assert not a.T[::2].any() and not b[..., 1].any()
    return got


def proven(client: fanin.Client, _: Path) -> Got:
    got = empty()
    client.pull_into("0", got, verify=True, timeout=local_world.PATIENCE)
    return got


def in_a_session(client: fanin.Client, _: Path) -> Got:
    got = empty()
    with client.begin("0", packed(got), timeout=local_world.PATIENCE) as session:
        session.read(1, 1)
        session.read(0, 1)
        session.end()
    return got


def as_adapter(client: fanin.Client, place: Path) -> Got:
    client.pull_adapter("0", place / "adapter", timeout=local_world.PATIENCE)
    return dict(load_file(place / "adapter" / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    "pull", [by_name, by_one_description, with_strides, proven, in_a_session, as_adapter]
)
def test_all_of_it_arrives(
    client: fanin.Client, tmp_path: Path, pull: Callable[[fanin.Client, Path], Got]
) -> None:
    got = pull(client, tmp_path)
    assert got.keys() == local_world.weights(STEP).keys()
    assert_step(got, STEP)
