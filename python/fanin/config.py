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
import math
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fanin import _allowed
from fanin._credentials import VARIABLES, Credentials
from fanin.errors import FaninError, RequestError
from fanin.info import addresses_of, is_loopback, is_numeric, is_path
from fanin.names import AdapterName

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

SECTION = "weight_broadcast"
PATHS = ("auto", "stream", "cma", "rdma", "cuda_ipc")
LANDINGS = ("auto", "slot", "directory")
DEFAULT_SERVER_NAME = "lora_param_server"
MOST_BYTES = (1 << 63) - 1
_OTHER_VARIABLES = frozenset(
    (
        *("FANIN_CONFIG", "FANIN_LIBRARY", "FANIN_UCX_LIBRARY", "FANIN_CUDA_LIBRARY"),
        *("FANIN_TRUST_CONTAINERS", "FANIN_TRUST_OTHER_USERS", "FANIN_INSECURE"),
    )
)

_log = logging.getLogger("fanin.config")


class ConfigError(RequestError, ValueError):
    """A configuration that cannot work; the message names the file or variable, then the key."""


# -------------------------------------------------------------------- values


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text that is not empty")
    return value.strip()


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, str) and value.strip().lower() in known:
        return known[value.strip().lower()]
    raise ValueError("true or false")


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]+\s*", value, re.ASCII):
            value = int(value.strip()[:20])
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return convert


def _number(low: float, high: float, what: str) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        problem = ValueError(f"a number{what} from {low:g} to {high:g}")
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise problem from None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise problem
        if not math.isfinite(value) or not low <= value <= high:
            raise problem
        return float(value)

    return convert


