# SPDX-License-Identifier: Apache-2.0
"""A reader that hands on what it has read, so that a fleet reads each byte of the trainer once."""

from __future__ import annotations

import ctypes
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _ffi
from ._calls import Use
from ._library import c_string, checked, initialised
from ._log import log_target
from ._options import ClientOptions, ServerOptions, filled, networks, takes
from ._puller import Puller, c_addresses
from ._records import PullProgress, PullResult
from ._route import route_address
from ._tensors import PackedTensors, Shard
from .errors import FaninError, RequestError
from .info import split_address
from .server import Stream

__all__ = ["Relay", "RelayStats"]

#: Numbers, by name: see :meth:`Relay.stats`.
RelayStats = dict[str, int]

# Exceptions of a signal's handler, one right after the other.
_AT_ONCE = 8
_NO_WORLD = bytes(15) + b"\1"  # the relay takes the trainer's
# What it serves by as it reads; on this host the kernel says who asks.
_HERE = ("secret_file", "use_ucx", "trust_containers")
_CERTIFICATE = ("tls_cert", "tls_key", "tls_ca")


@dataclass(frozen=True)
class RelayOptions(ClientOptions):
    """What :class:`fanin.Relay` is told: what a client is, and

    Args:
        network: Networks of the fleet's hosts, with commas ("10.0.0.0/8"): listens on this host's
            address on the way to the trainer, and hands on to readers there. They need the secret
            or certificates that the trainer has. None: hands on to readers of this host alone.
        trusted_network: Readers in *network* may read by RDMA, and could then write the memory.
        place: Where this reader is: site, or site/rack, of ASCII letters, digits, '.', '-' and '_'.
            Readers of different sites hand nothing on to each other: each site takes a step from
            the trainer. "": in the site of all readers that say no place. None: as FANIN_PLACE in
            the environment says.
        lease: Most seconds that :meth:`fanin.Relay.release` and the next pull wait for readers.
    """

    network: str | None = None
    trusted_network: bool = False
    place: str | None = None
    lease: float = 1.0


