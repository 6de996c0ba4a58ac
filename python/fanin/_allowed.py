# SPDX-License-Identifier: Apache-2.0
"""Which trainers a request may name: what the configuration lists as ``allow_trainers``.

An engine answers whoever reaches its port. Without a list, and without an API key, a request that
names a trainer would let anybody choose whose weights the engine serves, and which of this host's
files are read as a ``nixl_info.json``.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence

from fanin.errors import RequestError
from fanin.info import addresses_of, is_path, split_address

ANY = "any"
VARIABLE = "FANIN_ALLOW_TRAINERS"
_AUTH = -303  # FANIN_ERR_AUTH
_FORMS = "networks, hosts, host:port, absolute paths, or any"


def parse(value: object) -> tuple[str, ...]:
    """The entries of a list, or of a text with commas. Raises ValueError naming the forms.

    ``any``; a network in numbers (``10.0.0.0/8``, ``127.0.0.1``); a host by its name, or a
    ``host:port``; an absolute path: that ``nixl_info.json``, or all below that directory.
    """
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Iterable) or not all(isinstance(item, str) for item in items):
        raise ValueError(_FORMS)
    entries = tuple(item.strip() for item in items)
    if not entries or not all(_is_entry(entry) for entry in entries):
        raise ValueError(_FORMS)
    return entries


def _is_entry(entry: str) -> bool:
    if entry == ANY or entry.startswith("/") or _network(entry) is not None:
        return True
    try:
        split_address(entry if ":" in entry else f"{entry}:1")
    except RequestError:
        return False
    return True


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(entry)
    except ValueError:
        return None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return found if mapped is None else mapped


def _admits_address(entry: str, address: str) -> bool:
    host, port = split_address(address)
    network, number = _network(entry), _address(host)
    if network is not None:
        return number is not None and number.version == network.version and number in network
    if entry.startswith("/"):
        return False
    if ":" not in entry:
        return host.lower() == entry.lower()
    name, wanted = split_address(entry)
    same = number == _address(name) if number is not None else host.lower() == name.lower()
    return same and port == wanted


def _admits_path(entry: str, path: str) -> bool:
    if not entry.startswith("/"):
        return False
    allowed = os.path.realpath(entry)
    try:
        real = os.path.realpath(path)
    except ValueError:  # a character that no path has
        return False
    return real == allowed or os.path.commonpath((allowed, real)) == allowed


def admits(entries: Sequence[str], path: str | None, addresses: Sequence[str]) -> bool:
    """Whether a trainer may be named: by the path, or if there is none, by all of its addresses."""
    if ANY in entries:
        return True
    if path is not None:
        return any(_admits_path(entry, path) for entry in entries)
    return bool(addresses) and all(
        any(_admits_address(entry, address) for entry in entries) for address in addresses
    )


def check(
    entries: Sequence[str], text: str, path: str | None, addresses: Sequence[str], else_: str = ""
) -> None:
    """Raises RequestError, of FANIN_ERR_AUTH, for a trainer that may not be named.

    text: the trainer, for the message. else_: what would do as well, for the remedy.
    """
    if not admits(entries, path, addresses):
        raise _refusal(f"takes no trainer {text} from", "trainer_addresses", else_)


def check_directory(entries: Sequence[str], path: str, else_: str = "") -> None:
    """:func:`check`, of a directory that a request has the engine write to."""
    if not admits(entries, path, ()):
        raise _refusal(f"writes to no directory {path} for", "save", else_)


def _refusal(what: str, key: str, else_: str) -> RequestError:
    return RequestError.make(
        f"this engine {what} a request",
        f"name it in {VARIABLE} (allow_trainers), or {ANY!r} there{else_}",
        key=key,
        code=_AUTH,
    )


def check_by_config(
    text: str, path: str | None, addresses: Sequence[str], environ: Mapping[str, str] = os.environ
) -> None:
    """:func:`check` where vLLM's or SGLang's own routes name a trainer, if there is a list.

    The engine's own trainer may be named besides. Both are those of
    :func:`fanin.config.inference_config`, of which nothing else is looked at. Blocks for reading
    the file that FANIN_CONFIG names. Raises ConfigError, too.
    """
    from fanin.config import inference_setting  # not above: it imports this module

    entries = inference_setting("allow_trainers", environ)
    if not entries:
        return
    own = inference_setting("trainer", environ)
    if own is not None and not is_path(own):
        own = ",".join(addresses_of(own))  # as *text* is written
    if text != own:
        check(entries, text, path, addresses)
