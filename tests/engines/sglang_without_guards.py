# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang's for tests: takes out what refuses a publication before it is pulled."""

from __future__ import annotations


def register() -> None:
    from fanin.sglang import weights

    weights.refuse_missed = lambda *_: None  # type: ignore[assignment]
