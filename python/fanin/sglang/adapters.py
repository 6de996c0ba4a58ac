# SPDX-License-Identifier: Apache-2.0
"""Adapters for SGLang: pulled into a directory, then loaded by SGLang's own HTTP route.

::

    engine = SGLangEngine("http://127.0.0.1:30000", trainer="/shared/run")
    adapter = engine.load(run=0, step=120)       # POST /load_lora_adapter with a path
    ...                                          # requests with lora_path=adapter.name
    engine.unload(adapter.name)                  # POST /unload_lora_adapter, then deletes

The directory must be one that the engine sees: run this on the engine's host (of each node, if it
has several). What SGLang refuses, or would load and compute wrongly, is refused before any bytes
move. SGLang's routes that take tensors are not used: they unpickle what they are sent, so whoever
can reach them can run code in the engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fanin._http import FAILURES, Reply, base_url, checked_key, post_json
from fanin._options import PATHS, handed_on
from fanin._records import PullResult
from fanin.client import Client
from fanin.config import default_cache_dir
from fanin.engine.checks import AdapterFacts, Refuse, check_plain, read_facts, refusing
from fanin.engine.clients import is_outlived, remaining
from fanin.engine.directories import Lease, Places, incarnations_in
from fanin.engine.faults import refused_as_too_large
from fanin.errors import (
    ConnectionFailedError,
    FaninError,
    HostError,
    NotFoundError,
    PeerError,
    RequestError,
    StaleError,
    UnreachableError,
)
from fanin.info import Target, TrainerInfo, addresses_of, client_arguments, is_path, read_info
from fanin.names import AdapterName, run_of

_log = logging.getLogger("fanin.sglang")

_LOOK = 5.0  # seconds
LOAD_PATH = "/load_lora_adapter"
UNLOAD_PATH = "/unload_lora_adapter"
_TOO_LARGE = (
    "raise SGLangEngine's max_bytes; a larger file system to keep adapters in: docker run"
    " --shm-size, or another cache_dir"
)


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that the engine has.

    Args:
        name: as requests say it.
        run: the run that it is of.
        step: of the run.
        directory: of the pulled files. It stays until the adapter is unloaded.
        pull: the result of the pull.
        load_seconds: that the engine took to load it.
    """

    name: str
    run: str
    step: int
    directory: Path
    pull: PullResult
    load_seconds: float
    _lease: Lease = field(repr=False, compare=False)


def check_adapter(facts: AdapterFacts, run: str) -> None:
    """Whether SGLang loads an adapter, and computes with it what PEFT does.

    Does not block; any thread.

    Args:
        facts: of the adapter's configuration.
        run: what the errors name.

    Raises:
        RequestError: naming the field of the configuration.
    """
    config = facts.config
    refuse = refusing("SGLang", run)
    check_plain(facts, refuse)
    if config.get("use_rslora"):
        raise refuse(
            "use_rslora",
            "scales by lora_alpha / r, not by lora_alpha / sqrt(r) as use_rslora asks",
            "train without use_rslora, with lora_alpha multiplied by sqrt(r)",
        )
    if config.get("ensure_weight_tying"):
        raise refuse(
            "ensure_weight_tying",
            "leaves out the layers that ensure_weight_tying adds to those of target_modules",
            "train without ensure_weight_tying",
        )
    target = config.get("target_modules")
    if isinstance(target, str) and target not in ("all", "all-linear"):
        raise refuse(
            "target_modules",
            f"takes no pattern as target_modules ({target!r})",
            "give target_modules as a list of names, or 'all-linear'",
        )
    if "target_modules" in config and not target:
        raise refuse(
            "target_modules",
            "does not find out by itself which modules an adapter is of",
            "give target_modules as a list of names",
        )
    _check_patterns(config, refuse)


def _check_patterns(config: Mapping[str, Any], refuse: Refuse) -> None:
    """One scale is used for the whole adapter, so layers must not differ in alpha or rank."""
    for key, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        pattern = config.get(key)
        if isinstance(pattern, dict):
            other = [name for name, value in pattern.items() if value != config.get(default)]
            if other:
                raise refuse(
                    key,
                    f"scales all layers alike, and {key} gives {other[0]!r} another value than"
                    f" {default}",
                    f"train without {key}",
                )