def _choice(*names: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.strip().lower() not in names:
            raise ValueError("one of " + ", ".join(f'"{name}"' for name in names))
        return value.strip().lower()

    return convert


def _dtype(value: Any) -> str:
    return _choice("bf16", "f16")(value).upper()


def _networks(value: Any) -> str:
    parts = value if isinstance(value, list) else str(value).split(",")
    try:
        networks = [str(ipaddress.ip_network(part.strip(), strict=False)) for part in parts]
    except (ValueError, AttributeError):
        raise ValueError('networks such as "10.0.0.0/8,fd00::/8"') from None
    return ",".join(networks)


def _address(value: Any) -> str:
    try:
        return str(ipaddress.ip_address(_text(value)))
    except ValueError:
        raise ValueError("a numeric address of this host, such as 10.0.0.1") from None


def _seconds() -> Callable[[Any], float]:
    return _number(0.001, 86400, " of seconds")


def _engines(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    expected = ValueError('a list of engines\' URLs, such as ["http://10.0.0.1:8000"]')
    if not isinstance(parts, (list, tuple)) or not parts:
        raise expected
    result = []
    for part in parts:
        if not isinstance(part, str):
            raise expected
        url = part.strip().rstrip("/")
        split = urllib.parse.urlsplit(url)
        if split.scheme not in ("http", "https") or not split.hostname:
            raise expected
        if url in result:
            raise ValueError(f"every engine once; {url} is there twice")
        result.append(url)
    return tuple(result)


def _trainer(value: Any) -> str:
    if isinstance(value, list):
        try:
            return ",".join(addresses_of(value))
        except FaninError as error:
            raise ValueError(f"addresses or a path: {error.message}") from None
    text = _text(value)
    if not is_path(text):
        try:
            addresses_of(text)
        except FaninError as error:
            raise ValueError(f"addresses or a path: {error.message}") from None
    return text


def _prefix(value: Any) -> str:
    text = _text(value)
    try:
        AdapterName(text, "0", 1)
    except FaninError:
        raise ValueError("one word before -run<r>-step<s>, without blanks") from None
    return text


def _directory(value: Any) -> Path:
    path = Path(_text(value)).expanduser()
    if not path.is_absolute():
        raise ValueError("an absolute path, which all processes of the engine see alike")
    return path


# ------------------------------------------------------------------- sources


@dataclass(frozen=True, slots=True)
class _Key:
    name: str  # of the field, and in [weight_broadcast] unless table says otherwise
    convert: Callable[[Any], Any]
    variable: str | None = None
    table: tuple[str, ...] = (SECTION,)
    key: str | None = None  # in the file, if it is not the field's name
    about: str = ""  # for docs/reference/configuration.md, which is made of these tables

    @property
    def path(self) -> str:
        return ".".join((*self.table, self.key or self.name))


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


def _check_section(root: Mapping[str, Any], keys: Sequence[_Key], file: str) -> None:
    if SECTION not in root:
        near = difflib.get_close_matches(SECTION, list(root), n=1, cutoff=0.75)
        raise ConfigError.make(
            f"{file}: there is no [{SECTION}]" + (f", but [{near[0]}]" if near else ""),
            f'add [{SECTION}] with type = "nixl"',
        )
    section = _table(root, (SECTION,), file)
    known = ["type", *(key.key or key.name for key in keys if key.table == (SECTION,))]
    for name in section:
        if name not in known:
            raise ConfigError.make(
                f"{file}: {SECTION}.{name} is unknown", _suggest(name, known), key=name
            )
    kind = section.get("type")
    if kind != "nixl":
        raise ConfigError.make(
            f"{file}: {SECTION}.type is " + ("missing" if kind is None else repr(kind)),
            'write type = "nixl", or do not start fanin with this file',
        )


def _check_lora(root: Mapping[str, Any], keys: Sequence[_Key], file: str) -> None:
    """Other keys of [model.lora] are the trainer's, but a misspelt one of ours is an error."""
    names = [key.key or key.name for key in keys if key.table == ("model", "lora")]
    lora = _table(root, ("model", "lora"), file)
    for name in lora:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        if name not in names and near and near[0] not in lora:
            raise ConfigError.make(
                f"{file}: model.lora.{name} is unknown", f"did you mean {near[0]!r}?", key=name
            )


class _Settings:
    """Values of keys, each with the place that it comes from. only: those of them to look at."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        environ: Mapping[str, str],
        keys: Sequence[_Key],
        *,
        only: Sequence[_Key] = (),
    ) -> None:
        self.file = "" if path is None else str(path)
        self.root = {} if path is None else _load(path)
        self.places: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        if path is not None:
            _check_section(self.root, keys, self.file)
            _check_lora(self.root, keys, self.file)
        for key in only or keys:
            self._take(key, environ)

    def _take(self, key: _Key, environ: Mapping[str, str]) -> None:
        value = _table(self.root, key.table, self.file).get(key.key or key.name)
        place = f"{self.file}: {key.path}"
        if key.variable is not None and environ.get(key.variable, "").strip():
            value, place = environ[key.variable], f"environment: {key.variable}"
        self.places[key.name] = place if value is not None else self._where(key)
        if value is None:
            return
        try:
            self.values[key.name] = key.convert(value)
        except ValueError as error:
            raise ConfigError.make(f"{place} is {value!r}", f"give {error}", key=key.name) from None

    def _where(self, key: _Key) -> str:
        file = f"{key.path} of {self.file}" if self.file else ""
        places = [place for place in (file, key.variable) if place]
        return " or ".join(places) or key.path

    def bad(self, name: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError.make(f"{self.places[name]}: {problem}", remedy, key=name)

    def require(self, name: str, remedy: str) -> None:
        if name not in self.values:
            raise ConfigError.make(f"{self.places[name]} is missing", remedy, key=name)

    def get(self, name: str, default: Any) -> Any:
        return self.values.get(name, default)


def _warn_of_misspelt(environ: Mapping[str, str], keys: Sequence[_Key]) -> None:
    known = {v for group in _ALL_KEYS for key in group if (v := key.variable) is not None}
    mine = [key.variable for key in keys if key.variable is not None]
    for name in environ:
        if name.startswith("FANIN_") and name not in known | _OTHER_VARIABLES:
            near = difflib.get_close_matches(name, mine, n=1, cutoff=0.85)
            if near:
                _log.warning(
                    "environment: %s is unknown and has no effect; did you mean %s?", name, near[0]
                )


# --------------------------------------------------------------- credentials

_CREDENTIALS_ABOUT = {
    "secret_file": "File of the launch's secret: TLS over TCP.",
    "tls_cert": "Instead of a secret: this end's certificate.",
    "tls_key": "Its key.",
    "tls_ca": "The authorities of the other end's certificates.",
}
_CREDENTIAL_KEYS = tuple(
    _Key(name, _text, variable, about=_CREDENTIALS_ABOUT[name])
    for name, variable in VARIABLES.items()
)
_ONE_OF_THEM = (
    "give one of them: secret_file (FANIN_SECRET_FILE), or tls_cert, tls_key and tls_ca"
    " (FANIN_TLS_CERT, FANIN_TLS_KEY, FANIN_TLS_CA)"
)


def _join_credentials(settings: _Settings) -> None:
    """Makes one value of the four, once they are known to fit."""
    given = {name: settings.values.pop(name) for name in VARIABLES if name in settings.values}
    for name, path in given.items():
        # The environment is the process' own, and so is its directory; a file is read by several.
        if (
            settings.places[name] != f"environment: {VARIABLES[name]}"
            and not Path(path).is_absolute()
        ):
            raise settings.bad(name, f"{path!r} is no absolute path", "give the whole path")
    tls = [name for name in given if name != "secret_file"]
    if tls and "secret_file" in given:
        problem = f"a launch's secret, and {settings.places[tls[0]]} a certificate"
        raise settings.bad("secret_file", problem, _ONE_OF_THEM)
    missing = [name for name in VARIABLES if name != "secret_file" and name not in given]
    if tls and missing:
        raise settings.bad(
            tls[0],
            f"{missing[0]} is missing beside it",
            "give all three: tls_cert, tls_key and tls_ca"
            " (FANIN_TLS_CERT, FANIN_TLS_KEY, FANIN_TLS_CA)",
        )
    settings.values["credentials"] = Credentials(**given)


def inference_setting(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """One value of :func:`inference_config`, of which nothing else is looked at; None: it is not
    set. Blocks for reading the file; any thread. Raises ConfigError.
    """
    path = environ.get("FANIN_CONFIG", "").strip() or None
    only = [key for key in _INFERENCE_KEYS if key.name == name]
    return _Settings(path, environ, _INFERENCE_KEYS, only=only).get(name, None)


def engine_credentials(environ: Mapping[str, str] = os.environ) -> Credentials:
    """The secret or certificate of this engine: as :func:`inference_config` says, of which nothing
    else is looked at. Blocks for reading the file; any thread. Raises ConfigError.
    """
    path = environ.get("FANIN_CONFIG", "").strip() or None
    settings = _Settings(path, environ, _INFERENCE_KEYS, only=_CREDENTIAL_KEYS)
    _join_credentials(settings)
    result: Credentials = settings.values["credentials"]
    return result


# ------------------------------------------------------------------- trainer

_TRAINER_KEYS = (
    _Key(
        "port",
        _integer(0, 65535),
        "FANIN_PORT",
        about="Rank r listens on port + r. 0: any free port.",
    ),
    _Key(
        "server_name",
        _text,
        "FANIN_SERVER_NAME",
        about="The name of the job, which engines may demand.",
    ),
    _Key(
        "bind",
        _address,
        "FANIN_BIND",
        about="Numeric address to listen on. Default: 127.0.0.1, or the way to MASTER_ADDR.",
    ),
    _Key(
        "advertise", _text, "FANIN_ADVERTISE", about="Address that engines are told. Default: bind."
    ),
    _Key(
        "allow",
        _networks,
        "FANIN_ALLOW",
        about="Networks that may read, with commas. Needed on a network.",
    ),
    _Key(
        "trusted_network",
        _switch,
        "FANIN_TRUSTED_NETWORK",
        about="These networks are no strangers, and may read by RDMA once they prove themselves.",
    ),
    _Key(
        "lease",
        _number(0, 60, " of seconds"),
        "FANIN_LEASE",
        about="Seconds that a reader may delay an update. 0: not at all.",
    ),
    _Key(
        "data_threads",
        _integer(1, 16),
        "FANIN_DATA_THREADS",
        about="Threads a rank sends tensors with. Default: a quarter of its CPUs, 1 to 4.",
    ),
    _Key(
        "stranger_share",
        _number(0, 60, " of seconds"),
        "FANIN_STRANGER_SHARE",
        about="Seconds of each minute that one network peer may delay updates. 60: no limit.",
    ),
    _Key(
        "own_share",
        _number(0, 60, " of seconds"),
        "FANIN_OWN_SHARE",
        about="The same for this user on this host, and for a trusted network.",
    ),
    _Key(
        "nice",
        _integer(-20, 19),
        "FANIN_NICE",
        about="Added to the nice value of the threads that serve.",
    ),
    _Key(
        "snapshot",
        _switch,
        "FANIN_SNAPSHOT",
        about="Publish copies: readers never delay an update, for twice the memory.",
    ),
    _Key(
        "cast",
        _dtype,
        "FANIN_CAST",
        about="With snapshot: the type that F32 tensors are published as.",
    ),
    _Key(
        "port_by",
        _choice("global", "local"),
        "FANIN_PORT_BY",
        about="Count ports by the global rank, or by the rank on its host.",
    ),
    *_CREDENTIAL_KEYS,
    _Key(
        "lora_name",
        _prefix,
        None,
        ("model", "lora"),
        "name",
        about="Prefix of the adapters' names.",
    ),
    _Key(
        "lora_alpha",
        _number(1e-9, 1e9, ""),
        None,
        ("model", "lora"),
        "alpha",
        about="PEFT's alpha.",
    ),
)


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """What a trainer rank is started with; see fanin.torch.AdapterServer. Immutable.

    Args:
        port: rank r listens on port + r; 0: any free port.
        server_name: the job's name.
        bind: numeric address to listen on, None: 127.0.0.1 (one host).
        advertise: address that engines are told, None: bind.
        allow: networks that may connect, comma-separated; needed when bind is not this host's own.
        trusted_network: serve one-sided reads to them.
        lease: seconds that readers may delay an update.
        data_threads: that each rank sends tensors with, 1 to 16, None: by its CPUs.
        stranger_share, own_share, nice: see fanin.Server.
        snapshot: publish copies.
        cast: dtype of snapshots, "BF16", "F16" or None.
        port_by: count ports by global or by local rank.
        lora_alpha, lora_name: what the trainer's file says of its adapter, None: nothing.
        credentials: the secret or certificate that readers over a network are asked for.
    """

    port: int = 6000
    server_name: str = DEFAULT_SERVER_NAME
    bind: str | None = None
    advertise: str | None = None
    allow: str | None = None
    trusted_network: bool = False
    lease: float = 1.0
    data_threads: int | None = None
    stranger_share: float = 2.0
    own_share: float = 60.0
    nice: int = 0
    snapshot: bool = False
    cast: str | None = None
    port_by: str = "global"
    lora_name: str | None = None
    lora_alpha: float | None = None
    credentials: Credentials = Credentials()

    def server_arguments(self) -> dict[str, Any]:
        """Keyword arguments of fanin.torch.AdapterServer and WeightServer that say the same."""
        return {
            "base_port": self.port,
            "name": self.server_name,
            "bind": self.bind,
            "advertise": self.advertise,
            "allow": self.allow,
            "trusted_network": self.trusted_network,
            "lease": self.lease,
            "data_threads": self.data_threads,
            "stranger_share": self.stranger_share,
            "own_share": self.own_share,
            "nice": self.nice,
            "snapshot": self.snapshot,
            "cast": self.cast,
            "port_by": self.port_by,
            **self.credentials.arguments(),
        }


def trainer_config(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ
) -> TrainerConfig:
    """The trainer's configuration, from its TOML file and variables that override it.

    docs/reference/configuration.md has the keys and variables. Blocks for reading the file; any
    thread. Raises ConfigError.

    Args:
        path: the file, None: variables and defaults only.
    """
    settings = _Settings(path, environ, _TRAINER_KEYS)
    _warn_of_misspelt(environ, _TRAINER_KEYS)
    _join_credentials(settings)
    config = TrainerConfig(**settings.values)
    if config.cast is not None and not config.snapshot:
        raise settings.bad(
            "cast", "only snapshots can be cast", "add snapshot = true, or leave out cast"
        )
    if config.bind is not None and ipaddress.ip_address(config.bind).is_unspecified:
        raise settings.bad(
            "bind", "a server does not listen on all interfaces", "give one address of this host"
        )
    if config.bind is not None and not is_loopback(config.bind) and config.allow is None:
        raise settings.bad(
            "bind",
            f"a server on {config.bind} needs to know whom it may serve",
            'add allow = "10.0.0.0/8" or whichever network the engines are in',
        )
    if config.trusted_network and config.allow is None:
        raise settings.bad("trusted_network", "no network is given", "add allow")
    return config


# -------------------------------------------------------------- orchestrator

_ORCHESTRATOR_KEYS = (
    _Key(
        "engines", _engines, "FANIN_ENGINES", about="The engines' URLs, with commas or as a list."
    ),
    _Key(
        "timeout",
        _seconds(),
        "FANIN_UPDATE_TIMEOUT",
        about="Seconds for one update of all engines.",
    ),
    _Key("server_name", _text, "FANIN_SERVER_NAME", about="The name of the job. Default: any."),
    _Key(
        "lora_name",
        _prefix,
        "FANIN_LORA_NAME",
        ("model", "lora"),
        "name",
        about="Prefix of the adapters' names. Required.",
    ),
    _Key(
        "lora_alpha",
        _number(1e-9, 1e9, ""),
        "FANIN_LORA_ALPHA",
        ("model", "lora"),
        "alpha",
        about="PEFT's alpha, which must be the trainer's. Default: not checked.",
    ),
    *_CREDENTIAL_KEYS,
)


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """What the orchestrator posts updates with; see fanin.pool.EnginePool. Immutable.

    Args:
        engines: URLs; may be empty, if the orchestrator has its own list.
        timeout: seconds for one update of all engines.
        server_name: the job's name, None: any.
        lora_name: prefix of the adapters' names.
        lora_alpha: PEFT's alpha, which must be the trainer's, None: not checked.
        credentials: what the trainer is asked with, whose arguments() EnginePool takes.
    """

    lora_name: str
    engines: tuple[str, ...] = ()
    timeout: float = 60.0
    server_name: str | None = None
    lora_alpha: float | None = None
    credentials: Credentials = Credentials()


def orchestrator_config(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ
) -> OrchestratorConfig:
    """The orchestrator's configuration, from its TOML file and variables that override it.

    docs/reference/configuration.md has the keys and variables. Blocks for reading the file; any
    thread. Raises ConfigError.

    Args:
        path: the file, None: variables and defaults only.
    """
    settings = _Settings(path, environ, _ORCHESTRATOR_KEYS)
    _warn_of_misspelt(environ, _ORCHESTRATOR_KEYS)
    model = _table(settings.root, ("model",), settings.file)
    if settings.file and "lora" not in model:
        raise ConfigError.make(
            f'{settings.file}: {SECTION}.type is "nixl", and LoRA is not enabled',
            "add [model.lora]; an orchestrator of whole models uses fanin.sync",
        )
    settings.require("lora_name", "engines know the adapter by it: give it a name")
    _join_credentials(settings)
    return OrchestratorConfig(**settings.values)


# ----------------------------------------------------------------- inference

_INFERENCE_KEYS = (
    _Key(
        "trainer",
        _trainer,
        "FANIN_TRAINER",
        about="host:port of every rank, or the path of a nixl_info.json, which each pull reads.",
    ),
    _Key(
        "server_name",
        _text,
        "FANIN_SERVER_NAME",
        about="Read only ranks of this name. Default: any.",
    ),
    _Key(
        "cache_dir",
        _directory,
        "NIXL_LORA_CACHE_DIR",
        about="Absolute folder for adapters. Default: /dev/shm/fanin-UID, of mode 0700.",
    ),
    _Key("timeout", _seconds(), "FANIN_PULL_TIMEOUT", about="Seconds for a pull."),
    _Key("keep", _integer(1, 10000), "FANIN_KEEP_ADAPTERS", about="Adapters of a run that stay."),
    _Key("path", _choice(*PATHS), "FANIN_PATH", about="How bytes travel."),
    _Key(
        "prefix",
        _prefix,
        "FANIN_ADAPTER_PREFIX",
        about="Resolve only names with this prefix. Default: any.",
    ),
    _Key(
        "dtype", _dtype, "FANIN_DTYPE", about="What F32 tensors arrive as. Default: as published."
    ),
    _Key(
        "max_bytes",
        _integer(1, MOST_BYTES),
        "FANIN_MAX_BYTES",
        about="Refuse larger adapters. Default: a quarter of the folder's file system.",
    ),
    _Key(
        "trust_config",
        _switch,
        "FANIN_TRUST_CONFIG",
        about="adapter_config.json keeps every field of the trainer, also those that load code.",
    ),
    _Key(
        "allow_trainers",
        _allowed.parse,
        _allowed.VARIABLE,
        about="Trainers that a request may name: networks, hosts, host:port, paths, or any.",
    ),
    _Key(
        "newest",
        _switch,
        "FANIN_NEWEST",
        about="A request to load an adapter without a step gets the newest.",
    ),
    _Key(
        "landing",
        _choice(*LANDINGS),
        "FANIN_LANDING",
        about="slot: into the slots of vLLM. directory. auto: slot if slots are in host memory.",
    ),
    _Key(
        "spare_file",
        _switch,
        "FANIN_SPARE_FILE",
        about="Make the next file of a directory beforehand, where memory allows.",
    ),
    _Key(
        "require_step",
        _switch,
        "FANIN_REQUIRE_STEP",
        about="An engine of whole models answers nothing before its first update (HTTP 503).",
    ),
    *_CREDENTIAL_KEYS,
)

_ALL_KEYS = (_TRAINER_KEYS, _ORCHESTRATOR_KEYS, _INFERENCE_KEYS)


@dataclass(frozen=True, slots=True)
class InferenceConfig:
    """What an engine pulls with. Immutable.

    Args:
        trainer: addresses ("host:port,host:port") or path of a nixl_info.json, which is read at
            each pull; None: the requests say it.
        server_name: the job's name, None: any.
        cache_dir: absolute; adapters are made in it.
        timeout: seconds for a pull.
        keep: adapters of a run that stay on disk.
        path: how bytes travel, "auto" or one that is demanded.
        prefix: adapters' names begin with it, None: any.
        dtype: what F32 tensors arrive as, "BF16" or "F16", None: as published.
        max_bytes: larger adapters are refused, None: those above a quarter of the file system.
        trust_config: adapters keep every field of the trainer's PEFT configuration.
        allow_trainers: which trainers a request without the engine's API key may name.
        newest: a request to load an adapter that says no step gets the newest.
        landing: "slot", straight into the layout of the engine's slots where that can be,
            "directory", or "auto": "slot" if the slots are in host memory.
        spare_file: pulls into directories have the next one's file made beforehand, where there is
            memory for it.
        require_step: an engine of whole models answers nothing before its first whole update.
        credentials: the secret or certificate for trainers over a network; nothing: the secret that
            the trainer's nixl_info.json names, if it does.
    """

    trainer: str | None
    server_name: str | None
    cache_dir: Path
    timeout: float
    keep: int
    path: str
    prefix: str | None
    dtype: str | None = None
    max_bytes: int | None = None
    trust_config: bool = False
    allow_trainers: tuple[str, ...] = ()
    newest: bool = False
    landing: str = "auto"
    spare_file: bool = True
    require_step: bool = False
    credentials: Credentials = Credentials()


def default_cache_dir() -> Path:
    """``/dev/shm/fanin-<uid>``: memory of this host that no other user can plant files in."""
    return Path(f"/dev/shm/fanin-{os.getuid()}")


def inference_config(
    environ: Mapping[str, str] = os.environ, path: str | os.PathLike[str] | None = None
) -> InferenceConfig:
    """The engine's configuration, from variables and a TOML file.

    docs/reference/configuration.md has the keys and variables. Blocks for reading the file; any
    thread. Raises ConfigError.

    Args:
        path: the file, None: the one that FANIN_CONFIG names, if it is set.
    """
    if path is None and environ.get("FANIN_CONFIG", "").strip():
        path = environ["FANIN_CONFIG"].strip()
    settings = _Settings(path, environ, _INFERENCE_KEYS)
    _warn_of_misspelt(environ, _INFERENCE_KEYS)
    if settings.root.get("enable_lora") is False:
        raise ConfigError.make(
            f'{settings.file}: {SECTION}.type is "nixl", and enable_lora is false',
            "write enable_lora = true",
            key="enable_lora",
        )
    _join_credentials(settings)
    return InferenceConfig(
        trainer=settings.get("trainer", None),
        server_name=settings.get("server_name", None),
        cache_dir=settings.get("cache_dir", default_cache_dir()),
        timeout=settings.get("timeout", 60.0),
        keep=settings.get("keep", 2),
        path=settings.get("path", "auto"),
        prefix=settings.get("prefix", None),
        dtype=settings.get("dtype", None),
        max_bytes=settings.get("max_bytes", None),
        trust_config=settings.get("trust_config", False),
        allow_trainers=settings.get("allow_trainers", ()),
        newest=settings.get("newest", False),
        landing=settings.get("landing", "auto"),
        spare_file=settings.get("spare_file", True),
        require_step=settings.get("require_step", False),
        credentials=settings.values["credentials"],
    )


# ------------------------------------------------------------------ together


def _same(key: str, named: Mapping[str, object], remedy: str) -> None:
    given = {who: value for who, value in named.items() if value is not None}
    if len(set(given.values())) > 1:
        told = ", ".join(f"{value!r} ({who})" for who, value in given.items())
        raise ConfigError.make(f"{key} differs: {told}", remedy, key=key)


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
    _same(
        "server_name",
        {
            "trainer": trainer and trainer.server_name,
            "orchestrator": orchestrator and orchestrator.server_name,
            "inference": inference and inference.server_name,
        },
        "give all parts of the job the trainer's server_name",
    )
    _same(
        "model.lora.alpha",
        {
            "trainer": trainer and trainer.lora_alpha,
            "orchestrator": orchestrator and orchestrator.lora_alpha,
        },
        "give the orchestrator the alpha that the trainer trains with",
    )
    _same(
        "adapters' name",
        {
            "orchestrator's model.lora.name": orchestrator and orchestrator.lora_name,
            "inference's prefix": inference and inference.prefix,
        },
        "make them equal, or leave out the prefix",
    )
    _same(
        "what all show each other",
        {
            "trainer": trainer and trainer.credentials.kind,
            "orchestrator": orchestrator and orchestrator.credentials.kind,
            "inference": inference and inference.credentials.kind,
        },
        "give all parts of the job the launch's secret, or all of them certificates",
    )
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
