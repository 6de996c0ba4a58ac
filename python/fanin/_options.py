# SPDX-License-Identifier: Apache-2.0
"""What servers, clients and the parts of a job are told: each option once.

Its text is in the docstring of its dataclass; its field says where files, the environment and the
library's configurations have it. Signatures, documents and the loader are made of these tables.
"""

from __future__ import annotations

import ctypes
import dataclasses
import difflib
import functools
import inspect
import ipaddress
import math
import os
import re
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from . import _ffi, _library
from ._library import c_string, integer, milliseconds, world_id_bytes
from .errors import FaninError, RequestError
from .info import addresses_of, is_path
from .names import AdapterName

SECTION = "weight_broadcast"
PATHS = ("auto", "stream", "cma", "rdma", "cuda_ipc")
LANDINGS = ("auto", "slot", "directory")
MOST_BYTES = (1 << 63) - 1

_PLACE = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
_P = ParamSpec("_P")
_Self = TypeVar("_Self")
_Options = TypeVar("_Options")

# -------------------------------------------------------------------- values


def text_of(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text that is not empty")
    return value.strip()


def switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, str) and value.strip().lower() in known:
        return known[value.strip().lower()]
    raise ValueError("true or false")


def whole(low: int, high: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]+\s*", value, re.ASCII):
            value = int(value.strip()[:20])
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return convert


def number(low: float, high: float, what: str = "") -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        with_text = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        try:
            found = float(value) if with_text else math.nan
        except ValueError:
            found = math.nan
        if not math.isfinite(found) or not low <= found <= high:
            raise ValueError(f"a number{what} from {low:g} to {high:g}")
        return found

    return convert


seconds = functools.partial(number, what=" of seconds")


