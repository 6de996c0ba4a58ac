# SPDX-License-Identifier: Apache-2.0
"""Names of adapters: ``<prefix>-run<run>-step<step>``.

An engine that is asked for such a name knows which run and which step is meant without asking
anybody. A step's weights get a name of their own and keep it for ever, so caches that are keyed
by the name (an engine's prefix cache, the list of resolved adapters) never hold another step's
contents.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fanin.errors import RequestError

__all__ = ["MAX_STEP", "AdapterName", "check_run", "check_step", "parse", "run_of"]

MAX_STEP = 2**64 - 1
"""The largest step that a trainer can commit; the smallest is 0."""

_MAX_PREFIX = 256
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PREFIX = re.compile(r"[^\x00-\x20\x7f]+")
# The prefix is greedy: of several "-run" the last one with which the rest fits counts.
_NAME = re.compile(
    r"(?P<prefix>[^\x00-\x20\x7f]+)"
    r"-run(?P<run>[A-Za-z0-9._-]{1,64})"
    r"-step(?P<step>0|[1-9][0-9]{0,19})",
    re.ASCII,
)


def check_run(run: str | int) -> str:
    """The run as text: 1 to 64 of ``A-Z a-z 0-9 . _ -``, but not ``.`` or ``..``.

    Does not block; any thread. Raises RequestError for anything else.
    """
    text = str(run) if isinstance(run, int) and not isinstance(run, bool) else run
    if not isinstance(text, str) or text in (".", "..") or not _RUN.fullmatch(text):
        raise RequestError.make(
            f"run {run!r} is not 1 to 64 of A-Z a-z 0-9 . _ -",
            "give the trainer's run number or a short plain name",
        )
    return text


def run_of(run: str | int) -> str:
    """The run without the publication's ``lora:``: ``"lora:3"``, ``"3"`` and ``3`` give ``"3"``.

    Does not block; any thread. Raises RequestError if it is no run.
    """
    return check_run(run[5:] if isinstance(run, str) and run.startswith("lora:") else run)


def check_step(step: int) -> int:
    """The step, if it is an integer from 0 to 2**64 - 1; RequestError otherwise."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise RequestError.make(
            f"step {step!r} is not an integer from 0 to {MAX_STEP}", "count optimizer steps"
        )
    return step


@dataclass(frozen=True, slots=True)
class AdapterName:
    """The name of one step of one run's adapter; ``str()`` gives its text. Immutable.

    Every name that can be made means one thing. Run ``"1-run2"`` under prefix ``"a"`` is refused,
    for its text is also that of run ``"2"`` under ``"a-run1"``.

    Args:
        prefix: what comes before ``-run``: 1 to 256 characters, no blanks or control characters (of
            the job, the policy, the base model; may itself contain ``-run``).
        run: 1 to 64 of ``A-Z a-z 0-9 . _ -``; a number is converted.
        step: 0 to 2**64 - 1.

    Raises:
        RequestError: a part is malformed, or the text would be read back as another prefix or run.
    """

    prefix: str
    run: str
    step: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", check_run(self.run))
        check_step(self.step)
        if (
            not isinstance(self.prefix, str)
            or len(self.prefix) > _MAX_PREFIX
            or not _PREFIX.fullmatch(self.prefix)
        ):
            raise RequestError.make(
                f"adapter prefix {self.prefix!r} is not 1 to {_MAX_PREFIX} characters without"
                " blanks",
                "name the policy or the job in one short word",
            )
        if _split(str(self)) != (self.prefix, self.run, self.step):
            raise RequestError.make(
                f"adapter name {str(self)!r} could not be told from that of another run",
                f"do not use '-run' or '-step' inside of the run's name {self.run!r}",
            )

    def __str__(self) -> str:
        return f"{self.prefix}-run{self.run}-step{self.step}"

    def at(self, step: int) -> AdapterName:
        """The same adapter's name at another step. Raises as the constructor."""
        return AdapterName(self.prefix, self.run, step)


def _split(name: str) -> tuple[str, str, int] | None:
    match = _NAME.fullmatch(name)
    if match is None or match["run"] in (".", ".."):
        return None
    return match["prefix"], match["run"], int(match["step"])


def parse(name: str) -> AdapterName | None:
    """Reads ``<prefix>-run<run>-step<step>``; None if *name* is not of that form.

    A step with leading zeros or above 2**64 - 1 is not of the form: each step has one
    name. The prefix is as long as can be. ``parse(str(name)) == name`` for every AdapterName.
    Does not block, raises nothing; any thread.
    """
    parts = _split(name)
    if parts is None or parts[2] > MAX_STEP or len(parts[0]) > _MAX_PREFIX:
        return None
    return AdapterName(*parts)
