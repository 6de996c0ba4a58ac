# SPDX-License-Identifier: Apache-2.0
"""addresses.py: a rank and those who come from many addresses, of IPv4 and of IPv6, over the
kernel's own sockets. Run it in a network namespace of its own, whose loopback gets all the
addresses. Prints a line of JSON for each family."""

from __future__ import annotations

import contextlib
import json
import resource
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fanin
from limits import limits
from open_rank import serve, tensor, usable
from strangers import PING, RUN, Stranger

ENGINES, DATA = 52, 4  # connections of an engine that carry bytes, besides the one that asks
VERY_MANY = 512
FEW = 16  # max_sessions of a rank that is soon full: a peer may have half, half of it for sessions
FAMILIES = {
    # The rank's address, what it allows, engines' addresses, those of one peer, a stranger.
    "IPv4": ("10.52.0.1", "10.52.0.0/16", "10.52.{}.{}", "127.52.0.{}", "10.53.0.1"),
    "IPv6": ("fd52::1", "fd52::/32", "fd52:0:{:x}:{:x}::1", "fd52:0:ffff:1::{:x}", "fd53::1"),
}


def connect_all(server: fanin.Server, target: str, sources: list[str]) -> dict[str, int]:
    """Engines, one an address; what the rank has counted when all of their connections have been
    answered."""
    with contextlib.ExitStack() as stack:
        for source in sources:
            control = Stranger(server.port, source, target=target)
            data = [Stranger(server.port, source, control.session, target) for _ in range(DATA)]
            for one in (control, *data):
                stack.enter_context(one.socket)
                one.ask(PING, {})
        stats = server.stats()
        return {name: stats[name] for name in ("sessions", "sessions_refused")}


def of_one_peer(target: str, allow: str, sources: list[str], other: str) -> dict[str, Any]:
    """How many sessions addresses get that are one peer. Another peer gets in then: who comes from
    the address *other*, or, if that is "", the own user."""
    with contextlib.ExitStack() as stack:
        with limits(max_sessions=FEW):
            server = stack.enter_context(serve(target, allow, insecure=True))
        admitted = 0
        for source in sources:
            with contextlib.suppress(ConnectionError, ValueError):  # ended, or an error as answer
                held = Stranger(server.port, source, target=target)
                stack.enter_context(held.socket)
                admitted += 1
        if other:
            stack.enter_context(Stranger(server.port, other, target=target).socket)
        else:
            with fanin.Client([f"{target}:{server.port}"], use_ucx=False) as own:
                own.pull_into(RUN, [tensor()], timeout=30.0)
        return {"admitted": admitted, "of": len(sources)}


def pull(target: str, allow: str, foreign: str) -> dict[str, str]:
    """By a real client: with a secret over TLS, and from an allow-list that has not its address."""

    def told(server: fanin.Server, **more: Any) -> str:
        where = f"[{target}]:{server.port}" if ":" in target else f"{target}:{server.port}"
        try:
            with fanin.Client([where], use_ucx=False, **more) as client:
                return str(client.pull_into(RUN, [tensor()], timeout=30.0).path)
        except fanin.FaninError as error:
            return str(error)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "secret")
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32))
        result = {}
        with serve(target, allow, secret_file=file) as server:
            result["secret"] = told(server, secret_file=file)
            result["none"] = told(server, secret_file="")
        with serve(target, foreign, insecure=True) as server:
            result["not allowed"] = told(server)
        return result


def main() -> None:
    """Both families."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for name, (target, allow, engines, mates, other) in FAMILIES.items():
        sources = [engines.format(i // 200 + 1, i % 200 + 1) for i in range(VERY_MANY)]
        one_peer = [mates.format(i + 1) for i in range(3 * FEW)]
        added = "".join(f"address add {one} dev lo\n" for one in [target, other, *sources])
        if name == "IPv6":
            added += "".join(f"address add {one} dev lo\n" for one in one_peer)
        told = subprocess.run(
            ["ip", "-batch", "-"], input=added, text=True, capture_output=True, check=False
        )
        if told.returncode != 0:
            print(json.dumps({"family": name, "missing": told.stderr.strip()}), flush=True)
            continue
        for one in [other, *sources]:
            usable(one, target)
        result: dict[str, Any] = {"family": name, "pull": pull(target, allow, other)}
        with serve(target, allow, insecure=True) as server:
            result["engines"] = connect_all(server, target, sources[:ENGINES])
        if most > 2 * VERY_MANY * (1 + DATA) + 500:
            with serve(target, allow, insecure=True) as server:
                result["very many"] = connect_all(server, target, sources)
        if name == "IPv6":
            result["one peer"] = of_one_peer(target, allow, one_peer, sources[0])
        else:
            result["one peer"] = of_one_peer("127.0.0.1", "127.0.0.0/8", one_peer, "")
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
