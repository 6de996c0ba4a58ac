# SPDX-License-Identifier: Apache-2.0
"""What vLLM's routes for weights take with the backend ``fanin``: fields, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from fanin._allowed import check_by_config
from fanin.engine.clients import Source
from fanin.engine.updates import DEFAULT_TIMEOUT, check_step, check_timeout, full_run
from fanin.errors import RequestError
from fanin.mapping._kept import check_patterns
from fanin.vllm import external_kv

__all__ = ["Init", "InitInfo", "UpdateInfo"]

_MODES = ("auto", "loader")
_CONFIGS = ("check", "ignore")


@dataclass(frozen=True)
class Init:
    """What an init has said, checked."""

    source: Source
    run: str
    timeout: float
    draft_run: str | None
    mode: str
    unused: tuple[str, ...]
    keep: tuple[str, ...]
    config: str
    external_kv: str
    verify: bool
    ring: int
    save: str | None


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What ``/init_weight_transfer_engine`` takes.

    Args:
        trainer: the path of a nixl_info.json or of its directory, or the ranks' addresses.
        run: the trainer's run.
        timeout: seconds for a whole update.
        draft_run: the run that fills a draft model.
        mode: "auto", or "loader" for vLLM's own `load_weights` with any model.
        unused: patterns of published names that the model does not have.
        keep: patterns of the model's own parameters that no rank publishes. They stay as vLLM has
            loaded them (``visual.*``).
        config: "check" that the trainer's configuration is the engine's, or "ignore".
        external_kv: "drop" what a connector has kept outside of the engine, and refuse a connector
            that cannot; or "keep".
        verify: compare each step with digests that the ranks make.
        ring: layers of skeletons, at least 1.
        save: a directory that each worker writes its mapping to, for `nixl-fetch map`.
    """

    trainer: Any
    run: Any = "0"
    timeout: Any = DEFAULT_TIMEOUT
    draft_run: Any = None
    mode: Any = "auto"
    unused: Any = ()
    keep: Any = ()
    config: Any = "check"
    external_kv: Any = "drop"
    verify: Any = False
    ring: Any = 2
    save: Any = None

    def checked(self) -> Init:
        """Raises RequestError, naming the field."""
        whole = type(self.ring) is int and 1 <= self.ring <= 64
        for name, good, remedy in (
            ("mode", self.mode in _MODES, f"give one of {_MODES}"),
            ("config", self.config in _CONFIGS, f"give one of {_CONFIGS}"),
            (
                "external_kv",
                self.external_kv in external_kv.CHOICES,
                f"give one of {external_kv.CHOICES}",
            ),
            ("verify", isinstance(self.verify, bool), "give true or false"),
            ("ring", whole, "give 1 to 64, or leave it out"),
            ("save", self.save is None or isinstance(self.save, str), "give a directory"),
        ):
            if not good:
                said = f"init_info's {name} is {getattr(self, name)!r}"
                raise RequestError.make(said, remedy, key=name)
        source = Source.of(self.trainer)
        check_by_config(source.text, source.path, source.addresses)
        return Init(
            source=source,
            run=full_run(self.run),
            timeout=check_timeout(self.timeout),
            draft_run=None if self.draft_run is None else full_run(self.draft_run),
            mode=self.mode,
            unused=check_patterns("init_info's unused", self.unused, key="unused"),
            keep=check_patterns("init_info's keep", self.keep, key="keep"),
            config=self.config,
            external_kv=self.external_kv,
            verify=self.verify,
            ring=self.ring,
            save=self.save,
        )


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What ``/update_weights`` takes.

    Args:
        step: this very step of the trainer.
        prefetch: only read the step, beside the model, and return at once. Another update of that
            step, under pause, installs it.
        keep_caches: leave what was computed with the old weights (prefixes, encoders' outputs).
            Answers may then use it.
    """

    step: Any
    prefetch: Any = False
    keep_caches: Any = False

    def checked(self) -> int:
        """The step. Raises RequestError, naming the field."""
        for name in ("prefetch", "keep_caches"):
            said = getattr(self, name)
            if not isinstance(said, bool):
                raise RequestError.make(
                    f"update_info's {name} is {said!r}", "give true or false", key=name
                )
        return check_step(self.step)
