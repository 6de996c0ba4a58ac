# SPDX-License-Identifier: Apache-2.0
"""Servers and clients with other limits than users can choose: fields of the C configurations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from fanin import _library


@contextlib.contextmanager
def limits(**fields: int) -> Iterator[None]:
    """What is made meanwhile has these fields: ``lost_ms``, ``max_sessions``, ``peer_cpu``..."""
    initialised = _library.initialised
    _library.library()  # which checks its defaults

    def limited(structure: Any, init: Any) -> Any:
        config = initialised(structure, init)
        for name in fields.keys() & {field[0] for field in structure._fields_}:
            setattr(config, name, fields[name])
        return config

    with mock.patch.object(_library, "initialised", limited):
        yield
