# SPDX-License-Identifier: Apache-2.0
"""Is what an engine serves what the trainer published? Asked of vLLM with the backend ``fanin``.

::

    report = fanin.check.weights(llm, step=7)                        # offline, vllm.LLM
    report = fanin.check.weights("http://engine:8000", step=7)       # VLLM_SERVER_DEV_MODE=1

Each worker makes rubbish of everything that a pull fills, pulls the step, reads it once more beside
its model (proven by digests that the trainer's ranks make of their own memory), and compares all
bytes. So a tensor that no pull fills is found as well as one that is filled wrongly. Nothing may
generate meanwhile: pause the engine first, as for an update.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fanin._http import FAILURES, ask_json, base_url
from fanin.errors import HostError, RequestError

__all__ = ["Report", "replicas", "weights"]

METHOD = "fanin_check_weights"
_MAX_ANSWER = 1 << 28


@dataclass(frozen=True)
class Report:
    """What all workers of an engine found. Paths are ``"worker 0: model.layers.1.mlp..."``.

    Of a server's replicas vLLM hands on the answer of one: *modules* and *bytes* are then its own,
    and of the others it is known that nothing differs.
    """

    step: int
    workers: int
    #: Modules that hold what is published, of all workers together.
    modules: int
    #: Read and compared.
    bytes: int
    #: Parameters and buffers that hold something else.
    different: tuple[str, ...]
    #: Modules of which nothing shows what their kernels use.
    unseen: tuple[str, ...]
    #: Parameters that no update fills, because init named them in ``keep``.
    kept: tuple[str, ...] = ()


def weights(engine: Any, step: int, *, poison: bool = True, timeout: float = 600.0) -> Report:
    """Checks *engine*, a ``vllm.LLM`` or the URL of a server; it has been given its trainer before.

    :param step: this very step of the trainer, which must not go on meanwhile.
    :param poison: make rubbish of the weights before the pull; False: compare what is there.
    :param timeout: seconds for the answer of a server.
    :raises HostError: something differs: all of it is in ``report`` of the error.
    :raises RequestError: *engine* cannot be asked; a worker has refused or failed.
    """
    fields = {"step": step, "poison": poison}
    if isinstance(engine, str):
        body = {"method": METHOD, "kwargs": fields}
        answers = _ask(engine, "/collective_rpc", body, timeout).get("results")
        workers = int(_ask(engine, "/get_world_size", None, timeout)["world_size"])
        if isinstance(answers, list) and workers > len(answers):
            # All replicas were asked, and one was heard: now each raises what it finds.
            body = {"method": METHOD, "kwargs": {"step": step, "poison": False, "strict": True}}
            _ask(engine, "/collective_rpc", body, timeout)
    elif hasattr(engine, "collective_rpc"):
        answers = engine.collective_rpc(METHOD, kwargs=fields)
        workers = len(answers)
    else:
        raise RequestError.make(
            f"{type(engine).__name__} is no engine", "give a vllm.LLM or the URL of a server"
        )
    if not isinstance(answers, list) or not all(isinstance(one, dict) for one in answers):
        raise RequestError.make(f"the engine has answered {answers!r}", "start it with the plugin")
    report = Report(
        step=step,
        workers=workers,
        modules=sum(one["modules"] for one in answers),
        bytes=sum(one["bytes"] for one in answers),
        different=tuple(
            f"worker {i}: {p}" for i, one in enumerate(answers) for p in one["different"]
        ),
        unseen=tuple(f"worker {i}: {p}" for i, one in enumerate(answers) for p in one["unseen"]),
        kept=tuple(f"worker {i}: {p}" for i, one in enumerate(answers) for p in one["kept"]),
    )
    if report.different:
        error = HostError.make(
            f"{len(report.different)} tensors do not hold step {step}: "
            + ", ".join(report.different[:4]),
            "update again; if it stays so, report it with the engine's log",
            key=report.different[0],
        )
        error.report = report  # type: ignore[attr-defined]
        raise error
    return report


def replicas(urls: list[str], *, timeout: float = 600.0) -> tuple[str, ...]:
    """Names of tensors that engines of one layout hold differently, by vLLM's ``/weight_checker``.

    :raises RequestError: fewer than two engines; one cannot be asked.
    """
    if len(urls) < 2:
        raise RequestError.make("one engine has nothing to be compared with", "give two or more")
    sums = [
        dict(_ask(url, "/weight_checker", {"action": "checksum"}, timeout)["checksums"])
        for url in urls
    ]
    names = {name for one in sums for name in one}
    return tuple(sorted(n for n in names if len({one.get(n) for one in sums}) > 1))


def _ask(url: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
    method, base = "GET" if body is None else "POST", base_url(url)
    deadline = time.monotonic() + timeout
    try:
        reply = ask_json(method, base, path, body, deadline=deadline, limit=_MAX_ANSWER)
    except FAILURES as error:
        raise _unasked(url, path, str(error) or type(error).__name__) from error
    found = reply.json()
    if reply.status != 200 or not isinstance(found, dict):
        raise _unasked(url, path, f"status {reply.status}: {reply.reason}")
    return found


def _unasked(url: str, path: str, why: str) -> RequestError:
    return RequestError.make(
        f"{url}{path}: {why}",
        "start the server with VLLM_SERVER_DEV_MODE=1 and the plugin; its log says more",
        address=url[:63],
    )