def choice(*names: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.strip().lower() not in names:
            raise ValueError("one of " + ", ".join(f'"{name}"' for name in names))
        return value.strip().lower()

    return convert


def half(value: Any) -> str:
    return choice("bf16", "f16")(value).upper()


def networks(value: Any) -> str:
    parts = value if isinstance(value, list) else str(value).split(",")
    try:
        return ",".join(str(ipaddress.ip_network(one.strip(), strict=False)) for one in parts)
    except (ValueError, AttributeError):
        raise ValueError('networks such as "10.0.0.0/8,fd00::/8"') from None


def relay(value: Any) -> str:
    """Whom a reader hands on to: "host", or networks."""
    if isinstance(value, str) and value.strip().lower() == "host":
        return "host"
    try:
        return networks(value)
    except ValueError as error:
        raise ValueError(f'"host" or {error}') from None


def place(value: Any) -> str:
    """Where a reader is: the C library checks it likewise."""
    if isinstance(value, str) and len(value) < 64 and _PLACE.fullmatch(value):
        return value
    raise ValueError("site or site/rack, of letters, digits, '.', '-' and '_', at most 63 in all")


def numeric(value: Any) -> str:
    try:
        return str(ipaddress.ip_address(text_of(value)))
    except ValueError:
        raise ValueError("a numeric address of this host, such as 10.0.0.1") from None


def engines(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    found: list[str] = []
    for part in parts if isinstance(parts, (list, tuple)) else ():
        url = part.strip().rstrip("/") if isinstance(part, str) else ""
        split = urllib.parse.urlsplit(url)
        if split.scheme not in ("http", "https") or not split.hostname:
            found = []
            break
        if url in found:
            raise ValueError(f"every engine once; {url} is there twice")
        found.append(url)
    if not found:
        raise ValueError('a list of engines\' URLs, such as ["http://10.0.0.1:8000"]')
    return tuple(found)


def trainer(value: Any) -> str:
    try:
        if isinstance(value, list):
            return ",".join(addresses_of(value))
        if not is_path(text_of(value)):
            addresses_of(text_of(value))
    except FaninError as error:
        raise ValueError(f"addresses or a path: {error.message}") from None
    return text_of(value)


def prefix(value: Any) -> str:
    try:
        return AdapterName(text_of(value), "0", 1).prefix
    except FaninError:
        raise ValueError("one word before -run<r>-step<s>, without blanks") from None


def directory(value: Any) -> Path:
    path = Path(text_of(value)).expanduser()
    if not path.is_absolute():
        raise ValueError("an absolute path, which all processes of the engine see alike")
    return path


# ------------------------------------------------------------------- options


@dataclass(frozen=True, slots=True)
class Option:
    """Where a field of a dataclass is said besides.

    Args:
        convert: a value of a file or variable to the field's; raises ValueError that says what is
            wanted.
        variable: of the environment.
        take: a value to that of the library's configuration; None: it has none.
        field: of that configuration; "": of the same name.
        where: table and key of files; "": in the section, by the field's name.
    """

    convert: Callable[[Any], Any] = text_of
    variable: str | None = None
    take: Callable[[Any, str], Any] | None = None
    field: str = ""
    where: str = ""


def option(default: Any = dataclasses.MISSING, /, *more: Any, **named: Any) -> Any:
    """A dataclass's field; default: or what makes it. more, named: of :class:`Option`."""
    made = "default_factory" if callable(default) else "default"
    return dataclasses.field(**{made: default}, metadata={"option": Option(*more, **named)})


def options_of(kind: type[Any]) -> dict[str, Option]:
    """The options of a dataclass, by field."""
    fields = dataclasses.fields(kind)
    return {one.name: one.metadata["option"] for one in fields if "option" in one.metadata}


def texts_of(kind: type[Any]) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say of each field."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        section = inspect.cleandoc(one.__doc__ or "").partition("\nArgs:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.M):
            found[name] = " ".join(text.split())
    return found


def takes(
    kind: Callable[_P, _Options],
) -> Callable[[Callable[[_Self, _Options], None]], Callable[Concatenate[_Self, _P], None]]:
    """For an ``__init__`` that is given one *kind*: it then takes the arguments of it."""

    def decorate(init: Callable[[_Self, _Options], None]) -> Callable[..., None]:
        owner = init.__qualname__.partition(".")[0]
        mine = inspect.signature(kind)

        @functools.wraps(init)
        def made(self: _Self, /, *args: Any, **given: Any) -> None:
            _refuse_unknown(owner, mine.parameters.keys(), given)
            try:
                options = kind(*args, **given)
            except TypeError as error:
                raise TypeError(re.sub(r"^\w+\.__init__", owner, str(error))) from None
            init(self, options)

        texts = texts_of(kind) if isinstance(kind, type) else {}
        told = (f"    {name}: {texts[name]}" for name in mine.parameters if name in texts)
        made.__doc__ = "\n".join(("Args:", *told))
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        made.__signature__ = mine.replace(  # type: ignore[attr-defined]
            parameters=[me, *mine.parameters.values()], return_annotation=None
        )
        return made

    return decorate


def filled(structure: type[ctypes.Structure], init: Any, options: Any) -> Any:
    """The library's configuration that says what *options* do; None leaves its default.

    Raises RequestError naming an option whose value is of the wrong kind.
    """
    config = _library.initialised(structure, init)
    for name, one in options_of(type(options)).items():
        value, field = getattr(options, name), one.field or name
        if one.take is not None and value is not None:
            taken = one.take(value, name)
            setattr(config, field, getattr(config, field) | taken if field == "flags" else taken)
    return config


def names_of(target: Callable[..., Any], *own: str) -> set[str]:
    """The keyword arguments of *target* but *own*, which the caller gives itself."""
    parameters = inspect.signature(target).parameters.values()
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} - set(own)


