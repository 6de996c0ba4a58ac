# SPDX-License-Identifier: Apache-2.0
"""Commands of nixl-fetch that are Python's: what the program becomes."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from typing import Any

import bundle
import maps
import top
import traces
from telling import Failed, end, plain

_REMEDY = "put a python3 first into the PATH that has fanin's package, of this version"
_GRACE_S = 5.0  # it tells itself that its time is over


def _package(what: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise Failed("IO", what, str(error), _REMEDY) from None


def _end_at_once(failed: Failed, as_json: bool) -> None:
    """Whatever other threads do, or standard output does not take."""
    with redirect_stdout(sys.__stdout__), redirect_stderr(sys.__stderr__):
        try:
            end(failed, as_json)
        except SystemExit as ended:
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(int(str(ended)))


def _exporter(as_json: bool, *words: str) -> int:
    _package("no exporter", "fanin._exporter").main(as_json, *words)
    return 0


def _verify(as_json: bool, timeout: str, *words: str) -> int:
    """What an engine serves against what ranks train. Both have chosen names in what is said."""
    what = "cannot verify"
    check = _package(what, "fanin.check")
    said = io.StringIO(), io.StringIO()

    late = Failed("TIMEOUT", what, "the engine is not done", "give a longer --timeout")
    timer = threading.Timer(float(timeout) + _GRACE_S, _end_at_once, (late, as_json))
    timer.daemon = True
    timer.start()
    try:
        with redirect_stdout(said[0]), redirect_stderr(said[1]):
            code = check.main(["--timeout", timeout, *["--json"] * as_json, *words])
    except Exception as error:
        why = f"Python has failed: {type(error).__name__}: {error}"
        raise Failed("IO", what, why, _REMEDY) from None
    finally:
        timer.cancel()
    for text, stream in zip(said, (sys.stdout, sys.stderr), strict=True):
        for line in text.getvalue().splitlines():
            print(plain(line), file=stream)
    return int(code)


_COMMANDS: dict[str, Callable[..., int]] = {
    "bundle": bundle.main,
    "exporter": _exporter,
    "map": maps.main,
    "top": top.main,
    "trace": traces.main,
    "verify": _verify,
}


def main(command: str, json: str, *words: str) -> int:
    """*json*: "json", or ""."""
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        code = _COMMANDS[command](json != "", *words)
        sys.stdout.flush()
    except Failed as failed:
        end(failed, json != "")
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        remedy = "give standard output a place with room"
        _end_at_once(Failed("IO", "cannot write the output", str(error.strerror), remedy), False)
    return code


sys.exit(main(*sys.argv[1:]))
