# SPDX-License-Identifier: Apache-2.0
"""Is what an engine serves what the trainer published? Asked of engines that fanin fills.

::

    report = fanin.check.weights(llm, step=7)                        # offline, vllm.LLM
    report = fanin.check.weights("http://engine:8000", step=7)       # VLLM_SERVER_DEV_MODE=1
    report = fanin.check.served("http://engine:8000", "/shared/run")

    python -m fanin.check http://engine:8000 /shared/run              # served() as a command

:func:`served` compares digests of what the engine, vLLM or SGLang, holds with those of what is
trained. :func:`weights`, of vLLM, compares bytes with what is published. Each worker overwrites all
that a pull fills with invalid data, pulls the step, and reads it once more beside its model.
Digests that the trainer's ranks make of their own memory prove that reading. Then it compares all
bytes. So it finds a tensor that no pull fills as well as one that is filled wrongly. Nothing may
generate meanwhile: pause the engine first, as for an update.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fanin import _served
from fanin._http import FAILURES, ask_json, base_url
from fanin.errors import FaninError, HostError, NotFoundError, PeerError, RequestError, status_name
from fanin.info import addresses_of, client_arguments
from fanin.sglang import asking

__all__ = ["Report", "Served", "replicas", "served", "weights"]

METHOD = "fanin_check_weights"
_DIGESTS = "fanin_served_digests"
_MAX_ANSWER = 1 << 28
_START = "start the server with VLLM_SERVER_DEV_MODE=1 and the plugin; its log says more"
_SAME = "run the same version of fanin where the engine runs and here"
_PATIENCE = 60.0  # seconds, in which ranks digest what they hold
_LOOK = 10.0  # seconds for what an engine that lives answers at once
_SHORT, _PAUSE = 1.0, 0.02
_ON_THEIR_WAY = ("draining", "writing")

Ranks = list[tuple[list[_served.Layout], list[_served.Held]]]
"""What each rank holds, and digests of it."""


@dataclass(frozen=True)
class Report:
    """The findings of all workers of an engine. Paths are ``"worker 0: model.layers.1.mlp..."``.

    Of a server's replicas vLLM hands on one answer. *modules* and *bytes* are then of that replica.
    The others hold nothing different.

    Args:
        step: the step that was compared.
        workers: that were asked.
        modules: that hold what is published, of all workers together.
        bytes: that were read and compared.
        different: parameters and buffers that hold something else.
        unseen: modules of which nothing shows what their kernels use.
        kept: parameters that no update fills, because init named them in ``keep``.
    """

    step: int
    workers: int
    modules: int
    bytes: int
    different: tuple[str, ...]
    unseen: tuple[str, ...]
    kept: tuple[str, ...] = ()


def weights(engine: Any, step: int, *, poison: bool = True, timeout: float = 600.0) -> Report:
    """Checks whether *engine* holds a step of its trainer, which it has been given before.

    Args:
        engine: a ``vllm.LLM``, or the URL of a server.
        step: this very step of the trainer, which must not go on meanwhile.
        poison: overwrite the weights before the pull; False: compare what is there.
        timeout: seconds for the answer of a server.

    Returns:
        What all workers found. Nothing differs.

    Raises:
        HostError: something differs: all of it is in ``report`` of the error.
        RequestError: *engine* cannot be asked; a worker has refused or failed.
    """
    answers, workers = _answers(engine, METHOD, {"step": step, "poison": poison}, timeout)
    if workers > len(answers):
        # All replicas were asked, and one was heard: now each raises what it finds.
        body = {"method": METHOD, "kwargs": {"step": step, "poison": False, "strict": True}}
        _ask(engine, "/collective_rpc", body, timeout)
    report = Report(
        step=step,
        workers=workers,
        modules=sum(one["modules"] for one in answers),
        bytes=sum(one["bytes"] for one in answers),
        different=_by_worker(answers, "different"),
        unseen=_by_worker(answers, "unseen"),
        kept=_by_worker(answers, "kept"),
    )
    if report.different:
        told = f"do not hold step {step}: " + ", ".join(report.different[:4])
        remedy = "update again; if it stays so, report it with the engine's log"
        raise _differs(report, told, remedy, report.different[0])
    return report


def _differs(report: Report | Served, told: str, remedy: str, key: str) -> HostError:
    error = HostError.make(f"{len(report.different)} tensors {told}", remedy, key=key)
    error.report = report  # type: ignore[attr-defined]
    return error


@dataclass(frozen=True)
class Served:
    """What an engine holds, beside what its trainer trains."""

    step: int
    workers: int
    ranks: int
    #: Published tensors that are served as they are trained.
    tensors: int
    #: That the workers digested.
    boxes: int
    #: ``"name: why"``: other values, a cut, rounding, replicas or workers that differ.
    different: tuple[str, ...]
    #: Of workers: modules whose kernels cannot be asked what they use.
    unseen: tuple[str, ...]
    #: Names that init's ``unused`` leaves out, and those of a draft that the main model fills.
    unused: tuple[str, ...]
    #: Of workers: parameters that nobody trains, because init named them in ``keep``.
    kept: tuple[str, ...] = ()

    @property
    def only_rounded(self) -> bool:
        """Whether casts of the trainer's alone make what differs: the engine holds that type too,
        and could have the whole value."""
        return all(f": {_served.ROUNDED} " in one for one in self.different)


def served(
    engine: Any,
    trainer: Any,
    run: str | int = "full:0",
    *,
    timeout: float = 600.0,
    api_key: str | None = None,
    **client: Any,
) -> Served:
    """Compares what *engine* holds with what the ranks of *trainer* train, tensor by tensor.

    The ranks digest their model's own tensors at their first step, but not an adapter's. They also
    do so at each ``publish(step, digests=True)`` or ``updating(step, digests=True)`` of
    :class:`fanin.torch.WeightServer`. The workers digest theirs now, and must be at that step.
    Nothing is written. Modules that vLLM processes are read once more from the trainer.

    Args:
        engine: a ``vllm.LLM``, an ``sglang.Engine``, or the URL of a server of vLLM or SGLang, not
            of several replicas.
        trainer: the path of a nixl_info.json or of its directory, or the ranks' addresses.
        run: of whole weights: the model's, or that of vLLM's draft model, its ``draft_run``. For an
            adapter: ``"lora:<run>"``, by the URL of a vLLM.
        timeout: seconds for all of it; a ``vllm.LLM`` takes as long as it takes.
        api_key: of the engine's server: SGLang's ``--admin-api-key``.
        client: what else :class:`fanin.Client` takes: ``secret_file``, ``tls_ca``...

    Returns:
        What the engine holds. Nothing differs.

    Raises:
        HostError: something differs: all of it is in ``report`` of the error.
        NotFoundError: the trainer has published no digests.
        RequestError: *engine* cannot be asked; a worker has refused or failed.
        PeerError: it has another version of fanin, whose digests cannot be read.
    """
    deadline = time.monotonic() + timeout
    if _publication(run).startswith("lora:"):
        return _adapter_served(engine, trainer, run, deadline, api_key, client)
    look = min(timeout, _LOOK)
    if not asking.is_sglang(engine, look, api_key):
        _workers(engine, look, api_key)  # whose address is wrong is told at once
    step, ranks = trained(trainer, run, timeout, client)
    left = max(deadline - time.monotonic(), _SHORT)
    return compared(step, ranks, *held_by(engine, run, step, left, api_key))


def _publication(run: str | int) -> str:
    return f"full:{run}" if ":" not in str(run) else str(run)


def _adapter_served(
    engine: Any,
    trainer: Any,
    run: str | int,
    deadline: float,
    api_key: str | None,
    client: dict[str, Any],
) -> Served:
    """As :func:`served`, of every adapter that the engine has of the step."""
    timeout = max(deadline - time.monotonic(), _SHORT)
    if not isinstance(engine, str) or asking.is_sglang(engine, min(timeout, _LOOK), api_key):
        raise RequestError.make(
            "only vLLM's server gives digests of adapters", "give the URL of one with the plugin"
        )
    step, ranks = trained(trainer, run, timeout, client)
    body = {"run": str(run), "step": step}
    left = max(deadline - time.monotonic(), _SHORT)
    found = _ask(engine, "/nixl/served", body, left, api_key).get("adapters")
    if not (isinstance(found, dict) and found and all(map(_is_list, found.values()))):
        raise PeerError.make(f"{engine} tells of no adapter: {found!r:.200}", _SAME, address=engine)
    for name, answers in found.items():
        try:
            report = compared(step, ranks, answers, len(answers))
        except HostError as error:
            error.message = f"{name}: {error.message}"
            raise
    return report


def held_by(
    engine: Any, run: str | int, step: int, timeout: float, api_key: str | None = None
) -> tuple[list[dict[str, Any]], int]:
    """What the workers of *engine* that could be heard hold at *step*, and how many there are.

    run: that they were pointed at. Raises RequestError: it cannot be asked, a worker has refused.
    """
    publication = _publication(run)
    if asking.is_sglang(engine, timeout, api_key):
        answers = asking.ask(engine, publication, step, timeout, api_key)
        return answers, len(answers)
    fields = {"step": step, "publication": publication}
    return _answers(engine, _DIGESTS, fields, timeout, api_key)


def compared(step: int, ranks: Ranks, answers: list[dict[str, Any]], workers: int) -> Served:
    """Compares what :func:`trained` and :func:`held_by` have told. Raises as :func:`served`."""
    if workers != len(answers):
        raise RequestError.make(
            f"the engine has {workers} workers, and {len(answers)} have answered",
            "ask each replica alone, or all of them by vllm.LLM",
        )
    trained = _served.join(ranks)
    _refuse_unread(answers, {one.name: len(one.shape) for one in trained})
    held = [[_served.Held(n, tuple(o), tuple(e), d) for n, o, e, d in a["held"]] for a in answers]
    unused = {name for one in answers for name in one["unused"]}
    beyond = unused.union(name for one in answers for name in one["untold"])
    found, same = _served.compare([one for one in trained if one.name not in beyond], held)
    report = Served(
        step=step,
        workers=workers,
        ranks=len(ranks),
        tensors=same,
        boxes=sum(map(len, held)),
        different=(*map(str, found), *_by_worker(answers, "different")),
        unseen=_by_worker(answers, "unseen"),
        unused=tuple(sorted(unused)),
        kept=_by_worker(answers, "kept"),
    )
    if report.different:
        raise _differs(
            report,
            f"are not served as step {step} was trained: " + "; ".join(report.different[:4]),
            "do not serve this engine; publish the model that it serves, with equal replicas, "
            "and update again",
            report.different[0].partition(":")[0],
        )
    return report


def _refuse_unread(answers: list[dict[str, Any]], dims: dict[str, int]) -> None:
    """PeerError: what a worker has told has another form than a worker's digests. dims: of what is
    trained, by name."""
    for number, one in enumerate(answers):
        said = one if isinstance(one, dict) else {}
        lists = [said.get(name, ()) for name in ("different", "unseen", "kept")]
        lists += [said.get(name) for name in ("unused", "untold")]
        names = all(_is_list(told) and all(map(_is_text, told)) for told in lists)
        held: Any = said.get("held")
        if not (names and _is_list(held) and all(_is_held(box, dims) for box in held)):
            raise PeerError.make(f"the digests of worker {number} cannot be read", _SAME)


def _is_list(told: Any) -> bool:
    return isinstance(told, list | tuple)


def _is_text(told: Any) -> bool:
    return isinstance(told, str)


def _is_held(told: Any, dims: dict[str, int]) -> bool:
    """Whether it is a box as a worker tells it: name, offset, extent, digests."""
    if not (_is_list(told) and len(told) == 4 and _is_text(told[0])):
        return False
    name, *place, digests = told
    return (
        all(_is_list(at) and all(map(_is_count, at)) for at in place)
        and len(place[0]) == len(place[1]) == dims.get(name, len(place[0]))
        and isinstance(digests, dict)
        and all(_is_text(dtype) and _is_count(n) for dtype, n in digests.items())
    )


def _is_count(told: Any) -> bool:
    return isinstance(told, int) and not isinstance(told, bool) and told >= 0


def trained(
    trainer: Any, run: str | int, timeout: float, client: dict[str, Any], step: int | None = None
) -> tuple[int, Ranks]:
    """What the ranks have digested at *step*, None: last: the step, and of each what it holds.

    Waits for the step, and for digests that are on their way. client: as of :func:`served`, which
    says what is raised.
    """
    from fanin.client import Client

    publication = _publication(run)
    told = _served.publication_for(publication)
    deadline = time.monotonic() + timeout
    with Client(addresses_of(trainer), **client_arguments(trainer, client)) as reader:
        reader.wait(publication, step=step, timeout=timeout)
        _await(reader, publication, step, min(deadline, time.monotonic() + _PATIENCE))
        left = max(deadline - time.monotonic(), _SHORT)
        entries = reader.catalog(told, timeout=left, owners=False)
        room = {one.name: bytearray(one.bytes) for one in entries}
        reader.pull_into(told, room, step=step, timeout=left)
    read = [_served.read(bytes(room[f"rank{rank}"])) for rank in range(len(room))]
    return read[0][0], [(layouts, held) for _, layouts, held in read]


def _await(reader: Any, publication: str, step: int | None, deadline: float) -> None:
    """Until all ranks have digests of *step*. A rank begins their update before their step is
    readable. Raises NotFoundError if one has none, and none are on their way."""
    told = _served.publication_for(publication)
    while True:
        infos = reader.publications(timeout=max(deadline - time.monotonic(), _SHORT))
        there = {one.rank: one for one in infos if one.name == told}
        silent = set(range(len(reader.ranks()))) - {one.rank for one in infos}
        wanted = step if step is not None else max((o.step for o in there.values()), default=0)
        coming = silent | {rank for rank, one in there.items() if one.state in _ON_THEIR_WAY}
        ready = {r for r, one in there.items() if (one.state, one.step) == ("stable", wanted)}
        absent = {one.rank for one in infos} - coming - ready
        late = time.monotonic() >= deadline
        if absent or (coming and late):
            rank = min(absent or coming)
            what = publication if step is None else f"step {step} of {publication}"
            has = "published no" if absent else "not ended its"
            raise NotFoundError.make(
                f"rank {rank} has {has} digests of {what}",
                "publish(step, digests=True) of fanin.torch's server, on every rank",
                key=told,
                rank=rank,
            )
        if not coming:
            return
        time.sleep(_PAUSE)


def _by_worker(answers: list[dict[str, Any]], field: str) -> tuple[str, ...]:
    return tuple(f"worker {i}: {p}" for i, one in enumerate(answers) for p in one.get(field, ()))


def replicas(urls: list[str], *, timeout: float = 600.0) -> tuple[str, ...]:
    """Names of tensors that engines of one layout hold differently, by vLLM's ``/weight_checker``.

    Args:
        urls: two engines' servers or more.
        timeout: seconds for each answer.

    Returns:
        The names; empty: all engines hold the same.

    Raises:
        RequestError: fewer than two engines; one cannot be asked.
    """
    if len(urls) < 2:
        raise RequestError.make("one engine has nothing to be compared with", "give two or more")
    sums = [
        dict(_ask(url, "/weight_checker", {"action": "checksum"}, timeout)["checksums"])
        for url in urls
    ]
    names = {name for one in sums for name in one}
    return tuple(sorted(n for n in names if len({one.get(n) for one in sums}) > 1))


def _answers(
    engine: Any, method: str, fields: dict[str, Any], timeout: float, api_key: str | None = None
) -> tuple[list[dict[str, Any]], int]:
    """What the workers of *engine* answer that could be heard, and how many there are."""
    if isinstance(engine, str):
        body = {"method": method, "kwargs": fields}
        answers = _ask(engine, "/collective_rpc", body, timeout, api_key).get("results")
        workers = _workers(engine, timeout, api_key)
    else:
        _workers(engine, timeout)
        answers = engine.collective_rpc(method, kwargs=fields)
        workers = len(answers)
    if not isinstance(answers, list) or not all(
        isinstance(one, dict) and "different" in one for one in answers
    ):
        raise RequestError.make(f"the engine has answered {answers!r}", "start it with the plugin")
    return answers, workers


def _workers(engine: Any, timeout: float, api_key: str | None = None) -> int:
    """How many the server says that it has, 0: *engine* is in this process. Raises RequestError."""
    if isinstance(engine, str):
        told: Any = _ask(engine, "/get_world_size", None, timeout, api_key).get("world_size")
        if not _is_count(told):
            raise _unasked(engine, "/get_world_size", f"it says {told!r}")
        return int(told)
    if not hasattr(engine, "collective_rpc"):
        raise RequestError.make(
            f"{type(engine).__name__} is no engine", "give a vllm.LLM or the URL of a server"
        )
    return 0


def _ask(
    url: str, path: str, body: dict[str, Any] | None, timeout: float, api_key: str | None = None
) -> dict[str, Any]:
    method, base = "GET" if body is None else "POST", base_url(url)
    deadline = time.monotonic() + timeout
    try:
        reply = ask_json(
            method, base, path, body, deadline=deadline, api_key=api_key, limit=_MAX_ANSWER
        )
    except FAILURES as error:
        raise _unasked(url, path, str(error) or type(error).__name__) from error
    found = reply.json()
    if reply.status != 200 or not isinstance(found, dict):
        remedy = str(reply.error().get("remedy") or _START)  # of fanin's own routes
        raise _unasked(url, path, f"status {reply.status}: {reply.reason}", remedy)
    return found


def _unasked(url: str, path: str, why: str, remedy: str = _START) -> RequestError:
    return RequestError.make(f"{url}{path}: {why}", remedy, address=url[:63])


# ---------------------------------------------------------------------------------- as a command


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
        report = served(
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


def _tell(report: Served, as_json: bool) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