def handed_on(
    owner: str, target: Callable[..., Any], given: Mapping[str, Any], *own: str
) -> dict[str, Any]:
    """*given*, each of which *target* takes and *owner* does not give it itself (*own*).

    Raises TypeError naming the first that is none, as Python does of functions, and what was meant
    if that is near. Does not block.
    """
    _refuse_unknown(owner, names_of(target, *own), given)
    return dict(given)


def _refuse_unknown(owner: str, known: Collection[str], given: Mapping[str, Any]) -> None:
    for name in sorted(given.keys() - set(known)):
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
        advice = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{advice}")


# --------------------------------------------------- as the library takes them


def _bits(bits: int) -> Callable[[Any, str], int]:
    return lambda value, name: integer(value, name, bits)


def _bit(flag: int, *, when: bool = True) -> Callable[[Any, str], int]:
    return lambda value, _: flag if bool(value) is when else 0


def _yes(value: Any, _: str) -> bool:
    return bool(value)


def _no(value: Any, _: str) -> bool:
    return not value


def _file(value: Any, name: str) -> bytes:
    if not isinstance(value, (str, os.PathLike)):
        raise RequestError.make(
            f"{name} is {type(value).__name__}, not a path", "give a str or a pathlib.Path"
        )
    return c_string(os.fspath(value), name)


def _ms_or_0(value: Any, name: str) -> int:
    return milliseconds(value, name, zero=True)


def _server_name(value: Any, _: str) -> bytes:
    return c_string(value, "the server's name")


def _world(value: Any, _: str) -> Any:
    return (ctypes.c_uint8 * _ffi.WORLD_ID_SIZE)(*world_id_bytes(value))


def _path(value: Any, _: str) -> int:
    if value not in PATHS:
        raise RequestError.make(f"{value!r} is no path", f"the paths are {', '.join(PATHS)}")
    return PATHS.index(value)


def _data_threads(value: Any, name: str) -> int:
    if value == 0:  # of C: None
        raise RequestError.make("data_threads is not 1 to 16", "leave it out: by the CPUs")
    return integer(value, name, 32)


def _nice(value: Any, _: str) -> int:
    if value not in range(-20, 20):
        raise RequestError.make("nice is not -20 to 19", "give 0 to 19: a larger one yields more")
    return int(value)


# -------------------------------------------------------------- credentials


@dataclass(frozen=True, slots=True)
class Credentials:
    """A secret, or a certificate with its key and authorities; None: not said. Immutable.

    Args:
        secret_file: A file with the launch's secret, 64 hexadecimal digits or 32 bytes. TCP then
            uses TLS 1.3, to ends that have the same secret. Unix sockets stay as they are. Default:
            the file that FANIN_SECRET_FILE names. "": no secret.
        tls_cert: Instead of a secret: a PEM file with this end's certificate and those that lead to
            an authority. A rank's is for "fanin://JOB/rank/N", or with a star for N for any rank. A
            reader's is for "fanin://JOB/reader" of the same job. The files are read again when they
            change. Default: what FANIN_TLS_CERT, FANIN_TLS_KEY and FANIN_TLS_CA name. "": none.
        tls_key: The certificate's key, which no other user may read.
        tls_ca: The authorities of the other end's certificates.
    """

    secret_file: str | None = option(None, text_of, "FANIN_SECRET_FILE", _file)
    tls_cert: str | None = option(None, text_of, "FANIN_TLS_CERT", _file)
    tls_key: str | None = option(None, text_of, "FANIN_TLS_KEY", _file)
    tls_ca: str | None = option(None, text_of, "FANIN_TLS_CA", _file)

    @property
    def kind(self) -> str | None:
        """What they are: "a secret", "a certificate"; None: nothing."""
        if self.secret_file is not None:
            return "a secret"
        return None if self.tls_cert is None else "a certificate"

    def arguments(self) -> dict[str, str]:
        """Those that are said, as keyword arguments of fanin.Server and fanin.Client."""
        return {name: path for name, path in dataclasses.asdict(self).items() if path is not None}


