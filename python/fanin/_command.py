# SPDX-License-Identifier: Apache-2.0
"""Runs the wheel's nixl-fetch, which loads the wheel's libfanin and the UCX of an extra."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import _library


def main() -> None:
    """Becomes nixl-fetch, with this process's arguments; ends the process."""
    program = Path(__file__).parent / "bin" / "nixl-fetch"
    if not program.exists():
        sys.exit("nixl-fetch: this package was installed without it; install a wheel of fanin")
    _library.offer_ucx()
    # The python3 that it becomes for some commands is this one, which has the package.
    own = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([own, os.environ.get("PATH", os.defpath)])
    os.execv(program, [str(program), *sys.argv[1:]])
