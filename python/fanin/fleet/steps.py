# SPDX-License-Identifier: Apache-2.0
"""Which step all ranks of a trainer have, and which of its runs is as a sync wants it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeVar

from fanin._options import handed_on
from fanin._quantization import LISTS, is_fit
from fanin._records import PublicationInfo
from fanin._served import tells_digests
from fanin.client import Client
from fanin.engine.clients import incarnations_of, is_outlived
from fanin.engine.trainers import Published
from fanin.errors import (
    CancelledError,
    FaninError,
    NotFoundError,
    PausedError,
    PullTimeoutError,
    RequestError,
    StaleError,
    SupersededError,
    UnreachableError,
    first_of,
)
from fanin.info import Target, addresses_of, client_arguments
from fanin.mapping._checks import read_quantization
from fanin.names import check_run

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25
_CONNECT = 5.0
# Seconds for which a rank that nobody listens for may be one that is just being started.
_DEAD = 2.0

_Found = TypeVar("_Found")


class Committed(NamedTuple):
    """A step that all ranks have."""

    step: int
    world: str  # 32 hex digits
    incarnations: dict[str, str]  # of the ranks
    outlived: Sequence[Mapping[str, str]] = ()  # of before, whose step may have had other bytes


def newest_step(
    trainer: Target,
    run: str | int,
    *,
    beyond: int | None = None,
    timeout: float = 5.0,
    server_name: str | None = None,
    world_id: str | None = None,
    stop: threading.Event | None = None,
    **client: Any,
) -> int:
    """The newest step of *run*'s adapter that every rank of *trainer* has committed.

    Blocks at most *timeout*; any thread.

    Args:
        beyond: wait for one above this.
        timeout: seconds.
        world_id: 32 hex digits; None: any.
        stop: once it is set, the wait ends.
        client: as :func:`fanin.sync.wait_for_step`.

    Raises:
        PullTimeoutError: says how far the ranks are.
        FaninError: else as :func:`fanin.sync.wait_for_step`.
        TypeError: names an argument that fanin.Client does not take.
    """
    publication = "lora:" + check_run(run)
    more = {"world_id": world_id, **handed_on("newest_step", Client, client)}

    def judge(asked: Any, size: int, timeout: float) -> int | FaninError:
        steps = _steps(_infos(asked, publication, timeout))
        newest = min(steps.values(), default=0)
        if len(steps) == size and (beyond is None or newest > beyond):
            return newest
        wanted = "" if beyond is None else f" above {beyond}"
        told = f"{len(steps)} of {size} ranks publish it, the last at {newest}"
        return PullTimeoutError.make(
            f"no step{wanted} of {publication} on all ranks in time: {told}",
            "check that all ranks of the trainer run and commit",
            key=publication,
        )

    return _ask(trainer, publication, judge, timeout, server_name, stop, more)


def wait_for_step(
    trainer: Target,
    run: str,
    step: int | None,
    *,
    timeout: float,
    server_name: str | None = None,
    stop: threading.Event | None = None,
    **client: Any,
) -> tuple[int, str]:
    """Waits until every rank of *trainer* has committed *step* of ``full:<run>``.

    Blocks at most *timeout* and a little; any thread. The call waits for a rank that is behind, or
    that says nothing. The call does not wait for a rank that is gone.

    Args:
        trainer: as :func:`fanin.info.addresses_of` takes it.
        run: of ``full:<run>``.
        step: None: the newest that all ranks have.
        timeout: seconds.
        server_name: demand this job's ranks of the trainer.
        stop: once it is set, the wait ends with CancelledError.
        client: what else :class:`fanin.Client` takes, such as ``secret_file``, ``tls_cert``,
            ``tls_key``, ``tls_ca``. Without a secret or certificate: the secret that *trainer*'s
            nixl_info.json names.

    Returns:
        The step and the world id, 32 hex digits.

    Raises:
        UnreachableError: a rank, which it names, has refused connections for two seconds.
        StaleError: the trainer was started again meanwhile.
        SupersededError: a rank is past the step.
        PausedError: a rank is paused when the time ends.
        PullTimeoutError: it says how far the ranks are.
        NotFoundError: no rank publishes the run.
        CancelledError: *stop* is set.
        TypeError: an argument that :class:`fanin.Client` does not take.
        FaninError: what :meth:`fanin.Client.connect` raises that does not pass by itself.
    """
    more = handed_on("wait_for_step", Client, client)
    return committed(trainer, run, step, timeout, server_name, stop, more)[:2]


def committed(
    trainer: Target,
    run: str,
    step: int | None,
    timeout: float,
    server_name: str | None,
    stop: threading.Event | None,
    more: dict[str, Any],
    before: Sequence[Mapping[str, str]] = (),
) -> Committed:
    """As :func:`wait_for_step`, and of which processes the step is. before: incarnations of ranks
    from which it was read already."""
    publication = "full:" + check_run(run)

    def judge(asked: Any, size: int, timeout: float) -> Committed | FaninError:
        found = look(asked, publication, size, step, timeout)
        if isinstance(found, FaninError):
            return found
        end = time.monotonic() + timeout
        outlived = [one for one in before if is_outlived(asked, publication, one, end)]
        return found._replace(outlived=outlived)

    return _ask(trainer, publication, judge, timeout, server_name, stop, more)


def run_of(
    trainer: Target,
    run: str,
    wanted: Wanted,
    *,
    without: Container[str] = (),
    timeout: float,
    server_name: str | None = None,
    **client: Any,
) -> Run:
    """The run that *trainer* quantizes as *wanted*, of the model of *run*.

    Args and Raises as :func:`wait_for_step` and :func:`look_for`; what has no step is waited for.
    """
    publication = "full:" + check_run(run)

    def judge(asked: Any, size: int, timeout: float) -> Run | FaninError:
        return look_for(asked, run, wanted, without, timeout)

    more = handed_on("run_of", Client, client)
    return _ask(trainer, publication, judge, timeout, server_name, None, more)


def _ask(
    trainer: Target,
    publication: str,
    judge: Callable[[Any, int, float], _Found | FaninError],
    timeout: float,
    server_name: str | None,
    stop: threading.Event | None,
    more: dict[str, Any],
) -> _Found:
    """What *judge* makes of the ranks, as soon as that is no error that may pass by itself."""
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    last: FaninError | None = None
    roll = _Roll()
    with Client(server_name=server_name, **client_arguments(trainer, more)) as asked:
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                size = roll.call(asked, trainer, min(remaining, _CONNECT))
                found = judge(asked, size, min(remaining, _CONNECT))
                if not isinstance(found, FaninError):
                    return found
            except FaninError as error:
                if not error.retryable or isinstance(error, StaleError):
                    raise
                found = error
                roll.forget(asked)
            # A round that the deadline cut short knows less than the one before.
            if last is None or time.monotonic() < deadline:
                last = found
            roll.refuse_the_dead()
            _pause(min(pause, max(deadline - time.monotonic(), 0)), stop)
            pause = min(pause * 2, _LONGEST_PAUSE)
    raise last or PullTimeoutError.make(
        f"no time was left to ask the trainer for {publication}",
        "give a longer timeout",
        key=publication,
    )


class _Roll:
    """Which ranks are there, and since when others are not."""

    def __init__(self) -> None:
        self._connected: list[str] | None = None
        self._world = ""
        self._gone: dict[str, tuple[float, UnreachableError]] = {}

    def call(self, client: Any, trainer: Target, timeout: float) -> int:
        """Connects if some rank is not there; how many ranks the trainer has."""
        if self._connected is None or not all(rank.connected for rank in client.ranks()):
            addresses = addresses_of(trainer)
            try:
                client.connect(addresses, timeout=timeout)
            except UnreachableError as error:
                self._note([(error.address or addresses[0], error)])
                raise
            self._connected = list(addresses)
            self._look_around(client.ranks())
        return len(self._connected)

    def _look_around(self, ranks: Any) -> None:
        world = next((rank.world_id for rank in ranks if rank.connected), "")
        if self._world and world and world != self._world:
            raise StaleError.make(
                "the trainer was started again while its step was waited for",
                "sync a step of the new launch",
            )
        self._world = world or self._world
        numbers = {rank.rank for rank in ranks if rank.rank is not None}
        lost = [rank for rank in ranks if not rank.connected and not rank.silent]
        unknown = sorted(set(range(len(ranks))) - numbers)
        found = []
        for rank in lost:
            number = rank.rank
            if number is None and len(unknown) == 1:
                number = unknown[0]
            found.append((rank.address, _dead(number, rank.address, rank.message)))
        self._note(found)

    def _note(self, lost: list[tuple[str, UnreachableError]]) -> None:
        now = time.monotonic()
        before = self._gone
        self._gone = {at: (before.get(at, (now, error))[0], error) for at, error in lost}

    def refuse_the_dead(self) -> None:
        """Raises UnreachableError naming a rank that has been gone for too long."""
        for since, error in self._gone.values():
            if time.monotonic() - since > _DEAD:
                raise error

    def forget(self, client: Any) -> None:
        """All connections are made anew."""
        self._connected = None
        client.disconnect()


def _dead(rank: int | None, address: str, why: str) -> UnreachableError:
    who = "a rank" if rank is None else f"rank {rank}"
    return UnreachableError.make(
        f"{who} of the trainer is gone: {why or address + ' is not connected'}",
        "no rank may end before the last sync; start the trainer again, or leave the engines as"
        " they are",
        rank=rank,
        address=address,
    )


def _pause(seconds: float, stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise CancelledError.make("the update was cancelled")


def _infos(client: Any, publication: str, timeout: float) -> Sequence[PublicationInfo]:
    return [one for one in client.publications(timeout=timeout) if one.name == publication]


def _steps(infos: Sequence[PublicationInfo]) -> dict[int, int]:
    """By rank, of those that have committed."""
    return {info.rank: info.step for info in infos if info.state != "unpublished"}


def look(
    client: Any, publication: str, size: int, step: int | None, timeout: float
) -> Committed | FaninError:
    """The step if all ranks have it, else why not."""
    infos = _infos(client, publication, timeout)
    if not infos:
        return NotFoundError.make(
            f"no rank of the trainer that answers publishes {publication}",
            "check the run, and that WeightServer has been made on every rank",
            key=publication,
        )
    steps = _steps(infos)
    past = [rank for rank, known in steps.items() if step is not None and known > step]
    if past:
        raise SupersededError.make(
            f"step {step} of {publication} has passed: rank {past[0]} is at {steps[past[0]]}",
            "sync the newest step",
            key=publication,
            rank=past[0],
        )
    paused = [info.rank for info in infos if info.state == "paused"]
    if paused:
        return PausedError.make(
            f"rank {paused[0]} has paused {publication}",
            "let the trainer resume it, then sync again",
            key=publication,
            rank=paused[0],
        )
    wanted = max(steps.values(), default=0) if step is None else step
    behind = [rank for rank, known in steps.items() if known < wanted]
    if len(steps) == size and not behind:
        world = next((one.world_id for one in client.ranks() if one.connected), "")
        return Committed(wanted, world, incarnations_of(client))
    told = f"{len(steps)} of {size} ranks publish it"
    if behind:
        told += f", and rank {behind[0]} is at {steps[behind[0]]}"
    return PullTimeoutError.make(
        f"step {wanted} of {publication} is not on all ranks in time: {told}",
        "check that all ranks of the trainer run and commit",
        key=publication,
        rank=behind[0] if behind else None,
    )


# ------------------------------------------------------------------------------------- quantization
# Which of a trainer's runs is quantized as a sync wants it: the trainer quantizes, not the sync. A
# WeightServer publishes a model in several ways as several runs: ``full:0``, ``full:0-fp8``. Each
# run's metadata has its ``quantization_config``, whose keys are Hugging Face's.


_PLAIN = ("bf16", "bfloat16", "none")
# What WeightServer quantizes to.
_MADE = ("fp8", "compressed-tensors")
# What a quantization_config has if it leaves them out.
_LEFT_OUT = {"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "float"}
_TAKEN = 'null, "bf16", "fp8", or a quantization_config of Hugging Face'


@dataclass(frozen=True)
class Wanted:
    """How a sync wants the weights to be quantized.

    Args:
        keys: of a quantization_config; None: not at all.
        skip: patterns of modules that are not to be.
    """

    keys: Mapping[str, Any] | None
    skip: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.keys is None:
            return "bf16"
        return "fp8" if self.keys == {"quant_method": "fp8"} else json.dumps(dict(self.keys))


@dataclass(frozen=True)
class Run:
    """A run, and the quantization_config by which the trainer quantizes it; None: it does not."""

    name: str
    quantization: Mapping[str, Any] | None


def wanted_of(quantization: Any, skip: Any = None, known: Wanted | None = None) -> Wanted | None:
    """What callers mean, None: they say nothing.

    Args:
        quantization: null, "bf16", "fp8", a quantization_config, or an object with
            ``quantization`` and ``skip_modules``.
        skip: patterns of modules.
        known: what was said before, for *skip* alone.

    Raises RequestError for what is none of these.
    """
    if isinstance(quantization, dict) and "quantization" in quantization:
        if quantization.keys() - {"quantization", "skip_modules"}:
            raise _unknown(quantization)
        skip = quantization.get("skip_modules") if skip is None else skip
        quantization = quantization["quantization"]
    skip = _patterns(skip)
    keys: dict[str, Any] | None
    if quantization is None:
        if known is not None:
            return Wanted(known.keys, skip) if skip else known
        if not skip:
            return None
        raise RequestError.make(
            "skip_modules is given, and no quantization",
            'give quantization "fp8"',
            key="skip_modules",
        )
    if isinstance(quantization, str):
        keys = {"quant_method": quantization}
    elif isinstance(quantization, dict) and isinstance(quantization.get("quant_method"), str):
        keys = {name: value for name, value in quantization.items() if name not in LISTS}
        skip += tuple(one for name in LISTS for one in _patterns(quantization.get(name)))
    else:
        raise _unknown(quantization)
    method = keys["quant_method"].lower().replace("_", "-")
    return Wanted(None if method in _PLAIN else keys | {"quant_method": method}, skip)


def _unknown(quantization: Any) -> RequestError:
    return RequestError.make(
        f"quantization {quantization!r} is unknown", f"give {_TAKEN}", key="quantization"
    )


def _patterns(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, list | tuple) and all(isinstance(one, str) and one for one in given):
        return tuple(given)
    raise RequestError.make(
        f"skip_modules {given!r} is no list of texts", "give a list", key="skip_modules"
    )


def look_for(
    client: Any, run: str, wanted: Wanted, without: Container[str], timeout: float
) -> Run | FaninError:
    """The run of the model of *run* that is quantized as *wanted*, or why there is none yet.

    They are named as *run*, or one name begins with the other and a dash. without: names of other
    models. Raises RequestError if no run will do.
    """
    infos = [one for one in client.publications(timeout=timeout) if _is_of(one.name, run)]
    taken = {one.name.removeprefix("full:") for one in infos}
    infos = [one for one in infos if one.name.removeprefix("full:") not in without]
    ready = {one.name for one in infos if one.state != "unpublished"}
    late = sorted({one.name for one in infos} - ready)
    if not infos:
        return NotFoundError.make(
            f"no rank of the trainer that answers publishes full:{run}",
            "check the run, and that WeightServer has been made on every rank",
            key=f"full:{run}",
        )
    found = {}
    for name in sorted(ready):
        entries = tuple(client.catalog(name, timeout=timeout, owners=False))
        metadata = client.metadata(name, timeout)
        found[name.removeprefix("full:")] = Published(entries, metadata, "", "")
    try:
        return chosen(found, wanted, run, taken)
    except RequestError as error:
        if not late:
            raise
        told = f"{error.message}; {', '.join(late)} has no step yet"
        return PullTimeoutError.make(told, "publish a first step", key=late[0])


def _is_of(name: str, run: str) -> bool:
    kind, _, other = name.partition(":")
    near = other == run or other.startswith(run + "-") or run.startswith(other + "-")
    return kind == "full" and near and not tells_digests(other)


def chosen(
    published: Mapping[str, Published], wanted: Wanted, own: str, taken: Container[str]
) -> Run:
    """The run that is quantized as *wanted*; *own*, if it is among several.

    Raises RequestError that says what is published, and how to publish what is wanted under a name
    that is not *taken*.
    """
    runs = [Run(name, read_quantization(one.quantization)) for name, one in published.items()]
    fit = [one for one in runs if _fits(wanted.keys, one.quantization)]
    why = [f"full:{one.name} is {_told(one.quantization)}" for one in runs]
    if fit and wanted.keys is not None:
        torn = {one.name: _quantized(published[one.name], wanted.skip) for one in fit}
        fit = [one for one in fit if not torn[one.name]]
        why += [f"full:{name} quantizes {first_of(all_)}" for name, all_ in torn.items() if all_]
    if len(fit) == 1:
        return fit[0]
    for one in fit:
        if one.name == own:
            return one
    if fit:
        names = ", ".join(f"full:{one.name}" for one in fit)
        raise RequestError.make(
            f"quantization {wanted} fits several runs: {names}",
            "give more keys of the quantization_config, such as weight_block_size",
            key="quantization",
        )
    raise RequestError.make(
        f"no run of the trainer is published as {wanted}: {'; '.join(why)}",
        _how_to_publish(wanted, own, taken),
        key="quantization",
    )


def _fits(keys: Mapping[str, Any] | None, told: Mapping[str, Any] | None) -> bool:
    if keys is None or told is None:
        return keys is told
    return all(
        told.get(name, _LEFT_OUT.get(name)) == value
        for name, value in keys.items()
        if value is not None
    )


def _told(quantization: Mapping[str, Any] | None) -> str:
    if quantization is None:
        return "not quantized"
    return json.dumps({k: v for k, v in quantization.items() if k not in LISTS})


def _quantized(published: Published, skip: Sequence[str]) -> list[str]:
    """Modules that are to be left out, and are published in fp8."""
    names = (entry.name for entry in published.entries if entry.dtype.startswith("F8_"))
    modules = [name.removesuffix(".weight") for name in names]
    return [one for one in modules if any(is_fit(entry, one) for entry in skip)]


def _how_to_publish(wanted: Wanted, run: str, taken: Container[str]) -> str:
    method = "bf16" if wanted.keys is None else wanted.keys["quant_method"]
    if method not in ("bf16", *_MADE):
        return "ask for what is published; WeightServer makes " + " and ".join(_MADE)
    name = f"{run}-{'bf16' if wanted.keys is None else 'fp8'}"
    free = next(one for n in count(2) for one in (name, f"{name}-{n}") if one not in taken)
    how = ""
    if wanted.keys is not None:
        how = ", quantize=" + ('"fp8"' if str(wanted) == "fp8" else repr(dict(wanted.keys)))
        how += f", skip_modules={list(wanted.skip)!r}" if wanted.skip else ""
    return f'publish one: server.add_run("{free}", model{how})'
