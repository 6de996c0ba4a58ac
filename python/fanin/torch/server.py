# SPDX-License-Identifier: Apache-2.0
"""AdapterServer: a model's LoRA adapters, published from where they are trained."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fanin.errors import FaninError, NotFoundError, RequestError, StateError
from fanin.info import TrainerInfo, join_address, write_info
from fanin.server import Server, Stream, publication_of
from fanin.torch._config import active_adapters, bias_of, config_of, holder_of, metadata_of
from fanin.torch._names import NamesFunction
from fanin.torch._parameters import Change, Parameters, choose_adapter
from fanin.torch._world import (
    Ranks,
    as_fanin_error,
    base_port_for,
    choose_addresses,
    raise_first,
    report,
)
from fanin.torch._writes import count_steps

__all__ = ["AdapterServer"]

Run = str | int
Steps = int | Mapping[Run, int]


class _Source(NamedTuple):
    """What a run publishes: found and checked, not yet registered."""

    publication: str
    parameters: Parameters
    change: Change
    metadata: dict[str, str]


class _Run:
    """A run that is registered."""

    def __init__(self, source: _Source) -> None:
        self.publication = source.publication
        self.parameters = source.parameters
        self.step: int | None = None
        self.paused = False
        #: Its step is published, and its memory neither being written nor taken back.
        self.stands = False
        #: Recorded behind the last commit on its CUDA stream.
        self.committed: Any = None


def _source(
    run: Run, model: Any, adapter: str | None, names: NamesFunction | None, config: Any
) -> _Source:
    if not isinstance(model, torch.nn.Module):
        raise RequestError.make(
            f"the model is a {type(model).__name__}", "give the torch.nn.Module that PEFT made"
        )
    publication = publication_of(run)
    chosen = choose_adapter(model, adapter, active_adapters(holder_of(model)))
    fields = config_of(model, chosen, config)
    parameters = Parameters(model, chosen, bias_of(fields), names)
    return _Source(publication, parameters, parameters.look(), metadata_of(model, fields))


def _first_device(model: Any) -> int | None:
    """The CUDA device of the model's parameters, None without one."""
    for param in model.parameters() if isinstance(model, torch.nn.Module) else ():
        if param.is_cuda:
            return int(param.device.index)
    return None


def _finish(server: Server, process: int) -> None:
    if os.getpid() == process:
        server.close()