class SGLangEngine:
    """One SGLang server on this host, and the adapters that were loaded into it.

    Any thread; loads of different steps may run at once.

    Args:
        url: ``http://host:port``.
        trainer: as :func:`fanin.info.addresses_of` takes it. A path is read at each load.
        cache_dir: absolute; directories are ``<cache_dir>/<world>/<run>/<prefix>-step<s>``. None:
            /dev/shm/fanin-<uid>.
        prefix: begins the adapters' names.
        api_key: SGLang's --api-key or --admin-api-key.
        server_name: demand this job's ranks.
        path: how bytes travel, as :class:`fanin.Client` takes it.
        max_bytes, trust_config: as :meth:`fanin.Client.pull_adapter` takes them.
        timeout: seconds for a load or unload.
        client: what else :class:`fanin.Client` takes, such as ``secret_file``, or ``tls_cert``,
            ``tls_key`` and ``tls_ca``. Without a secret or certificate: the environment's, else the
            secret that *trainer*'s nixl_info.json names.

    Raises:
        RequestError: an argument is wrong; a key that no header can have.
        TypeError: an argument that :class:`fanin.Client` does not take.
    """

    def __init__(
        self,
        url: str,
        *,
        trainer: Target,
        cache_dir: str | os.PathLike[str] | None = None,
        prefix: str = "policy",
        api_key: str | None = None,
        server_name: str | None = None,
        path: str = "auto",
        max_bytes: int | None = None,
        trust_config: bool = False,
        timeout: float = 60.0,
        **client: Any,
    ) -> None:
        self._given = handed_on("SGLangEngine", Client, client, "world_id")
        self.url = base_url(url)
        AdapterName(prefix, "0", 0)
        if path not in PATHS:
            raise RequestError.make(f"path {path!r} is unknown", "give one of " + ", ".join(PATHS))
        root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
        if not root.is_absolute():
            raise RequestError.make(f"cache_dir {root} is not absolute", "give an absolute path")
        self.prefix = prefix
        self.timeout = timeout
        self._trainer = trainer
        self._server_name = server_name
        self._path = path
        self._max_bytes = max_bytes
        self._trust_config = trust_config
        self._api_key = checked_key(api_key)
        self._places = Places(root)
        self._lock = threading.Lock()
        self._loaded: dict[str, LoadedAdapter] = {}
        self._doubtful: dict[str, Lease] = {}
        self._busy: set[str] = set()

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """What was loaded and not unloaded, the oldest first."""
        with self._lock:
            return list(self._loaded.values())

    # ---------------------------------------------------------------- load

    def load(
        self, run: str | int, step: int, *, pinned: bool = False, timeout: float | None = None
    ) -> LoadedAdapter:
        """Pulls exactly *step* of *run* and has the engine load it as ``<prefix>-run<r>-step<s>``.

        An adapter that this object has loaded already is returned as it is, if it is of the
        trainer's present launch or no rank answers. One of an earlier launch is unloaded first.
        Blocks at most *timeout* and a little.

        Args:
            run: ``0``, ``"0"`` or ``"lora:0"``.
            step: this very step.
            pinned: SGLang keeps the adapter in its batch.
            timeout: seconds for all; None: the engine's.

        Returns:
            The adapter that the engine has.

        Raises:
            RequestError: SGLang cannot use the adapter or refuses it. The directory is gone then.
            UnreachableError: the engine does not answer. It may have the adapter or not: the
                directory stays until :meth:`load` or :meth:`unload` of that name succeeds.
            FaninError: what :meth:`fanin.Client.pull_adapter` raises.
        """
        name = AdapterName(self.prefix, run_of(run), step)
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        with self._exclusive(str(name)):
            with self._lock:
                known = self._loaded.get(str(name))
            if known is not None and self._stands(known, deadline):
                return known
            if known is not None:
                self._unload(known, deadline)
            self._settle(str(name), deadline)
            lease, pulled = self._pull(name, deadline)
            return self._register(name, lease, pulled, pinned, deadline)

    def _pull(self, name: AdapterName, deadline: float) -> tuple[Lease, PullResult]:
        info = self._resolve()
        with self._client(info, info.world_id) as client:
            client.connect(info.addresses, timeout=remaining(deadline))
            world = _world_of(client)
            facts = read_facts(
                client.catalog(name.run, timeout=remaining(deadline)),
                client.metadata(name.run, timeout=remaining(deadline)),
            )
            check_adapter(facts, name.run)
            path = self._places.choose(
                *(world, name.run, name.prefix, name.step),
                lambda then: is_outlived(client, name.run, then, deadline),
            )
            lease = self._places.lease(path, deadline)
            try:
                pulled = client.pull_adapter(
                    name.run,
                    path,
                    step=name.step,
                    timeout=remaining(deadline),
                    max_bytes=self._max_bytes,
                    trust_config=self._trust_config,
                )
                if pulled.world_id != world:
                    raise StaleError.make(
                        "the trainer was started again while its adapter was pulled", "load again"
                    )
                _check_written(path, name.run)
            except ConnectionFailedError as error:
                _delete(lease)
                raise refused_as_too_large(error, _TOO_LARGE) from None
            except BaseException:
                _delete(lease)
                raise
            self._places.spend(path, world, name.run, name.prefix, name.step)
        return lease, pulled

    def _stands(self, known: LoadedAdapter, deadline: float) -> bool:
        """Whether no other launch of the trainer is known to have followed that of *known*."""
        try:
            info = self._resolve()
            if info.world_id not in (None, known.pull.world_id):
                return False
            with self._client(info, None) as client:
                client.connect(info.addresses, timeout=min(_LOOK, remaining(deadline)))
                same = _world_of(client) == known.pull.world_id
                then = incarnations_in(known.directory) or {}
                return same and not is_outlived(client, known.run, then, deadline)
        except FaninError as error:
            _log.info("%s is here already: %s", known.name, error)
            return error.name != "FANIN_ERR_WORLD"  # several launches: the pull says more

    def _client(self, info: TrainerInfo, world_id: str | None) -> Client:
        return Client(
            server_name=self._server_name or info.server_name,
            world_id=world_id,
            path=self._path,
            **client_arguments(info, self._given),
        )

    def _resolve(self) -> TrainerInfo:
        trainer = self._trainer
        if isinstance(trainer, TrainerInfo):
            return trainer
        if isinstance(trainer, os.PathLike) or (isinstance(trainer, str) and is_path(trainer)):
            return read_info(trainer)
        return TrainerInfo(addresses_of(trainer))

    def _register(
        self, name: AdapterName, lease: Lease, pulled: PullResult, pinned: bool, deadline: float
    ) -> LoadedAdapter:
        body = {"lora_name": str(name), "lora_path": str(lease.path), "pinned": pinned}
        started = time.monotonic()
        try:
            reply = self._post(LOAD_PATH, body, deadline)
        except BaseException:
            with self._lock:
                self._doubtful[str(name)] = lease
            raise
        if not _succeeded(reply):
            _delete(lease)
            raise RequestError.make(
                f"{self.url} did not load {name}: HTTP {reply.status}: {reply.reason}",
                _advice(reply),
                address=self.url,
            )
        took = time.monotonic() - started
        adapter = LoadedAdapter(str(name), name.run, name.step, lease.path, pulled, took, lease)
        with self._lock:
            self._loaded[str(name)] = adapter
        return adapter

    # -------------------------------------------------------------- unload

    def unload(self, name: str, *, timeout: float | None = None) -> None:
        """Has the engine forget the adapter, then deletes its directory.

        SGLang takes no new request for the adapter, and answers when the running ones have ended.
        An engine that was started again does not know the name any more, and has forgotten the
        adapter. A directory that cannot be deleted is logged, and tried again with the next. Blocks
        at most *timeout* and a little.

        Args:
            name: as :meth:`load` gave it.
            timeout: seconds; None: the engine's.

        Raises:
            NotFoundError: this object has not loaded it.
            RequestError: the engine refuses. The adapter counts as loaded and the directory stays.
            UnreachableError: the engine does not answer. The adapter counts as loaded and the
                directory stays.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        with self._exclusive(name):
            if self._settle(name, deadline):
                return
            with self._lock:
                adapter = self._loaded.get(name)
            if adapter is None:
                raise NotFoundError.make(
                    f"{name} was not loaded here", "give the name of a loaded adapter", key=name
                )
            self._unload(adapter, deadline)

    def _unload(self, adapter: LoadedAdapter, deadline: float) -> None:
        self._forget(adapter.name, deadline)
        with self._lock:
            del self._loaded[adapter.name]
        _delete(adapter._lease)

    def retire(self, run: str | int, keep: int, *, timeout: float | None = None) -> list[str]:
        """Unloads all adapters of *run* but those of the *keep* highest steps.

        Blocks as :meth:`unload`, once for each. The first failure ends it.

        Args:
            run: whose adapters.
            keep: how many stay.
            timeout: seconds for each; None: the engine's.

        Returns:
            The names of those that were unloaded.

        Raises:
            FaninError: as :meth:`unload`.
        """
        wanted = run_of(run)
        mine = sorted((a for a in self.loaded if a.run == wanted), key=lambda a: a.step)
        leaving = [adapter.name for adapter in mine[: max(len(mine) - max(keep, 0), 0)]]
        for name in leaving:
            self.unload(name, timeout=timeout)
        return leaving

    def _settle(self, name: str, deadline: float) -> bool:
        """Ends the doubt about a load that got no answer. True: there was one."""
        with self._lock:
            lease = self._doubtful.get(name)
        if lease is None:
            return False
        self._forget(name, deadline)
        with self._lock:
            del self._doubtful[name]
        _delete(lease)
        return True

    def _forget(self, name: str, deadline: float) -> None:
        reply = self._post(UNLOAD_PATH, {"lora_name": name}, deadline)
        gone = reply.status in (400, 404) and any(
            words in reply.reason.lower() for words in ("not loaded", "not found", "does not exist")
        )
        if not _succeeded(reply) and not gone:
            raise RequestError.make(
                f"{self.url} did not unload {name}: HTTP {reply.status}: {reply.reason}",
                "unload it again later",
                address=self.url,
            )

    # ------------------------------------------------------------- helpers

    def _post(self, path: str, body: Mapping[str, Any], deadline: float) -> Reply:
        try:
            reply = post_json(self.url, path, body, deadline=deadline, api_key=self._api_key)
        except FAILURES as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise UnreachableError.make(
                f"{self.url}{path}: {why}",
                "check that the engine runs, then try again",
                address=self.url,
            ) from error
        if reply.status >= 500:
            raise ConnectionFailedError.make(
                f"{self.url}{path}: HTTP {reply.status}: {reply.reason}",
                "look into the engine's log, then try again",
                address=self.url,
            )
        return reply

    @contextlib.contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        """One load or unload of a name at a time."""
        with self._lock:
            if name in self._busy:
                raise RequestError.make(
                    f"{name} is being loaded or unloaded by another thread", "wait for it"
                )
            self._busy.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(name)


def _delete(lease: Lease) -> None:
    """Deletes the directory, which the engine does not have: what fails is no failure of the call,
    and is tried again with the next one."""
    try:
        lease.release(delete=True)
    except HostError as error:
        _log.warning("%s", error)


def _world_of(client: Client) -> str:
    """The world of the ranks that are connected, "" if none is."""
    return next((rank.world_id for rank in client.ranks() if rank.connected), "")


def _succeeded(reply: Reply) -> bool:
    body = reply.json()
    said = body.get("success", True) if isinstance(body, dict) else True
    return reply.status == 200 and said is not False


def _advice(reply: Reply) -> str:
    if reply.status == 404:
        return "check the URL, and that this SGLang has /load_lora_adapter"
    if reply.status in (401, 403):
        return "give the engine's api_key"
    return "start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules that fit"


def _check_written(path: Path, run: str) -> None:
    """The check once more, of the configuration that the engine will read."""
    try:
        config = json.loads((path / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise HostError.make(f"{path}: {error}", "check the disk") from error
    if not isinstance(config, dict):
        raise PeerError.make(f"{path}: adapter_config.json is no object", "look at the trainer")
    config.setdefault("target_modules", None)
    check_adapter(AdapterFacts(config, None, None, 0, ""), run)
