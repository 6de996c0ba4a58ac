# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the wheel of SGLang's kernels: a server on a CPU imports their names, and calls
none of them where it has PyTorch's own operations."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in")

    return kernel