class AdapterServer:
    """Publishes the LoRA adapters of a model by reference: workers read the trainer's own memory.

    To be made on every rank, at the same time, after the model is sharded. Parameters are plain
    tensors or DTensors of any mesh and placements but Partial, in host memory or on CUDA devices;
    each rank lends the part that it holds. ::

        server = AdapterServer(model, base_port=6000)
        server.publish(0)
        ...
        with server.updating(step):
            optimizer.step()

    :param model: the module that PEFT made, or one that holds parameters named like PEFT's.
    :param run: the run whose adapter this is; None: no run yet, see :meth:`add_run`.
    :param base_port: rank r listens on ``base_port + r``, or on ``base_port`` plus its rank on
        its host with ``port_by="local"``; 0: any free port.
    :param name: engines must ask for servers of this name.
    :param group: the process group whose ranks make up the trainer; default: all, or this process
        alone where torch.distributed is not initialised. Two small objects are gathered.
    :param bind: numeric address to listen on. Default: 127.0.0.1 on one host, unless ``allow``
        is given; else ``advertise``, or this host's address on the way to MASTER_ADDR.
    :param advertise: the address that engines are told; default: ``bind``.
    :param allow: the networks that may read, "10.0.0.0/8,fd00::/8". Needed to listen on anything
        but 127.x.
    :param trusted_network: also offer RDMA to the networks allowed, whose remote keys permit
        writing.
    :param lease: seconds that readers can delay an update, at most.
    :param snapshot: publish copies, so that readers never delay training and long reads are not
        overtaken; costs twice the adapter's memory.
    :param cast: "BF16" or "F16": snapshots of F32 parameters are converted. Needs ``snapshot``.
    :param names: what is published of each parameter, see :data:`fanin.torch.NamesFunction`.
    :param adapter: PEFT's name of the adapter; default: the active one, or the only one.
    :param config: PEFT's configuration or a dict; default: the model's own. A dict without
        ``peft_type`` needs lora_alpha, r and base_model_name_or_path.
    :param use_ucx: False: never load UCX; the stream path, and CUDA IPC, only.

    Blocks until all ranks have come here. If one rank fails, all raise, naming it.

    :raises RequestError: no LoRA parameters, several adapters, tensors that cannot be published
        (Partial placements, FSDP1, meta, sparse, quantized), no configuration, addresses that
        other hosts cannot reach, no allow-list.
    :raises StateError: parameters are unsharded or offloaded now.
    :raises FaninError: what :class:`fanin.Server` raises (a port in use, limits, memory).

    Use one run from one thread at a time. Registered storage is kept allocated until it is
    replaced. A context manager; also closed at exit, before or after the process group is
    destroyed. In a forked child it raises ProcessError and touches nothing.
    """

    def __init__(
        self,
        model: Any,
        *,
        run: Run | None = "0",
        base_port: int = 6000,
        name: str = "lora_param_server",
        group: Any = None,
        bind: str | None = None,
        advertise: str | None = None,
        port_by: str = "global",
        allow: str | None = None,
        trusted_network: bool = False,
        lease: float = 1.0,
        snapshot: bool = False,
        cast: str | None = None,
        names: NamesFunction | None = None,
        adapter: str | None = None,
        config: Any = None,
        use_ucx: bool = True,
    ) -> None:
        self._model = model
        self._runs: dict[str, _Run] = {}
        self._last: dict[str, int] = {}  # steps, also of runs that were removed
        self._snapshot = snapshot
        self._cast = cast
        ranks = Ranks(group, _first_device(model))
        source: _Source | None = None
        server: Server | None = None
        error: FaninError | None = None

        try:
            if cast is not None and not snapshot:
                raise RequestError.make(
                    f"cast is {cast!r} without snapshot", "give snapshot=True as well"
                )
            if run is not None:
                source = _source(run, model, adapter, names, config)
        except Exception as caught:
            error = as_fanin_error(caught)
            error.__cause__ = caught if caught is not error else None
        reports = ranks.gather(report(error))
        raise_first([item.error for item in reports], ranks.rank, "describe its parameters")

        world_id: bytes = reports[0].world_id
        address = ""
        try:
            listening = choose_addresses(reports, bind, advertise, allow)
            server = Server(
                world_id=world_id,
                rank=ranks.rank,
                world_size=ranks.size,
                name=name,
                bind=listening.bind,
                allow=allow,
                base_port=base_port_for(reports, ranks.rank, base_port, port_by),
                open=listening.open,
                trusted_network=trusted_network,
                use_ucx=use_ucx,
                lease=lease,
            )
            address = join_address(listening.advertise, server.port)
            if source is not None:
                self._register(server, source)
        except Exception as caught:
            error = as_fanin_error(caught)
            error.__cause__ = caught if caught is not error else None
        try:
            answers = ranks.gather((error, address))
            raise_first([item[0] for item in answers], ranks.rank, "start its server")
        except BaseException:
            if server is not None:
                server.close(0)
            raise
        assert server is not None
        self._server = server
        self._rank = ranks.rank
        self._world_id = world_id.hex()
        self._addresses = [item[1] for item in answers]
        self._finalizer = weakref.finalize(self, _finish, server, os.getpid())
        count_steps(self, AdapterServer._lent)

    # -- what is published ------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self, step: Steps) -> Iterator[None]:
        """Around the statements that write the parameters; on every rank.

        ``step`` is the step that the run is at afterwards, or ``{run: step}`` where several are
        written. On entry the runs' readers are waited for, at most ``lease`` seconds (not with
        snapshots), and so is the last commit's CUDA work. On exit every parameter is resolved
        anew, what moved is registered, and the step is published: when the current CUDA stream of
        the parameters' device has got there, without waiting for it. An exception inside aborts
        the update: the run is unreadable (the last snapshot stays readable) until the next one.

        :raises NotFoundError: no such run.
        :raises RequestError: a step that is not above the last; parameters that cannot be
            published. The update is aborted.
        :raises StateError: the run is paused; parameters are unsharded or offloaded, the update
            is aborted; parameters were written outside of :meth:`updating` since the last step,
            which is withdrawn (not with snapshots). Writes that PyTorch does not count are not
            seen: through ``.data`` and NumPy, by kernels that are given a pointer.
        """
        runs = self._chosen(step)
        self._refuse_written(run for run, _ in runs)
        with self._rewriting(runs):
            yield
            self._tell_all(runs, [run.parameters.look() for run, _ in runs])

    def publish(self, step: Steps) -> None:
        """Publishes the parameters as they are, as ``step`` or ``{run: step}``.

        For the first step, and the one at which training is resumed; on every rank, and with
        ``snapshot=True`` also after ``optimizer.step()``. Blocks and raises as :meth:`updating`;
        the last step stays readable where parameters are refused, unless they were written or their
        memory is gone.
        """
        runs = self._chosen(step)
        self._refuse_written(run for run, _ in runs)
        changes = self._look([run for run, _ in runs])
        with self._rewriting(runs):
            self._tell_all(runs, changes)

    def pause(self, run: Run | None = None, reason: str = "trainer memory offloaded") -> None:
        """Before the parameters' memory is offloaded, put to sleep or loaded from a checkpoint.

        Waits for readers, at most ``lease`` seconds. Until :meth:`resume` pulls fail with
        ``reason`` (a snapshot stays readable), no memory is read and no storage is held on to.
        ``run`` None: all runs. On every rank.

        :raises NotFoundError: no such run.
        :raises StateError: an update is open; written outside of :meth:`updating` (nothing is
            paused, and the step is withdrawn: pause again).
        """
        runs = self._named(run)
        self._refuse_written(runs)
        for one in runs:
            self._wait_for_commit(one)
            self._server.pause(one.publication, reason)
            one.paused = True
            one.parameters.release()

    def resume(self, run: Run | None = None, step: int | None = None) -> None:
        """Ends :meth:`pause` when the parameters are back; on every rank.

        Without ``step`` their values must be those of before: the run is readable again at its
        step. With it they may be others, published as ``step``, and the old step is never shown
        again. ``run`` None: all runs. If parameters are not there the runs stay paused.

        :raises NotFoundError: no such run.
        :raises StateError: it is not paused; parameters are unsharded or still offloaded.
        :raises RequestError: a step that is not above the last.
        """
        runs = self._named(run)
        for one in runs:
            if not one.paused:
                raise StateError.make(
                    f"{one.publication} is not paused", "pause(run) it before", key=one.publication
                )
            if step is not None:
                self._check_step(one, step)
        changes = [one.parameters.look() for one in runs]
        for one, change in zip(runs, changes, strict=True):
            self._tell(one, change)
            if step is not None and one.step is not None:
                # What was published must not be readable from memory that holds other values.
                self._server.abort_update(one.publication)
            self._server.resume(one.publication)
            one.paused = False
            if step is None:
                self._lend(one)
        if step is not None:
            with self._rewriting([(one, step) for one in runs]):
                pass

    def add_run(
        self,
        run: Run,
        model: Any = None,
        *,
        adapter: str | None = None,
        names: NamesFunction | None = None,
        config: Any = None,
    ) -> None:
        """The hook for a run that is created: registers its parameters, on every rank.

        ``model`` is any module that holds them, default the one that the server was made for; the
        other arguments are those of the constructor. Readable from the run's first
        :meth:`publish` or :meth:`updating` on. Does not block.

        :raises RequestError: the run is there already; the constructor's reasons.
        """
        source = _source(run, self._model if model is None else model, adapter, names, config)
        if source.publication in self._runs:
            raise RequestError.make(
                f"run {source.publication} is there already",
                "remove_run() it before",
                key=source.publication,
                code=-101,
            )
        self._register(self._server, source)

    def remove_run(self, run: Run) -> None:
        """The hook for a run that is deleted: on return none of its memory is read any more.

        Blocks until its readers are done, at most ``lease`` seconds. A run that is added under
        the same name must go on above the last step.

        :raises NotFoundError: no such run.
        """
        (one,) = self._named(run)
        self._server.remove(one.publication)
        del self._runs[one.publication]

    # -- who and where ----------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """Where the ranks listen, ``"host:port"``, rank by rank."""
        return list(self._addresses)

    @property
    def world_id(self) -> str:
        """32 hexadecimal digits that name this launch of the trainer, the same on all ranks."""
        return self._world_id

    @property
    def server(self) -> Server:
        """The server beneath; it is this object's to close."""
        return self._server

    @property
    def runs(self) -> dict[str, int | None]:
        """The runs, ``"lora:<run>"``, and their last published steps (None: none yet)."""
        return {run.publication: run.step for run in self._runs.values()}

    def write_info(
        self, directory: str | os.PathLike[str], run: Run | None = None, step: int | None = None
    ) -> Path | None:
        """Rank 0 writes ``nixl_info.json`` and the marker ``STABLE``; returns the file's path.

        On the other ranks returns None. ``run`` None: the only one, or none is named; ``step``
        None: its last published step. Blocks until all is on disk.

        :raises NotFoundError: no such run.
        :raises HostError: the directory cannot be written.
        """
        if self._rank != 0:
            return None
        chosen: _Run | None = None
        if run is not None:
            (chosen,) = self._named(run)
        elif len(self._runs) == 1:
            (chosen,) = self._runs.values()
        if step is None and chosen is not None:
            step = chosen.step
        info = TrainerInfo(
            addresses=tuple(self._addresses),
            world_id=self._world_id,
            run=None if chosen is None else chosen.publication.partition(":")[2],
            server_name=self._server.name,
            step=step,
        )
        return write_info(directory, info)

    def stats(self) -> Any:
        """The counters of :meth:`fanin.Server.stats`."""
        return self._server.stats()

    # -- the end ----------------------------------------------------------------------------

    def close(self, drain: float = 1.0) -> None:
        """Stops serving; running pulls may end for ``drain`` seconds. Needs no other rank.

        On return no memory of the model is read any more. Called again it does nothing.
        """
        if self._finalizer.detach() is not None:
            self._server.close(drain)
        self._runs.clear()

    def __enter__(self) -> AdapterServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------

    def _lent(self, param: Any) -> list[Any]:
        """The tensors in which the runs publish the memory of *param* by reference now."""
        lent = (run.parameters.lent(param) for run in self._runs.values())
        return [tensor for tensor in lent if tensor is not None]

    def _register(self, server: Server, source: _Source) -> None:
        server.put(source.publication, source.change.shards)
        try:
            server.set_metadata(source.publication, source.metadata)
        except BaseException:
            server.remove(source.publication)
            raise
        source.parameters.accept(source.change)
        self._runs[source.publication] = _Run(source)

    def _named(self, run: Run | None) -> list[_Run]:
        if run is None:
            return list(self._runs.values())
        publication = publication_of(run)
        if publication not in self._runs:
            known = ", ".join(self._runs) or "none"
            raise NotFoundError.make(
                f"there is no run {publication}", f"the runs are: {known}", key=publication
            )
        return [self._runs[publication]]

    def _chosen(self, step: Steps) -> list[tuple[_Run, int]]:
        if isinstance(step, Mapping):
            runs = [(self._named(run)[0], at) for run, at in step.items()]
            if len({one.publication for one, _ in runs}) < len(runs):
                raise RequestError.make(f"a run is named twice in {dict(step)}")
        elif len(self._runs) == 1:
            runs = [(one, step) for one in self._runs.values()]
        else:
            known = ", ".join(self._runs) or "none"
            raise RequestError.make(
                f"a step alone says nothing with these runs: {known}", "give {run: step}"
            )
        for one, at in runs:
            if one.paused:
                raise StateError.make(
                    f"{one.publication} is paused", "resume(run) it before", key=one.publication
                )
            self._check_step(one, at)
        return runs

    def _check_step(self, run: _Run, step: int) -> None:
        """Before anything is written, not when it has been."""
        if isinstance(step, bool) or not hasattr(type(step), "__index__") or step < 0:
            raise RequestError.make(f"step {step!r} is no step", "give an integer from 0 on")
        last = self._last.get(run.publication, -1)
        if step <= last:
            raise RequestError.make(
                f"step {step} of {run.publication} is not above its last step {last}",
                "count steps upwards, also of a run that was removed and added again",
                key=run.publication,
            )

    def _refuse_written(self, runs: Iterable[_Run]) -> None:
        """Readers of the last step may have seen half of what was written outside of updates."""
        written = {run: paths for run in runs if (paths := run.parameters.written())}
        for run in written:
            self._withdraw(run)
        for run, paths in written.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            raise StateError.make(
                f"'{paths[0]}'{more} of {run.publication} was written outside of updating() after "
                f"step {run.step} was published: its readers may have got half of what was "
                "written. The step is withdrawn",
                "write parameters inside: with server.updating(step): optimizer.step(); or make "
                "the server with snapshot=True, which publishes copies",
                key=run.publication,
            )

    def _withdraw(self, run: _Run) -> None:
        """Nobody reads the run's memory any more, so whatever is there may be published next."""
        run.parameters.take_back()
        run.stands = False
        self._server.withdraw(run.publication)

    def _look(self, runs: list[_Run]) -> list[Change]:
        """What differs from what is registered. A step whose memory is gone is withdrawn."""
        try:
            return [run.parameters.look() for run in runs]
        except FaninError:
            for run in runs:
                if run.parameters.gone():
                    self._withdraw(run)
            raise

    def _wait_for_commit(self, run: _Run) -> None:
        """A commit whose CUDA work is under way would be withdrawn, and its step never seen."""
        if run.committed is not None and not self._snapshot:
            run.committed.synchronize()
            run.committed = None

    def _tell(self, run: _Run, change: Change) -> None:
        if change.shards:
            self._server.put(run.publication, change.shards, replace=True)
        for key in change.removed:
            self._server.remove(run.publication, key)
        run.parameters.accept(change)

    def _tell_all(self, runs: list[tuple[_Run, int]], changes: list[Change]) -> None:
        for (run, _), change in zip(runs, changes, strict=True):
            self._tell(run, change)

    @contextlib.contextmanager
    def _rewriting(self, runs: list[tuple[_Run, int]]) -> Iterator[None]:
        """Begins the runs' updates, and commits them at their steps when the body has ended.

        If anything raises, those that are not committed yet are aborted.
        """
        begun: list[_Run] = []
        written = {id(run) for run, _ in runs}
        shared = [
            (other, counts)
            for other in self._runs.values()
            if id(other) not in written
            for run, _ in runs
            if (counts := run.parameters.counts(other.parameters))
        ]
        try:
            for run, _ in runs:
                self._wait_for_commit(run)
                self._server.begin_update(run.publication)
                run.parameters.take_back()
                run.stands = False
                begun.append(run)
            yield
            for run, step in runs:
                self._commit(run, step)
                begun.remove(run)
        except BaseException:
            for run in begun:
                with contextlib.suppress(FaninError):
                    self._server.abort_update(run.publication)
            raise
        finally:
            for other, counts in shared:
                other.parameters.allow(counts)

    def _lend(self, run: _Run) -> None:
        if not self._snapshot and run.stands:
            run.parameters.lend()

    def _commit(self, run: _Run, step: int) -> None:
        devices = run.parameters.devices
        streams = [torch.cuda.current_stream(device) for device in devices]
        stream = None
        if streams:
            _order(streams[1:], streams[:1])
            stream = Stream(int(streams[0].cuda_stream), devices[0])
        self._server.commit(
            run.publication, step, snapshot=self._snapshot, cast=self._cast, stream=stream
        )
        run.step = self._last[run.publication] = int(step)
        run.stands = True
        self._lend(run)
        if streams:
            if self._snapshot:
                _order(streams[:1], streams[1:])
            run.committed = torch.cuda.Event()
            run.committed.record(streams[0])


def _order(before: list[Any], after: list[Any]) -> None:
    """Work that is put on the streams ``after`` from now on waits for what ``before`` hold now."""
    for stream in before:
        event = torch.cuda.Event()
        event.record(stream)
        for other in after:
            other.wait_event(event)
