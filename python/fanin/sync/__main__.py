# SPDX-License-Identifier: Apache-2.0
"""``python -m fanin.sync TRAINER [URL...]``: a registry and its routes in a process of its own."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from queue import Empty, SimpleQueue

from fanin._http import checked_key
from fanin._options import VARIABLES, Credentials, texts_of
from fanin.errors import FaninError, RequestError
from fanin.fleet.registry import Registry
from fanin.fleet.service import Service, SyncServer

_LOOK = 0.1  # seconds
_THREE: dict[str, bool | str] = {"auto": "auto", "yes": True, "no": False}
_THREE_WAYS = {
    "--prefetch": "have engines read a step beside their model before they are paused (auto: those"
    " that can)",
    "--verify-served": "compare what engines serve with what is trained (auto: in the first update"
    " after an init, a restart, a sleep or a reload)",
}

# Keys, and the variables that have them.
_KEYS = {
    "api-key": ("FANIN_SYNC_API_KEY", "what callers must send as bearer token"),
    "engine-api-key": (
        "FANIN_ENGINE_API_KEY",
        "what engines want, but not those that callers add where these need no --api-key",
    ),
}


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
    for name, told in _THREE_WAYS.items():
        parser.add_argument(name, choices=list(_THREE), default="auto", help=told)
    parser.add_argument("--server-name", help="demand this job's ranks")
    texts = texts_of(Credentials)
    for name in VARIABLES:
        parser.add_argument("--" + name.replace("_", "-"), metavar="FILE", help=texts.get(name))
    parser.add_argument(
        "--resync",
        action="store_true",
        help="give an engine that was started again the step that it had, within seconds",
    )
    for name, (variable, told) in _KEYS.items():
        either = parser.add_mutually_exclusive_group()
        either.add_argument(
            f"--{name}",
            type=_key,
            default=os.environ.get(variable) or None,
            help=f"{told}; {variable}. Every user of this host can read it in the command line",
        )
        either.add_argument(
            f"--{name}-file",
            type=_key_of,
            dest=name.replace("-", "_"),
            default=argparse.SUPPRESS,
            metavar="FILE",
            help=f"--{name}, in a file that others cannot read",
        )
    return parser


def _key(text: str) -> str | None:
    try:
        return checked_key(text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _key_of(path: str) -> str | None:
    try:
        return _key(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise argparse.ArgumentTypeError(f"cannot read {path}: {why}") from None


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM, which wait for a running sync.

    So no engine is left paused. A second signal ends the sync, and names the engines that may be
    paused. Exit status 0, 2 for wrong arguments, 1 if it cannot serve or has left engines in a
    sync.
    """
    options = _parser().parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        registry = Registry(
            options.trainer,
            run=options.run,
            timeout=options.timeout,
            server_name=options.server_name,
            api_key=options.engine_api_key,
            prefetch=_THREE[options.prefetch],
            verify_served=_THREE[options.verify_served],
            resync=options.resync,
            **{name: getattr(options, name) for name in VARIABLES},
        )
        for url in options.engine:
            registry.add(url)
        service = Service(registry, api_key=options.api_key)
        server = SyncServer(service, bind=options.bind, port=options.port)
    except FaninError as error:
        print(f"fanin.sync: {error}", file=sys.stderr)
        return 1
    with server:
        stop = _Stop()
        print(f"fanin.sync: {server.url}", flush=True)
        stop.wait()
    return _finish(registry, stop)


class _Stop:
    """SIGINT and SIGTERM, counted."""

    def __init__(self) -> None:
        self._come: SimpleQueue[int] = SimpleQueue()  # the one that a signal may interrupt
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._come.put(number))

    def wait(self, timeout: float | None = None) -> bool:
        """Whether a signal has come that was not waited for yet."""
        try:
            self._come.get(timeout=timeout)
        except Empty:
            return False
        return True


def _finish(registry: Registry, stop: _Stop) -> int:
    busy = registry.busy()
    if busy:
        print(f"fanin.sync: a sync of {', '.join(busy)} is waited for", file=sys.stderr, flush=True)
    while busy and not stop.wait(_LOOK):
        busy = registry.busy()
    if busy:
        print(
            f"fanin.sync: ended in the sync of {', '.join(busy)}, which may be paused: the next"
            " sync repairs that",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # threads that wait for engines hold up no second signal
    return 0


if __name__ == "__main__":
    sys.exit(main())
