# SPDX-License-Identifier: Apache-2.0
"""Configuration of trainer, orchestrator and inference, from TOML files and the environment.

The files are those of the RL trainer; this module reads their section ``[weight_broadcast]``
(and ``[model.lora]``) and leaves the others alone::

    # trainer.toml                      # orchestrator.toml           # inference.toml
    [weight_broadcast]                  [weight_broadcast]            [weight_broadcast]
    type = "nixl"                       type = "nixl"                 type = "nixl"
    port = 6000                         timeout = 60.0                trainer = "/shared/run"
    server_name = "lora_param_server"   engines = ["http://h:8000"]   keep = 2

    [model.lora]                        [model.lora]
    rank = 16                           name = "policy"
                                        alpha = 32.0

All three may name a launch's secret (``secret_file``), or a certificate (``tls_cert``, ``tls_key``,
``tls_ca``). A variable of the environment overrides the file's key. A key that is unknown, a value
of the wrong kind and settings that contradict each other are a ConfigError that says where it is
written and what to write instead.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from fanin import _allowed
from fanin._options import (
    LANDINGS,
    MOST_BYTES,
    PATHS,
    SECTION,
    VARIABLES,
    Configured,
    Credentials,
    Option,
    Publishing,
    choice,
    directory,
    engines,
    half,
    number,
    option,
    options_of,
    place,
    prefix,
    relay,
    seconds,
    switch,
    text_of,
    trainer,
    whole,
)
from fanin.errors import RequestError
from fanin.info import is_loopback, is_numeric, is_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "ConfigError",
    "InferenceConfig",
    "OrchestratorConfig",
    "TrainerConfig",
    "default_cache_dir",
    "engine_credentials",
    "inference_config",
    "inference_setting",
    "orchestrator_config",
    "trainer_config",
    "validate_together",
]

_OTHER_VARIABLES = frozenset(
    (
        *("FANIN_CONFIG", "FANIN_LIBRARY", "FANIN_UCX_LIBRARY", "FANIN_CUDA_LIBRARY"),
        *("FANIN_TRUST_CONTAINERS", "FANIN_TRUST_OTHER_USERS", "FANIN_INSECURE"),
    )
)
_LORA = "model.lora"

_log = logging.getLogger("fanin.config")
_Config = TypeVar("_Config")


class ConfigError(RequestError, ValueError):
    """A configuration that cannot work; the message names the file or variable, then the key."""


def default_cache_dir() -> Path:
    """``/dev/shm/fanin-<uid>``: memory of this host that no other user can plant files in."""
    return Path(f"/dev/shm/fanin-{os.getuid()}")


# ----------------------------------------------------------------- the parts


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Configured, Publishing):
    """What a trainer rank is started with; see fanin.torch.WeightServer. Immutable.

    Args:
        port: Rank r listens on port + r. 0: any free port.
        server_name: The name of the job, which engines may demand.
        lora_name: Prefix of the adapters' names.
        lora_alpha: PEFT's alpha.
        credentials: What readers over a network are asked for.
    """

    port: int = option(6000, whole(0, 65535), "FANIN_PORT")
    server_name: str = option("lora_param_server", text_of, "FANIN_SERVER_NAME")
    lora_name: str | None = option(None, prefix, where=f"{_LORA}.name")
    lora_alpha: float | None = option(None, number(1e-9, 1e9), where=f"{_LORA}.alpha")
    credentials: Credentials = Credentials()

    def server_arguments(self) -> dict[str, Any]:
        """Keyword arguments of fanin.torch.AdapterServer and WeightServer that say the same."""
        same = {**options_of(Configured), **options_of(Publishing)}
        return {
            "base_port": self.port,
            "name": self.server_name,
            **{name: getattr(self, name) for name in same},
            **self.credentials.arguments(),
        }


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """What the orchestrator posts updates with; see fanin.pool.EnginePool. Immutable.

    Args:
        lora_name: Prefix of the adapters' names. Required.
        engines: The engines' URLs, with commas or as a list. None: the orchestrator has its own.
        timeout: Seconds for one update of all engines.
        server_name: The name of the job. Default: any.
        lora_alpha: PEFT's alpha, which must be the trainer's. Default: not checked.
        credentials: What the trainer is asked with; EnginePool takes its ``arguments()``.
    """

    lora_name: str = option(where=f"{_LORA}.name", convert=prefix, variable="FANIN_LORA_NAME")
    engines: tuple[str, ...] = option((), engines, "FANIN_ENGINES")
    timeout: float = option(60.0, seconds(0.001, 86400), "FANIN_UPDATE_TIMEOUT")
    server_name: str | None = option(None, text_of, "FANIN_SERVER_NAME")
    lora_alpha: float | None = option(
        None, number(1e-9, 1e9), "FANIN_LORA_ALPHA", where=f"{_LORA}.alpha"
    )
    credentials: Credentials = Credentials()


@dataclass(frozen=True, slots=True)
class InferenceConfig:
    """What an engine pulls with. Immutable.

    Args:
        trainer: host:port of every rank, or the path of a nixl_info.json, which each pull reads.
            Default: the requests say it.
        server_name: Read only ranks of this name. Default: any.
        cache_dir: Absolute folder for adapters. Default: /dev/shm/fanin-UID, of mode 0700.
        timeout: Seconds for a pull.
        keep: Adapters of a run that stay.
        path: How bytes travel: auto, or a path that is demanded.
        prefix: Resolve only names with this prefix. Default: any.
        dtype: What F32 tensors arrive as. Default: as published.
        max_bytes: Refuse larger adapters. Default: a quarter of the folder's file system.
        trust_config: adapter_config.json keeps every field of the trainer, also those that load
            code.
        allow_trainers: Trainers that a request without the engine's API key may name: networks,
            hosts, host:port, paths, or any.
        newest: A request to load an adapter without a step gets the newest.
        landing: auto, slot: into the slots of vLLM where they can be filled. directory.
        spare_file: Make the next file of a directory beforehand, where memory allows.
        require_step: An engine of whole models answers nothing before its first update (HTTP 503).
        relay: Share whole models with other engines: host, with those of this host; or networks,
            with those there. Default: no.
        place: Where the engine is, for relays: site, or site/rack. Engines of different sites hand
            nothing on to each other. Default: the site of all that say none.
        credentials: What trainers over a network are shown. Default: the secret that the trainer's
            nixl_info.json names.
    """

    trainer: str | None = option(None, trainer, "FANIN_TRAINER")
    server_name: str | None = option(None, text_of, "FANIN_SERVER_NAME")
    cache_dir: Path = option(default_cache_dir, directory, "NIXL_LORA_CACHE_DIR")
    timeout: float = option(60.0, seconds(0.001, 86400), "FANIN_PULL_TIMEOUT")
    keep: int = option(2, whole(1, 10000), "FANIN_KEEP_ADAPTERS")
    path: str = option("auto", choice(*PATHS), "FANIN_PATH")
    prefix: str | None = option(None, prefix, "FANIN_ADAPTER_PREFIX")
    dtype: str | None = option(None, half, "FANIN_DTYPE")
    max_bytes: int | None = option(None, whole(1, MOST_BYTES), "FANIN_MAX_BYTES")
    trust_config: bool = option(False, switch, "FANIN_TRUST_CONFIG")
    allow_trainers: tuple[str, ...] = option((), _allowed.parse, _allowed.VARIABLE)
    newest: bool = option(False, switch, "FANIN_NEWEST")
    landing: str = option("auto", choice(*LANDINGS), "FANIN_LANDING")
    spare_file: bool = option(True, switch, "FANIN_SPARE_FILE")
    require_step: bool = option(False, switch, "FANIN_REQUIRE_STEP")
    relay: str | None = option(None, relay, "FANIN_RELAY")
    place: str | None = option(None, place, "FANIN_PLACE")
    credentials: Credentials = Credentials()


# ---------------------------------------------------------------- the loader


def _where(name: str, one: Option) -> tuple[tuple[str, ...], str]:
    """Table and key of an option in files."""
    *table, key = (one.where or f"{SECTION}.{name}").split(".")
    return tuple(table), key


def settings_of(kind: type[Any]) -> dict[str, Option]:
    """The options of one part, with those of its secret or certificate."""
    return {**options_of(kind), **options_of(Credentials)}


def _suggest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else "known are " + ", ".join(sorted(known))


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with open(path, "rb") as stream:
            result: dict[str, Any] = tomllib.load(stream)
    except OSError as error:
        raise ConfigError.make(
            f"{path}: {error.strerror or error}", "check the path of the configuration file"
        ) from error
    except ValueError as error:  # TOMLDecodeError, and bytes that are not UTF-8
        raise ConfigError.make(f"{path}: no valid TOML: {error}", "correct that line") from None
    return result


def _table(root: Mapping[str, Any], names: Sequence[str], file: str) -> Mapping[str, Any]:
    table: Any = root
    for i, name in enumerate(names):
        table = table.get(name, {})
        if not isinstance(table, dict):
            where = ".".join(names[: i + 1])
            raise ConfigError.make(f"{file}: {where} is no table", f"write [{where}]")
    result: Mapping[str, Any] = table
    return result


class _Settings:
    """The options of a part, each with the place that its value comes from.

    Keywords go before variables, and these before the file.

    Args:
        kind: the part.
        path: the file; None: there is none.
        given: keywords; None of them: it is not said.
        only: options to look at; empty: all.
    """

    def __init__(
        self,
        kind: type[Any],
        path: str | os.PathLike[str] | None,
        environ: Mapping[str, str],
        given: Mapping[str, Any] | None = None,
        only: Sequence[str] = (),
    ) -> None:
        self.file = "" if path is None else str(path)
        self.root = {} if path is None else _load(path)
        self.options = settings_of(kind)
        self.places: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        if path is not None:
            self._check_names()
        for name in only or self.options:
            self._take(name, environ, (given or {}).get(name))

    def make(self, kind: Callable[..., _Config], environ: Mapping[str, str]) -> _Config:
        """The part. What is misspelt in the environment is warned of."""
        self._warn_of_misspelt(environ)
        return kind(credentials=self.credentials(), **self.values)

    def _check_names(self) -> None:
        if SECTION not in self.root:
            near = difflib.get_close_matches(SECTION, list(self.root), n=1, cutoff=0.75)
            raise ConfigError.make(
                f"{self.file}: there is no [{SECTION}]" + (f", but [{near[0]}]" if near else ""),
                f'add [{SECTION}] with type = "nixl"',
            )
        keys: dict[str, list[str]] = {SECTION: ["type"], _LORA: []}
        for table, key in (_where(name, one) for name, one in self.options.items()):
            keys[".".join(table)].append(key)
        section = _table(self.root, (SECTION,), self.file)
        for name in section:
            if name not in keys[SECTION]:
                self._unknown(SECTION, name, _suggest(name, keys[SECTION]))
        kind = section.get("type")
        if kind != "nixl":
            raise ConfigError.make(
                f"{self.file}: {SECTION}.type is " + ("missing" if kind is None else repr(kind)),
                'write type = "nixl", or do not start fanin with this file',
            )
        # Other keys of [model.lora] are the trainer's, but a misspelt one of ours is an error.
        lora = _table(self.root, _LORA.split("."), self.file)
        for name in lora:
            near = difflib.get_close_matches(name, keys[_LORA], n=1, cutoff=0.75)
            if name not in keys[_LORA] and near and near[0] not in lora:
                self._unknown(_LORA, name, f"did you mean {near[0]!r}?")

    def _unknown(self, table: str, name: str, remedy: str) -> None:
        raise ConfigError.make(f"{self.file}: {table}.{name} is unknown", remedy, key=name)

    def _take(self, name: str, environ: Mapping[str, str], given: Any) -> None:
        one = self.options[name]
        table, key = _where(name, one)
        path = ".".join((*table, key))
        value = _table(self.root, table, self.file).get(key)
        place = f"{self.file}: {path}"
        if one.variable is not None and environ.get(one.variable, "").strip():
            value, place = environ[one.variable], f"environment: {one.variable}"
        if given is not None:
            value, place = given, name
        if value is None:
            file = f"{path} of {self.file}" if self.file else ""
            self.places[name] = " or ".join(filter(None, (file, one.variable))) or path
            return
        self.places[name] = place
        try:
            self.values[name] = one.convert(value)
        except ValueError as error:
            raise ConfigError.make(f"{place} is {value!r}", f"give {error}", key=name) from None

    def bad(self, name: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError.make(f"{self.places[name]}: {problem}", remedy, key=name)

    def credentials(self) -> Credentials:
        """One value of the four, which are known to fit then."""
        given = {name: self.values.pop(name) for name in VARIABLES if name in self.values}
        for name, path in given.items():
            # The environment is the process' own, and so is its directory; several read a file.
            if self.places[name].startswith(f"{self.file}: ") and not Path(path).is_absolute():
                raise self.bad(name, f"{path!r} is no absolute path", "give the whole path")
        tls = [name for name in given if name != "secret_file"]
        all_three = "tls_cert, tls_key and tls_ca (FANIN_TLS_CERT, FANIN_TLS_KEY, FANIN_TLS_CA)"
        if tls and "secret_file" in given:
            problem = f"a launch's secret, and {self.places[tls[0]]} a certificate"
            remedy = f"give one of them: secret_file (FANIN_SECRET_FILE), or {all_three}"
            raise self.bad("secret_file", problem, remedy)
        missing = [name for name in VARIABLES if name != "secret_file" and name not in given]
        if tls and missing:
            problem = f"{missing[0]} is missing beside it"
            raise self.bad(tls[0], problem, f"give all three: {all_three}")
        return Credentials(**given)

    def _warn_of_misspelt(self, environ: Mapping[str, str]) -> None:
        parts = (TrainerConfig, OrchestratorConfig, InferenceConfig)
        known = {one.variable for part in parts for one in settings_of(part).values()}
        mine = [one.variable for one in self.options.values() if one.variable is not None]
        for name in environ:
            if name.startswith("FANIN_") and name not in known | _OTHER_VARIABLES:
                near = difflib.get_close_matches(name, mine, n=1, cutoff=0.85)
                if near:
                    _log.warning(
                        "environment: %s is unknown and has no effect; did you mean %s?",
                        name,
                        near[0],
                    )


def _engine_file(environ: Mapping[str, str]) -> str | None:
    return environ.get("FANIN_CONFIG", "").strip() or None


def inference_setting(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """One value of :func:`inference_config`, of which nothing else is looked at; None: it is not
    set. Blocks for reading the file; any thread. Raises ConfigError.
    """
    only = (name,)
    return _Settings(InferenceConfig, _engine_file(environ), environ, None, only).values.get(name)


def engine_credentials(environ: Mapping[str, str] = os.environ) -> Credentials:
    """The secret or certificate of this engine: as :func:`inference_config` says, of which nothing
    else is looked at. Blocks for reading the file; any thread. Raises ConfigError.
    """
    only = tuple(VARIABLES)
    return _Settings(InferenceConfig, _engine_file(environ), environ, None, only).credentials()


def trainer_config(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    **given: Any,
) -> TrainerConfig:
    """The trainer's configuration, from keywords, variables and its TOML file, in this order.

    docs/reference/configuration.md has the keys and variables. Blocks for reading the file; any
    thread. Raises ConfigError.

    Args:
        path: the file, None: variables, keywords and defaults only.
        environ: the variables.
        given: fields of TrainerConfig; None: not said.
    """
    settings = _Settings(TrainerConfig, path, environ, given)
    config = settings.make(TrainerConfig, environ)
    bind = config.bind
    if config.cast is not None and not config.snapshot:
        remedy = "add snapshot = true, or leave out cast"
        raise settings.bad("cast", "only snapshots can be cast", remedy)
    if config.deltas and not config.snapshot:
        remedy = "add snapshot = true, or leave out deltas"
        raise settings.bad("deltas", "only snapshots have patches", remedy)
    if bind is not None and ipaddress.ip_address(bind).is_unspecified:
        problem = "a server does not listen on all interfaces"
        raise settings.bad("bind", problem, "give one address of this host")
    if bind is not None and not is_loopback(bind) and config.allow is None:
        raise settings.bad(
            "bind",
            f"a server on {bind} needs to know whom it may serve",
            'add allow = "10.0.0.0/8" or whichever network the engines are in',
        )
    if config.trusted_network and config.allow is None:
        raise settings.bad("trusted_network", "no network is given", "add allow")
    return config


def orchestrator_config(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ
) -> OrchestratorConfig:
    """The orchestrator's configuration, from variables and its TOML file, in this order.

    docs/reference/configuration.md has the keys and variables. Blocks for reading the file; any
    thread. Raises ConfigError.

    Args:
        path: the file, None: variables and defaults only.
        environ: the variables.
    """
    settings = _Settings(OrchestratorConfig, path, environ)
    if settings.file and "lora" not in _table(settings.root, ("model",), settings.file):
        raise ConfigError.make(
            f'{settings.file}: {SECTION}.type is "nixl", and LoRA is not enabled',
            "add [model.lora]; an orchestrator of whole models uses fanin.sync",
        )
    if "lora_name" not in settings.values:
        missing = f"{settings.places['lora_name']} is missing"
        remedy = "engines know the adapter by it: give it a name"
        raise ConfigError.make(missing, remedy, key="lora_name")
    return settings.make(OrchestratorConfig, environ)


def inference_config(
    environ: Mapping[str, str] = os.environ, path: str | os.PathLike[str] | None = None
) -> InferenceConfig:
    """The engine's configuration, from variables and a TOML file, in this order.

    docs/reference/configuration.md has the keys and variables. Blocks for reading the file; any
    thread. Raises ConfigError.

    Args:
        environ: the variables.
        path: the file, None: the one that FANIN_CONFIG names, if it is set.
    """
    settings = _Settings(InferenceConfig, path or _engine_file(environ), environ)
    if settings.root.get("enable_lora") is False:
        raise ConfigError.make(
            f'{settings.file}: {SECTION}.type is "nixl", and enable_lora is false',
            "write enable_lora = true",
            key="enable_lora",
        )
    return settings.make(InferenceConfig, environ)


# ------------------------------------------------------------------ together


_EQUAL = (
    (
        "server_name",
        {"trainer": "server_name", "orchestrator": "server_name", "inference": "server_name"},
        "give all parts of the job the trainer's server_name",
    ),
    (
        "model.lora.alpha",
        {"trainer": "lora_alpha", "orchestrator": "lora_alpha"},
        "give the orchestrator the alpha that the trainer trains with",
    ),
    (
        "adapters' name",
        {"orchestrator": "lora_name", "inference": "prefix"},
        "make orchestrator's model.lora.name and inference's prefix equal, or leave out the prefix",
    ),
    (
        "what all show each other",
        dict.fromkeys(("trainer", "orchestrator", "inference"), "credentials.kind"),
        "give all parts of the job the launch's secret, or all of them certificates",
    ),
)
"""What must be equal where it is said: what it is, the field of each part, the remedy."""


def validate_together(
    trainer: TrainerConfig | None = None,
    orchestrator: OrchestratorConfig | None = None,
    inference: InferenceConfig | None = None,
) -> None:
    """Checks whether the parts of one job fit together; ignores parts that are None.

    Does not block; any thread.

    Raises:
        ConfigError: server names, LoRA alphas or adapters' names differ. Or one part has a secret
            and another one a certificate. Or the engines are told an address that the trainer does
            not listen on. The error names the key, the values and the parts that have them.
    """
    parts = {"trainer": trainer, "orchestrator": orchestrator, "inference": inference}
    for key, fields, remedy in _EQUAL:
        told = {who: attrgetter(fields[who])(parts[who]) for who in fields if parts[who]}
        given = {who: value for who, value in told.items() if value is not None}
        if len(set(given.values())) > 1:
            values = ", ".join(f"{value!r} ({who})" for who, value in given.items())
            raise ConfigError.make(f"{key} differs: {values}", remedy, key=key)
    _check_reach(trainer, inference)


def _check_reach(trainer: TrainerConfig | None, inference: InferenceConfig | None) -> None:
    if trainer is None or (trainer.bind is not None and not is_loopback(trainer.bind)):
        return
    if inference is None or inference.trainer is None or is_path(inference.trainer):
        return
    for address in inference.trainer.split(","):
        host = address.strip().rpartition(":")[0].strip("[]")
        # A name may stand for 127.0.0.1.
        if is_numeric(host) and not is_loopback(host):
            raise ConfigError.make(
                f"the trainer listens on {trainer.bind or '127.0.0.1'} only, and the engines are"
                f" told {host}",
                "give the trainer bind, an address of its host, and allow, the engines' network",
                key="bind",
            )