VARIABLES = {name: str(one.variable) for name, one in options_of(Credentials).items()}
"""The fields of :class:`Credentials` and their variables, which libfanin reads, too."""


@dataclass(frozen=True, kw_only=True)
class _Shown:
    __doc__ = Credentials.__doc__

    secret_file: str | os.PathLike[str] | None = option(None, take=_file)
    tls_cert: str | os.PathLike[str] | None = option(None, take=_file)
    tls_key: str | os.PathLike[str] | None = option(None, take=_file)
    tls_ca: str | os.PathLike[str] | None = option(None, take=_file)


# ------------------------------------------------------------------ serving


@dataclass(frozen=True, kw_only=True)
class Configured:
    """What files can tell a rank that serves, by whatever class.

    Args:
        bind: Numeric address to listen on. Default: 127.0.0.1. What publishes a model on several
            hosts, or with *allow*, listens on *advertise*, or on the way to MASTER_ADDR.
        allow: Networks that may read, with commas: "10.0.0.0/8,fd00::/8". Needed on a network.
        trusted_network: Peers in these networks are no strangers. With the secret or a certificate
            they may read by RDMA, and could then write registered memory too.
        lease: Most seconds that readers can delay an update. 0: not at all.
        data_threads: Threads that send tensors, 1 to 16: a rank serves so many connections at the
            same time. They start when connections come. Default: a quarter of the CPUs that the
            process may use, at most 4.
        nice: Added to the nice value of the threads that serve, -20 to 19. Below 0 needs a
            privilege.
    """

    bind: str | None = option(None, numeric, "FANIN_BIND", c_string)
    allow: str | None = option(None, networks, "FANIN_ALLOW", c_string)
    trusted_network: bool = option(
        False, switch, "FANIN_TRUSTED_NETWORK", _bit(_ffi.SERVER_TRUSTED_NETWORK), "flags"
    )
    lease: float = option(1.0, seconds(0, 60), "FANIN_LEASE", _ms_or_0, "lease_ms")
    data_threads: int | None = option(None, whole(1, 16), "FANIN_DATA_THREADS", _data_threads)
    nice: int = option(0, whole(-20, 19), "FANIN_NICE", _nice)


@dataclass(frozen=True, kw_only=True)
class Serving(Configured, _Shown):
    """What every rank that serves is told, by whatever class.

    Args:
        use_ucx: False: never load UCX, which the path "rdma" needs.
        idle: Seconds after which a silent session is closed.
        trust_containers: Processes of this uid in other containers that share this network count as
            the own user. Also FANIN_TRUST_CONTAINERS=1.
        insecure: An open server may do without the launch's secret, and allow networks that are
            wider than any private one. Also FANIN_INSECURE=1.
        stranger_cpu: CPU seconds a second that sending tensors to all strangers may take, up to 16.
            One stranger has half of it. Default: a tenth of the process's CPUs.
        relays: Readers may hand on to each other what they have read (:class:`fanin.Relay`).
    """

    use_ucx: bool = option(True, take=_bit(_ffi.SERVER_NO_UCX, when=False), field="flags")
    idle: float = option(300.0, take=milliseconds, field="idle_ms")
    trust_containers: bool = option(False, take=_bit(_ffi.SERVER_TRUST_CONTAINERS), field="flags")
    insecure: bool = option(False, take=_bit(_ffi.SERVER_INSECURE), field="flags")
    stranger_cpu: float | None = option(None, take=milliseconds)
    relays: bool = option(True, take=_bit(_ffi.SERVER_NO_RELAYS, when=False), field="flags")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Serving):
    """What :class:`fanin.Server` is told.

    Args:
        world_id: 16 bytes (or 32 hexadecimal digits), not all zero: random, the same on all ranks,
            new at every launch.
        rank: Below *world_size*.
        world_size: Ranks of the trainer, 1 to 65536.
        name: Rank r announces itself as ``<name>_<r>``.
        base_port: Listens on base_port + rank. 0: on a port that the system chooses.
        open: Listen on a network address, and serve networks by streams only.
    """

    world_id: bytes | str = option(take=_world)
    rank: int = option(take=_bits(32))
    world_size: int = option(take=_bits(32))
    name: str = option("lora_param_server", take=_server_name)
    base_port: int = option(0, take=_bits(16))
    open: bool = option(False, take=_bit(_ffi.SERVER_OPEN), field="flags")


