# SPDX-License-Identifier: Apache-2.0
"""The trainer is asked before any engine is paused: do all its ranks have the step?"""

from __future__ import annotations

import threading
import time

from fanin.errors import (
    CancelledError,
    FaninError,
    NotFoundError,
    PausedError,
    PullTimeoutError,
    SupersededError,
)
from fanin.info import Target, addresses_of
from fanin.names import check_run

__all__ = ["look", "wait_for_step"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25


def wait_for_step(
    trainer: Target,
    run: str,
    step: int | None,
    *,
    timeout: float,
    server_name: str | None = None,
    stop: threading.Event | None = None,
) -> tuple[int, str]:
    """Waits until every rank of *trainer* has committed *step* of ``full:<run>``.

    step: None: the newest that all of them have. Returns that step and the world id, 32 hex digits.
    timeout: seconds. stop: once it is set, the wait ends with CancelledError. Blocks at most
    *timeout* and a little; any thread.

    Raises SupersededError if a rank is past the step, PausedError if one is paused when the time
    ends, PullTimeoutError saying how far the ranks are, NotFoundError if none publishes the run,
    and what fanin.Client.connect raises that does not pass by itself.
    """
    from fanin.client import Client

    publication = "full:" + check_run(run)
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    last: FaninError | None = None
    with Client(server_name=server_name) as client:
        connected = False
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                if not connected:
                    addresses = addresses_of(trainer)
                    client.connect(addresses, timeout=remaining)
                    connected = True
                found = look(client, publication, len(addresses), step, remaining)
                if isinstance(found, tuple):
                    return found
                last = found
            except SupersededError:
                raise
            except FaninError as error:
                if not error.retryable:
                    raise
                last, connected = error, False
                client.disconnect()
            _pause(min(pause, max(deadline - time.monotonic(), 0)), stop)
            pause = min(pause * 2, _LONGEST_PAUSE)
    if last is None:
        last = PullTimeoutError.make(
            f"no time was left to ask the trainer for {publication}",
            "give the sync a longer timeout",
            key=publication,
        )
    raise last


def _pause(seconds: float, stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise CancelledError.make("the sync was cancelled")


def look(
    client: object, publication: str, size: int, step: int | None, timeout: float
) -> tuple[int, str] | FaninError:
    """The step and the world if all ranks have it, else why not."""
    infos = [
        info
        for info in client.publications(timeout=timeout)  # type: ignore[attr-defined]
        if info.name == publication
    ]
    if not infos:
        return NotFoundError.make(
            f"no rank of the trainer that answers publishes {publication}",
            "check the run, and that WeightServer has been made on every rank",
            key=publication,
        )
    steps = {info.rank: info.step for info in infos if info.state != "unpublished"}
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
        world = next(
            (r.world_id for r in client.ranks() if r.connected),  # type: ignore[attr-defined]
            "",
        )
        return wanted, world
    told = f"{len(steps)} of {size} ranks publish it"
    if behind:
        told += f", and rank {behind[0]} is at {steps[behind[0]]}"
    return PullTimeoutError.make(
        f"step {wanted} of {publication} is not on all ranks in time: {told}",
        "check that all ranks of the trainer run and commit",
        key=publication,
        rank=behind[0] if behind else None,
    )
