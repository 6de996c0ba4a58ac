# SPDX-License-Identifier: Apache-2.0
"""``python -m fanin.check ENGINE TRAINER``, and what ``nixl-fetch verify --engine`` runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fanin import check
from fanin.errors import FaninError, RequestError, status_name

DIFFERS = 14
"""The exit status of ``nixl-fetch verify`` for bytes that differ."""

_CREDENTIALS = {
    "secret_file": "the launch's secret; FANIN_SECRET_FILE, else what nixl_info.json names",
    "tls_cert": "instead of a secret: this reader's certificate; FANIN_TLS_CERT",
    "tls_key": "its key; FANIN_TLS_KEY",
    "tls_ca": "the authorities of the ranks' certificates; FANIN_TLS_CA",
}
_KEY = "FANIN_ENGINE_API_KEY"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fanin.check",
        description="Compare what an engine holds with what the trainer's ranks train. The trainer "
        "has digests of its first step, and of each publish(step, digests=True).",
        epilog="Exit status 0: the engine serves what is trained. 14: it does not. 2: the command "
        "line is wrong. 11 to 16: it could not be found out, as of nixl-fetch(1).",
    )
    parser.add_argument(
        "engine", help="URL of an SGLang server, or of a vLLM server with VLLM_SERVER_DEV_MODE=1"
    )
    parser.add_argument("trainer", help="nixl_info.json, its directory, or HOST:PORT,HOST:PORT")
    parser.add_argument(
        "--run", default="0", help="of full:<run> (0); lora:RUN: an adapter's, of vLLM"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for all of it (600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--server-name", help="demand this job's ranks")
    parser.add_argument("--world-id", metavar="HEX", help="demand this launch of the trainer")
    for name, told in _CREDENTIALS.items():
        parser.add_argument("--" + name.replace("_", "-"), metavar="FILE", help=told)
    parser.add_argument(
        "--engine-api-key-file",
        metavar="FILE",
        help=f"what the engine wants, in a file that others cannot read; else {_KEY}",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Prints what :func:`fanin.check.served` finds.

    Returns:
        0: the engine serves what is trained; 14: it does not; 11 to 16: that could not be found
        out, by the class of the error as of nixl-fetch. argparse ends with 2.
    """
    options = _parser().parse_args(arguments)
    names = ("server_name", "world_id", *_CREDENTIALS)
    client = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    try:
        report = check.served(
            options.engine,
            options.trainer,
            options.run,
            timeout=options.timeout,
            api_key=_key(options.engine_api_key_file),
            **client,
        )
    except FaninError as error:
        found = getattr(error, "report", None)
        if found is None:
            return _failed(error, options.json)
        report = found
    _tell(report, options.json)
    return DIFFERS if report.different else 0


def _key(path: str | None) -> str | None:
    if path is None:
        return os.environ.get(_KEY) or None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise RequestError.make(f"cannot read {path}: {why}", "give the engine's key") from None


def _failed(error: FaninError, as_json: bool) -> int:
    print(f"fanin.check: {error}", file=sys.stderr)
    if as_json:
        fields = ("message", "rank", "key", "address", "phase", "remedy")
        told = {name: getattr(error, name) or None for name in fields} | {"rank": error.rank}
        named = {"code": error.code, "status": status_name(error.code)}
        _print({"error": {**named, **told}})
    return 10 + min(max(-error.code // 100, 1), 6)


def _tell(report: check.Served, as_json: bool) -> None:
    if as_json:
        _print({"result": "differs" if report.different else "served", **asdict(report)})
        return
    for line in report.different:
        print(f"differs: {line}")
    for kind in ("unseen", "unused", "kept"):
        for name in getattr(report, kind, ()):
            print(f"{kind}: {name}")
    print(
        f"step {report.step}: {report.tensors} tensors of {report.ranks} ranks are served by "
        f"{report.workers} workers as they are trained, {len(report.different)} are not"
    )


def _print(body: dict[str, Any]) -> None:
    print(json.dumps({"schema": 1, **body}))
