# SPDX-License-Identifier: Apache-2.0
"""``python -m fanin.sync TRAINER [URL...]``: a registry and its routes in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys

from fanin.errors import FaninError
from fanin.sync import Registry, Service, SyncServer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fanin.sync",
        description="Brings a trainer's whole model to engines, by HTTP routes.",
    )
    parser.add_argument(
        "trainer", help="nixl_info.json, its directory, or HOST:PORT[,HOST:PORT...]"
    )
    parser.add_argument("engine", nargs="*", help="URLs of engines to begin with")
    parser.add_argument("--run", default="0", help="of full:<run> (0)")
    parser.add_argument("--bind", default="127.0.0.1", help="numeric address (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8700, help="0: any (8700)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of a sync (300)")
    parser.add_argument("--server-name", help="demand this job's ranks")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("FANIN_SYNC_API_KEY"),
        help="what callers must send as bearer token; FANIN_SYNC_API_KEY",
    )
    parser.add_argument(
        "--engine-api-key",
        default=os.environ.get("FANIN_ENGINE_API_KEY"),
        help="what engines want; FANIN_ENGINE_API_KEY",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Serves until it is interrupted. Exit status 0, 2 for wrong arguments, 1 if it cannot."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        registry = Registry(
            options.trainer,
            run=options.run,
            timeout=options.timeout,
            server_name=options.server_name,
            api_key=options.engine_api_key,
        )
        for url in options.engine:
            registry.add(url)
        service = Service(registry, api_key=options.api_key)
        server = SyncServer(service, bind=options.bind, port=options.port)
    except FaninError as error:
        print(f"fanin.sync: {error}", file=sys.stderr)
        return 1
    with server:
        print(f"fanin.sync: {server.url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