@dataclass(frozen=True, kw_only=True)
class Publishing:
    """What all ranks are told that publish a model.

    Args:
        advertise: Address that engines are told. Default: *bind*.
        port_by: Count ports by the global rank, or by the rank on its host (local).
        snapshot: Publish copies: readers never delay an update, for twice the memory.
        cast: With *snapshot*: "BF16" or "F16", which F32 tensors are published as. Keywords take
            also a mapping by patterns of published names, of which the first that fits decides.
        deltas: Of whole models, with *snapshot*: keep so many patches, at most 16.
            Engines on slow links then read what the last steps have changed instead of the whole.
            4 serves engines that miss a few steps.
    """

    advertise: str | None = option(None, text_of, "FANIN_ADVERTISE")
    port_by: str = option("global", choice("global", "local"), "FANIN_PORT_BY")
    snapshot: bool = option(False, switch, "FANIN_SNAPSHOT")
    cast: Any = option(None, half, "FANIN_CAST")
    deltas: int = option(0, whole(0, 16), "FANIN_DELTAS")


# ------------------------------------------------------------------ pulling


@dataclass(frozen=True)
class ClientOptions(_Shown):
    """What :class:`fanin.Client` is told.

    Args:
        addresses: Connects to these (see :meth:`fanin.Client.connect`) within *connect_timeout*.
        server_name: Demand this job's name; None: any.
        world_id: Demand this world, 16 bytes or 32 hexadecimal digits, not all zero; None: any.
        connect_timeout: Seconds, for one rank, and for each data connection to it.
        streams_per_rank: Data connections to each rank, at most 16. 0: 4 to a rank on another host.
            To a rank on this host: one for each thread that reads the rank, at most 4. There, by
            TLS and unless *threads* is set, at most an eighth of the CPUs.
        threads: That read at the same time into host memory on the paths "stream" and "cma", at
            most 64. 0: half of the CPUs that the process may use, and fewer for little data. 1: the
            calling thread alone. By "stream" at most one a data connection, and with 0 at most 8.
        path: "auto", "stream", "cma", "rdma" or "cuda_ipc".
        use_unix: False: TCP even on one host.
        use_ucx: False: never load UCX, which the path "rdma" needs.
        checksums: False: no checksums over TCP, where the network itself detects altered bytes.
        trust_containers: Ask a rank of this uid over its Unix socket, in whatever container of this
            network. One-sided paths also need the server's *trust_containers*. Also
            FANIN_TRUST_CONTAINERS=1.
        trust_other_users: A rank on a loopback address may be any user's. False: only this
            process's user's, or root's. Also FANIN_TRUST_OTHER_USERS=1.
    """

    addresses: Sequence[str] | None = None
    _: dataclasses.KW_ONLY
    server_name: str | None = option(None, take=_server_name)
    world_id: bytes | str | None = option(None, take=_world)
    connect_timeout: float = option(5.0, take=milliseconds, field="connect_timeout_ms")
    streams_per_rank: int = option(0, take=_bits(32))
    threads: int = option(0, take=_bits(32))
    path: str = option("auto", take=_path)
    use_unix: bool = option(True, take=_no, field="no_unix")
    use_ucx: bool = option(True, take=_no, field="no_ucx")
    checksums: bool = option(True, take=_no, field="no_checksums")
    trust_containers: bool = option(False, take=_yes)
    trust_other_users: bool = option(False, take=_yes)