class Relay(Puller):
    """Pulls as a :class:`Client`, and hands on what it has pulled to others that want the same.

    It also takes what it wants from relays that pull all tensors of the run whole.

    Of each part of a model one reader takes the bytes from the trainer. The others take them from
    any reader that has them. So a fleet has a step in about the time of one pull, and each byte
    leaves the trainer about once. The trainer's rank 0 keeps the list of readers. No reader needs
    an option of another one, and the trainer needs none.

    A reader hands a part on only when the trainer has confirmed it. A reader that dies, stops or is
    slow delays no other for long: the others take its parts over, and the trainer is always the
    last source.

    After :meth:`pull_into` the memory is lent to other readers until the next one, :meth:`release`
    or :meth:`close`. Do not write it before. Adapters are too small for this: pull them by a
    client.

    One thread at a time uses a relay, as a client. :meth:`cancel`, :meth:`close` and :meth:`stats`
    may be called from any thread. In a forked child every method raises :class:`ProcessError`.

    Raises:
        RequestError: an argument is wrong; no address of this host lies in *network*.
        HostError: the C library cannot be loaded; no memory, no sockets.
    """

    _kind = "relay"

    @takes(RelayOptions)
    def __init__(self, options: RelayOptions) -> None:
        super().__init__()
        self._lent: list[object] = []
        array = c_addresses(options.addresses or ())
        if not array:
            raise RequestError.make("no addresses are given", 'give a list: ["host:port", ...]')
        client = filled(_ffi.ClientConfig, self._library.fanin_client_config_init, options)
        client.log, client.log_cookie = log_target("client")
        config = initialised(_ffi.RelayConfig, self._library.fanin_relay_config_init)
        config.client = ctypes.pointer(client)
        if options.place is not None:
            config.place = c_string(options.place, "place")
        serving = _serving(options)
        server = filled(_ffi.ServerConfig, self._library.fanin_server_config_init, serving)
        server.log, server.log_cookie = log_target("server")
        config.server = ctypes.pointer(server)
        handle, create = ctypes.c_void_p(), self._library.fanin_relay_create
        checked(create, ctypes.byref(config), array, len(array), ctypes.byref(handle))
        self._made(handle)

    def pull_into(
        self,
        run: str | int,
        tensors: Mapping[str, Any] | Iterable[Shard] | PackedTensors,
        *,
        step: int | None = None,
        at_least: int | None = None,
        timeout: float = 60.0,
        dtype: str | None = None,
        verify: bool = False,
        stream: Stream | None = None,
        max_bytes: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        rank_progress: Callable[[PullProgress], None] | None = None,
    ) -> PullResult:
        """As :meth:`Client.pull_into`, from the trainer and from other readers.

        Hands on each part as soon as it is proven, and goes on handing on after the return. Ends
        handing on what the pull before has read first, as :meth:`release`. Holds a reference to the
        tensors' memory as long as it is lent.

        After an exception of a call that had begun nothing is handed on any more. The arguments and
        what is raised are those of :meth:`Client.pull_into`. Others that hold all of it together
        bring a *step* that the trainer has passed, without *verify*.

        Args:
            rank_progress: called without the ranks, as bytes come from relays too.
            verify: compare what landed with digests that the trainer's ranks make, also of
                what relays brought.

        """
        packed, memory, options = self._filling(
            run, tensors, step, at_least, timeout, 0, dtype, stream, max_bytes, verify
        )
        function = self._library.fanin_relay_pull_into
        lent = (packed, memory)
        if isinstance(packed, PackedTensors):
            packed.touched()  # the library's relay knows no destination of a client's

        def into() -> tuple[Any, ...]:
            # Only here is it sure that no other call is under way. What is lent already stays so
            # if the library refuses this call.
            self._lent.append(lent)
            return function, packed.address, len(packed)

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress(done, total)
            if rank_progress is not None:
                rank_progress(PullProgress(done, total, (), None))

        listens = progress is not None or rank_progress is not None
        try:
            result = self._pull("pull_into", options, (tell if listens else None, None), into)
            del self._lent[: self._place_of(lent) or 0]
        except BaseException:
            self._take_back(lent)
            raise
        return result

    def _place_of(self, lent: object) -> int | None:
        return next((at for at, one in enumerate(self._lent) if one is lent), None)

    def _take_back(self, lent: object) -> None:
        """Who hears that the pull has failed may write the memory, even if the library's part went
        well: a callback has raised, or a signal's handler as it ended."""
        for _ in range(_AT_ONCE):  # so may the handler again
            if self._place_of(lent) is None:
                break  # the call was refused before it was under way, or it is done
            try:
                self.release()
            except FaninError:
                break  # it is closed, or another thread has begun a call
            except BaseException:
                continue  # what is raised already comes to the caller

    def release(self) -> None:
        """Stops handing on: afterwards the memory is the caller's again.

        Waits for readers at most the *lease*. They read the rest elsewhere. Does nothing if nothing
        is handed on.
        """

        def call(_: Use, handle: ctypes.c_void_p) -> None:
            self._library.fanin_relay_release(handle)
            self._lent.clear()

        self._alone("release", call)

    def stats(self) -> RelayStats:
        """Numbers of the last pull, but for the bytes, which count since the relay was made.

        Does not block; any thread.

        | name | |
        |---|---|
        | ``units``, ``landed`` | what is handed on at a time: all, and how many are here |
        | ``bytes_from_origin``, ``bytes_from_relays`` | read of the trainer, and of other readers |
        | ``bytes_handed_on`` | that others have read here, as far as they told |
        | ``late`` | units that came from another source than they were first asked of |
        | ``taken_over`` | units that another reader was to bring |
        | ``holders`` | other readers that want the same |
        | ``forbidden`` | 1: the trainer forbids relays, so nothing is handed on |

        Raises:
            StateError: it is closed.
        """
        stats = _ffi.RelayStats()
        stats.struct_size = ctypes.sizeof(stats)
        with self._handle_lock:
            self._library.fanin_relay_get_stats(self._require(), ctypes.byref(stats))
        return {name: getattr(stats, name) for name, *_ in stats._fields_ if name != "struct_size"}

    def _destroy(self) -> None:
        super()._destroy()
        self._lent.clear()


def _serving(options: RelayOptions) -> ServerOptions:
    """How others reach this reader."""
    alone: dict[str, Any] = {"world_id": _NO_WORLD, "rank": 0, "world_size": 1}
    alone["lease"] = options.lease
    if options.network is None:
        return ServerOptions(**alone, **{name: getattr(options, name) for name in _HERE})
    try:
        allowed = networks(options.network)
    except ValueError as error:
        raise RequestError.make(f"network is {options.network!r}", f"give {error}") from None
    own = route_address([split_address(address)[0] for address in options.addresses or ()])
    within = [ipaddress.ip_network(one) for one in allowed.split(",")]
    if own is None:
        raise RequestError.make(
            "the trainer is reached by this host's loopback, where no other host reaches this one",
            "leave out network, or give the trainer's address in a network",
        )
    if not any(ipaddress.ip_address(own) in one for one in within):
        raise RequestError.make(
            f"this host's address on the way to the trainer is {own}, "
            f"which is not in the network {allowed}",
            "name the network of the fleet's hosts",
        )
    return ServerOptions(
        bind=own,
        allow=allowed,
        open=not options.trusted_network,
        trusted_network=options.trusted_network,
        **alone,
        **{name: getattr(options, name) for name in (*_HERE, *_CERTIFICATE)},
    )
