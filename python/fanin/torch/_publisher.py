# SPDX-License-Identifier: Apache-2.0
"""What AdapterServer and WeightServer have in common: runs, their updates, the ranks' servers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fanin._options import Publishing, Serving, option, options_of
from fanin._served import publication_for
from fanin._tensors import Shard
from fanin.errors import FaninError, NotFoundError, RequestError, StateError, first_of
from fanin.info import TrainerInfo, join_address, secret_here, write_info
from fanin.names import MAX_STEP
from fanin.server import Server, Stream, publication_of
from fanin.torch._cast import Casting
from fanin.torch._names import NamesFunction
from fanin.torch._parameters import Change, Parameters
from fanin.torch._proof import AdapterProof, Proof
from fanin.torch._replicas import REFUSED, At
from fanin.torch._segments import tell_segments
from fanin.torch._world import (
    Ranks,
    as_fanin_error,
    base_port_for,
    choose_addresses,
    raise_first,
    report,
)
from fanin.torch._writes import count_steps

_log = logging.getLogger("fanin.torch")

_MOST = 16  # patches, as the library has it
_claims = threading.Lock()  # between looking whether a run is free and taking it

Run = str | int
Steps = int | Mapping[Run, int]
_Self = TypeVar("_Self", bound="Publisher")


class Source(NamedTuple):
    """What a run publishes: found and checked, not yet registered."""

    publication: str
    parameters: Parameters
    change: Change
    metadata: dict[str, str]
    describe: Callable[[], dict[str, str]]
    """Gives the metadata as the model has it now."""
    others: tuple[Shard, ...] = ()
    """Tensors of which this rank holds nothing."""
    kept: frozenset[str] = frozenset()
    """Names of F32 tensors that the model, on any rank, keeps so."""
    ties: tuple[tuple[str, str], ...] = ()
    """Names of tensors that the configuration ties and torch holds apart."""
    scale_of: Callable[[str], float] | None = None
    """Of an adapter, what engines multiply the parameter of a path by."""
    deltas: int = 0
    """How many patches are kept."""


@dataclass(frozen=True)
class RankOptions(Serving, Publishing):
    """What the constructors take beside their own.

    Args:
        model: The module that is trained.
        base_port: Rank r listens on ``base_port + r``. 0: any free port.
        group: The process group whose ranks hold the model together. Default: all ranks, or this
            process alone where torch.distributed is not initialised.
        names: What is published of each tensor, see :data:`fanin.torch.NamesFunction` and
            :mod:`fanin.torch.names`. Default: what transformers, or PEFT, would save; of other
            models the tensors that are stored.
    """

    model: Any
    _: KW_ONLY
    base_port: int = option(6000)
    group: Any = option(None)
    names: NamesFunction | None = option(None)


class OneRun:
    """A run that is registered."""

    def __init__(self, source: Source) -> None:
        self.publication = source.publication
        self.parameters = source.parameters
        #: What the library was told of it.
        self.metadata = source.metadata
        self.describe = source.describe
        self.kept = source.kept
        self.ties = source.ties
        self.deltas = source.deltas
        self.step: int | None = None
        #: The step that is published now or was last, and how often it was tried before.
        self.at = (-1, 0)
        #: All of its replicas are compared before this step.
        self.whole = False
        self.paused = False
        #: The step of the update that is open.
        self.writing: int | None = None
        #: Its step is published, and its memory neither being written nor taken back.
        self.stands = False
        #: Recorded behind the last commit on its CUDA stream.
        self.committed: Any = None


def first_device(model: Any) -> int | None:
    """The CUDA device of the model's parameters, None without one."""
    for param in model.parameters() if isinstance(model, torch.nn.Module) else ():
        if param.is_cuda:
            return int(param.device.index)
    return None


def _finish(server: Server, process: int) -> None:
    if os.getpid() == process:
        server.close()


def refuse_uncallable(**given: Any) -> None:
    """RequestError: an argument is neither a function nor None."""
    for key, one in given.items():
        if one is not None and not callable(one):
            raise RequestError.make(f"{key} is {one!r}", "give a function", key=key)


def cause_of(caught: Exception) -> FaninError:
    """An error of this package that can travel to other ranks, made from whatever was raised."""
    error = as_fanin_error(caught)
    error.__cause__ = caught if caught is not error else None
    return error


class Publisher:
    """Publishes runs of a model by reference; see the classes that are made of it."""

    #: The publication of a run.
    _publication = staticmethod(publication_of)

    def __init__(
        self, serving: RankOptions, name: str, prepare: Callable[[], Source | None]
    ) -> None:
        """Blocks until all ranks have come here. If one rank fails, all raise, naming it.

        prepare: describes the first run, None: there is none yet.
        """
        self._model = model = serving.model
        self._runs: dict[str, OneRun] = {}
        self._last: dict[str, int] = {}  # steps, also of runs that were removed
        #: The digests of what is trained, and the runs whose next step has to have some.
        self._proofs: dict[str, Proof] = {}
        self._unproven: set[str] = set()
        self._snapshot = serving.snapshot
        ranks = Ranks(serving.group, first_device(model))
        source: Source | None = None
        server: Server | None = None
        error: FaninError | None = None

        try:
            self._casting = Casting(serving.cast, serving.snapshot)
            self._deltas = self._checked_deltas(serving.deltas)
            source = prepare()
        except Exception as caught:
            error = cause_of(caught)
        reports = ranks.gather(report(error, source is not None))
        raise_first([item.error for item in reports], ranks.rank, "describe its parameters")
        world_id: bytes = reports[0].world_id
        self._ranks = ranks
        self._rank = ranks.rank
        self._world_id = world_id.hex()
        having = tuple(rank for rank, item in enumerate(reports) if item.has_run)
        #: The ranks that publish runs: those that began with one, or all.
        self._publishing = having or tuple(range(ranks.size))
        if source is not None:
            source = self._agreed(source)

        address = ""
        try:
            listening = choose_addresses(reports, serving.bind, serving.advertise, serving.allow)
            own = {
                "bind": listening.bind,
                "base_port": base_port_for(reports, ranks.rank, serving.base_port, serving.port_by),
            }
            server = Server(
                world_id=world_id,
                rank=ranks.rank,
                world_size=ranks.size,
                name=name,
                open=listening.open,
                **{one: getattr(serving, one) for one in options_of(Serving)} | own,
            )
            address = join_address(listening.advertise, server.port)
            if source is not None:
                self._register(server, source)
        except Exception as caught:
            error = cause_of(caught)
        segments = 0 if source is None else source.parameters.segments()
        try:
            answers = ranks.gather((error, address, segments))
            raise_first([item[0] for item in answers], ranks.rank, "start its server")
        except BaseException:
            if server is not None:
                server.close(0)
            raise
        assert server is not None
        self._server = server
        self._secret_file = secret_here(vars(serving))
        self._addresses = [item[1] for item in answers]
        tell_segments(ranks.rank, [one.network for one in reports], [item[2] for item in answers])
        self._finalizer = weakref.finalize(self, _finish, server, os.getpid())
        count_steps(self, Publisher._lent)

    # -- what is published ------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self, step: Steps, *, digests: bool | None = None) -> Iterator[None]:
        """Around the statements that write the parameters; on every rank.

        On entry it waits for the runs' readers, at most ``lease`` seconds (not with snapshots), and
        for the last commit's CUDA work. On exit it looks up every parameter again, registers those
        that have moved, and publishes the step. The step is readable when the current CUDA stream
        of the parameters' device is done. The call waits for the stream only if replicas are
        compared.

        An exception inside aborts the update. The run is then unreadable until the next update; its
        last snapshot stays readable. Where ranks compute what they publish together (merged
        adapters, fp8), the other ranks raise StateError, which names this one.

        Args:
            step: the step that the run is at afterwards, or ``{run: step}`` where several are
                written.
            digests: as :meth:`publish`.

        Raises:
            NotFoundError: no such run.
            RequestError: a step that is not above the last; parameters that cannot be published.
                The update is aborted.
            StateError: the run is paused. Or an update of it is open, also of another thread or
                task. Or another run, which is not among these, publishes the same memory by
                reference: two precisions of one model are written together. Or parameters are
                unsharded or offloaded; the update is aborted. Or parameters were written outside of
                :meth:`updating` since the last step; that step is withdrawn (not with snapshots).
                The server does not see writes that PyTorch does not count: through ``.data`` and
                NumPy, and by kernels that get a pointer.
        """
        runs = self._chosen(step)
        with contextlib.ExitStack() as walked:
            walked.enter_context(self._claimed(runs))
            self._check_steps(runs)
            walked.enter_context(self._digesting(runs, digests))
            walked.enter_context(self._told_of_failure(runs))
            self._refuse_written(run for run, _ in runs)
            self._refuse_shared([run for run, _ in runs], "updating({%s}) writes both at once")
            for run, _ in runs:
                walked.enter_context(run.parameters.walked())
            walked.enter_context(self._rewriting(runs))
            yield
            self._tell_all(runs, [self._resolved(run) for run, _ in runs])

    def publish(self, step: Steps, *, digests: bool | None = None) -> None:
        """Publishes the parameters as they are; on every rank.

        Call it for the first step, and for the one at which training is resumed. With
        ``snapshot=True`` call it also after ``optimizer.step()``. Blocks and raises as
        :meth:`updating`. Where parameters are refused the last step stays readable, unless they
        were written or their memory is gone.

        Args:
            step: the step that the run is at, or ``{run: step}`` where there are several.
            digests: also digest the trained tensors, for :func:`fanin.check.served`. None: no
                digests of an adapter. Of whole weights: a run's first step, the first one after
                ``refresh()``, and as many others as take 1 % of the time. True also compares all of
                the replicas, instead of a sample. The calling thread digests after the step is
                readable, and reads all that this rank holds once. If digesting fails, a warning
                says why.
        """
        runs = self._chosen(step)
        with self._claimed(runs):
            self._check_steps(runs)
            with self._digesting(runs, digests), self._told_of_failure(runs):
                self._refuse_written(run for run, _ in runs)
                changes = self._look([run for run, _ in runs])
                with self._rewriting(runs):
                    self._tell_all(runs, changes)

    def pause(self, run: Run | None = None, reason: str = "trainer memory offloaded") -> None:
        """Before the parameters' memory is offloaded, put to sleep or loaded from a checkpoint.

        Call it on every rank. Waits for readers, at most ``lease`` seconds. Until :meth:`resume`
        pulls fail with *reason*; a snapshot stays readable. Nobody reads the parameters' memory
        meanwhile, and the server holds on to no storage.

        Args:
            run: the run to pause; None: all runs.
            reason: what the errors of pulls say.

        Raises:
            NotFoundError: no such run.
            StateError: an update is open; another run publishes the same memory by reference;
                parameters were written outside of :meth:`updating` (nothing is paused, and the step
                is withdrawn: pause again).
        """
        runs = self._named(run)
        self._refuse_written(runs)
        self._refuse_shared(runs, "pause() takes all runs, and so does resume()")
        for one in runs:
            self._wait_for_commit(one)
            self._server.pause(one.publication, reason)
            one.paused = True
            one.parameters.release()

    def resume(self, run: Run | None = None, step: int | None = None) -> None:
        """Ends :meth:`pause` when the parameters are back; on every rank.

        If parameters are not there, the runs stay paused.

        Args:
            run: the run to resume; None: all runs.
            step: None: the values are those of before, and the run is readable again at its step.
                Else the values may be others: they are published as *step*, and the old step is
                never shown again.

        Raises:
            NotFoundError: no such run.
            StateError: it is not paused; parameters are unsharded or still offloaded; another call
                updates it.
            RequestError: a step that is not above the last.
        """
        runs = self._named(run)
        pairs = [(one, (one.step or 0) if step is None else step) for one in runs]
        with self._claimed(pairs):
            with self._told_of_refusal(runs):
                for one in runs:
                    if not one.paused:
                        raise StateError.make(
                            f"{one.publication} is not paused",
                            "pause(run) it before",
                            key=one.publication,
                        )
                    if step is not None:
                        self._check_step(one, step)
            with self._told_of_failure(pairs):
                self._continue(runs, step)
                with self._rewriting([] if step is None else pairs):
                    pass

    def _continue(self, runs: list[OneRun], step: int | None) -> None:
        """Ends the runs' pauses; step: their next one, None: they are readable again."""
        changes = [self._resolved(one) for one in runs]
        for one, change in zip(runs, changes, strict=True):
            self._tell(one, change)
            if step is not None and one.step is not None:
                # What was published must not be readable from memory that holds other values.
                self._server.abort_update(one.publication)
        if step is None:
            self._fill(runs)
        for one in runs:
            self._server.resume(one.publication)
            one.paused = False
            if step is None:
                self._lend(one)

    def remove_run(self, run: Run) -> None:
        """The hook for a run that is deleted: on return nobody reads its memory any more.

        Blocks until its readers are done, at most ``lease`` seconds. A run that is added under the
        same name must go on above the last step.

        Args:
            run: the run to remove.

        Raises:
            NotFoundError: no such run.
        """
        one = self._one(run)
        self._server.remove(one.publication)
        with contextlib.suppress(NotFoundError):  # it has had no step
            self._server.remove(publication_for(one.publication))
        self._proofs.pop(one.publication, None)
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
    def secret_file(self) -> str | None:
        """Absolute path of the launch's secret as this rank has it, None: it has none."""
        return self._secret_file

    @property
    def server(self) -> Server:
        """The server beneath; it is this object's to close."""
        return self._server

    @property
    def runs(self) -> dict[str, int | None]:
        """The publications, ``"lora:<run>"`` or ``"full:<run>"``, and their last published steps
        (None: none yet)."""
        return {run.publication: run.step for run in self._all()}

    def write_info(
        self, directory: str | os.PathLike[str], run: Run | None = None, step: int | None = None
    ) -> Path | None:
        """Rank 0 writes ``nixl_info.json`` and the marker ``STABLE``. Blocks until all is on disk.

        Args:
            directory: the folder of both files.
            run: the run that the file names; None: the only one, or none is named.
            step: None: the run's last published step.

        Returns:
            The file's path on rank 0, None on the other ranks.

        Raises:
            NotFoundError: no such run.
            HostError: the directory cannot be written.
        """
        if self._rank != 0:
            return None
        meant = self._named(run)
        chosen = meant[0] if len(meant) == 1 else None
        if step is None and chosen is not None:
            step = chosen.step
        info = TrainerInfo(
            addresses=tuple(self._addresses),
            world_id=self._world_id,
            run=None if chosen is None else chosen.publication.partition(":")[2],
            server_name=self._server.name,
            step=step,
            publications=tuple(self.runs),
            secret_file=self._secret_file,
        )
        return write_info(directory, info)

    def stats(self) -> Any:
        """The counters of :meth:`fanin.Server.stats`."""
        return self._server.stats()

    # -- the end ----------------------------------------------------------------------------

    def close(self, drain: float = 1.0) -> None:
        """Stops serving; running pulls may end for ``drain`` seconds. Needs no other rank.

        On return no memory of the model is read any more. Called again it does nothing; calls that
        publish, or concern runs, raise StateError.
        """
        if self._finalizer.detach() is not None:
            self._server.close(drain)
        self._runs.clear()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------

    def _lent(self, param: Any) -> list[Any]:
        """The tensors in which the runs publish the memory of *param* by reference now."""
        lent = (run.parameters.lent(param) for run in self._all())
        return [tensor for tensor in lent if tensor is not None]

    def _all(self) -> list[OneRun]:
        """The runs of now, taken in one go: other threads may add and remove some meanwhile."""
        return list(self._runs.values())

    def _agreed(self, source: Source) -> Source:
        """What the ranks agree that the run is; may ask them, and then raises on all or none."""
        return source

    def _resolved(self, run: OneRun) -> Change:
        """What differs from what is registered of the run, and may."""
        return run.parameters.look()

    def _prove(self, run: OneRun) -> None:
        """Raises if what the run is about to publish is not what its ranks train."""

    def _meet(self, run: OneRun) -> None:
        """Waits until all ranks have come to compute what the run publishes; raises if one does
        not."""

    def _unpublished(self, run: OneRun, error: BaseException, at: At) -> None:
        """Tells ranks that would wait for this one that it does not publish."""

    @contextlib.contextmanager
    def _told_of_failure(self, runs: list[tuple[OneRun, int]]) -> Iterator[None]:
        """Around all that may fail of the try to publish the runs at these steps."""
        for run, step in runs:
            run.at = (int(step), run.at[1] + 1 if run.at[0] == step else 0)
        try:
            yield
        except BaseException as error:
            for run, _ in runs:
                self._unpublished(run, error, run.at)
            raise

    @contextlib.contextmanager
    def _told_of_refusal(self, runs: list[OneRun]) -> Iterator[None]:
        """Around the checks of a call's step: other ranks may have been called with a good one."""
        try:
            yield
        except FaninError as error:
            for run in runs:
                self._unpublished(run, error, REFUSED)
            raise

    @contextlib.contextmanager
    def _digesting(self, runs: list[tuple[OneRun, int]], digests: bool | None) -> Iterator[None]:
        """Around a step that is published: what digests it is to have follow it."""
        for one, _ in runs:
            one.whole = digests is True
        begun = [one for one, _ in runs if self._begins(one.publication, digests)]
        try:
            yield
        except BaseException:
            for one in begun:
                self._proofs[one.publication].abort(self._server)
            raise
        for one, at in runs:
            anew = digests is None and one.publication in self._unproven  # refresh() has come
            if one in begun or anew:
                self._digest(one, at)

    def _begins(self, publication: str, digests: bool | None) -> bool:
        proof = self._proofs[publication]
        due = proof.due()
        if not (due or publication in self._unproven if digests is None else digests):
            return False
        try:
            proof.begin(self._server)
        except FaninError as error:
            _log.warning("fanin: no digests of %s: %s", publication, error)
            return False
        return True

    def _digest(self, run: OneRun, step: int) -> None:
        proof = self._proofs[run.publication]
        try:
            proof.publish(self._server, run.parameters, step)
        except Exception as error:  # the step is published, and training goes on
            proof.fail(self._server)
            why = cause_of(error)
            _log.warning("fanin: no digests of %s at step %d: %s", run.publication, step, why)
        self._unproven.discard(run.publication)

    def _checked_deltas(self, deltas: int) -> int:
        """Raises RequestError: so many patches cannot be kept."""
        why, remedy = f"deltas is {deltas!r}", f"give how many patches to keep, 0 to {_MOST}"
        if not isinstance(deltas, bool) and isinstance(deltas, int) and 0 <= deltas <= _MOST:
            if self._snapshot or not deltas:
                return deltas
            why += " without snapshot: what has changed is found in copies"
            remedy = "give snapshot=True as well, which takes twice the memory of what is published"
        raise RequestError.make(why, remedy, key="deltas")

    def _register(self, server: Server, source: Source) -> OneRun:
        shards = self._casting.marked([*source.change.shards, *source.others], source.kept)
        server.put(source.publication, shards)
        try:
            server.set_metadata(source.publication, source.metadata)
        except BaseException:
            server.remove(source.publication)
            raise
        source.parameters.accept(source.change)
        run = self._runs[source.publication] = OneRun(source)
        if source.scale_of is not None:
            ranks, name = self._ranks, source.publication
            self._proofs[name] = AdapterProof(name, ranks.rank, ranks.size, source.scale_of)
        return run

    def _refuse_closed(self) -> None:
        if not self._finalizer.alive:
            raise StateError.make("the server is closed", "make a new one to publish again")

    def _refuse_known(self, publication: str) -> None:
        self._refuse_closed()
        if publication in self._runs:
            raise RequestError.make(
                f"run {publication} is there already",
                "remove_run() it before",
                key=publication,
                code=-101,
            )

    def _named(self, run: Run | None) -> list[OneRun]:
        if run is not None:
            return [self._one(run)]
        self._refuse_closed()
        return self._all()

    def _one(self, run: Run) -> OneRun:
        self._refuse_closed()
        publication = self._publication(run)
        found = self._runs.get(publication)
        if found is None:
            raise NotFoundError.make(
                f"there is no run {publication}", f"the runs are: {self._known()}", key=publication
            )
        return found

    def _known(self) -> str:
        return ", ".join(self.runs) or "none"

    @contextlib.contextmanager
    def _claimed(self, runs: list[tuple[OneRun, int]]) -> Iterator[None]:
        """No other call updates the runs until the body has ended.

        Other ranks do not hear of a call that comes meanwhile: the first one speaks for this rank.
        """
        taken: list[OneRun] = []
        try:
            with _claims:
                for one, _ in runs:
                    self._refuse_open(one)
                for one, at in runs:
                    taken.append(one)
                    one.writing = at
            yield
        finally:
            for one in taken:
                one.writing = None

    def _chosen(self, step: Steps) -> list[tuple[OneRun, int]]:
        if isinstance(step, Mapping):
            runs = [(self._one(run), at) for run, at in step.items()]
            if not runs:
                raise RequestError.make(
                    "no run is named", f"give {{run: step}}; the runs are: {self._known()}"
                )
            names = [one.publication for one, _ in runs]
            if twice := [name for name in names if names.count(name) > 1]:
                raise RequestError.make(
                    f"{twice[0]} is named twice in {dict(step)}", "name it once", key=twice[0]
                )
        else:
            runs = [(one, step) for one in self._named(None)]
            if len(runs) != 1:
                raise RequestError.make(
                    f"a step alone says nothing with these runs: {self._known()}",
                    "give {run: step}",
                )
        return runs

    def _refuse_open(self, run: OneRun) -> None:
        if run.writing is not None:  # a commit would publish half of what is written
            raise StateError.make(
                f"step {run.writing} of {run.publication} is being written: updating(), "
                "publish() or resume() has not ended",
                "end that call before the next one, and use a run from one thread or task",
                key=run.publication,
            )

    def _check_steps(self, runs: list[tuple[OneRun, int]]) -> None:
        with self._told_of_refusal([one for one, _ in runs]):
            for one, at in runs:
                if one.paused:
                    raise StateError.make(
                        f"{one.publication} is paused", "resume(run) it before", key=one.publication
                    )
                self._check_step(one, at)

    def _check_step(self, run: OneRun, step: int) -> None:
        """Before anything is written, not when it has been."""
        whole = not isinstance(step, bool) and hasattr(type(step), "__index__")
        if not whole or not 0 <= step <= MAX_STEP:
            raise RequestError.make(
                f"step {step!r} of {run.publication} is no step",
                f"give an integer from 0 to {MAX_STEP}",
                key=run.publication,
            )
        last = self._last.get(run.publication, -1)
        if step <= last:
            raise RequestError.make(
                f"step {step} of {run.publication} is not above its last step {last}",
                "count steps upwards, also of a run that was removed and added again",
                key=run.publication,
            )

    def _refuse_written(self, runs: Iterable[OneRun]) -> None:
        """Readers of the last step may have seen half of what was written outside of updates.

        All runs' steps are withdrawn of which something was written: they may share it.
        """
        found = ((run, paths) for run in runs if (paths := run.parameters.written()))
        first, paths = next(found, (None, []))
        if first is None:
            return
        written = [run for run in self._all() if run.parameters.written()]
        for run in written:
            self._withdraw(run)
        others = [run.publication for run in written if run is not first]
        too = f", and so are those of {', '.join(others)}" if others else ""
        raise StateError.make(
            f"{first_of(map(repr, paths), 1)} of {first.publication} was written outside of "
            f"updating() after step {first.step} was published: its readers may have got half of "
            f"what was written. The step is withdrawn{too}",
            "write parameters inside: with server.updating(step): optimizer.step(); or make "
            "the server with snapshot=True, which publishes copies",
            key=first.publication,
        )

    def _refuse_shared(self, runs: list[OneRun], remedy: str) -> None:
        """StateError: what will be written of *runs* is also what readers of another run read.

        remedy: may have a place for the steps of both.
        """
        for other in self._all():
            if other in runs:
                continue
            for run in runs:
                if (path := run.parameters.shared(other.parameters)) is None:
                    continue
                both = ", ".join(f"'{one.publication}': step" for one in (run, other))
                raise StateError.make(
                    f"'{path}' of {run.publication} is also what {other.publication} publishes by "
                    f"reference at step {other.step}: its readers would get what is written now",
                    f"name both runs: {remedy.replace('%s', both)}; or remove_run() one of them",
                    key=other.publication,
                )

    def _withdraw(self, run: OneRun) -> None:
        """Nobody reads the run's memory any more, so whatever is there may be published next."""
        run.parameters.take_back()
        run.stands = False
        self._server.withdraw(run.publication)

    def _look(self, runs: list[OneRun]) -> list[Change]:
        """What differs from what is registered. A step whose memory is gone is withdrawn."""
        try:
            return [self._resolved(run) for run in runs]
        except FaninError:
            for run in runs:
                if run.parameters.gone():
                    self._withdraw(run)
            raise

    def _wait_for_commit(self, run: OneRun) -> None:
        """A commit whose CUDA work is under way would be withdrawn, and its step never seen."""
        if run.committed is not None and not self._snapshot:
            run.committed.synchronize()
            run.committed = None

    def _tell(self, run: OneRun, change: Change) -> None:
        if change.metadata is not None and change.metadata != run.metadata:
            self._server.set_metadata(run.publication, change.metadata)
        if change.shards:
            marked = self._casting.marked(change.shards, run.kept)
            self._server.put(run.publication, marked, replace=True)
        for key in change.removed:
            self._server.remove(run.publication, key)
        run.parameters.accept(change)
        if change.metadata is not None:
            run.metadata = change.metadata

    def _tell_all(self, runs: list[tuple[OneRun, int]], changes: list[Change]) -> None:
        for (run, _), change in zip(runs, changes, strict=True):
            self._tell(run, change)

    @contextlib.contextmanager
    def _rewriting(self, runs: list[tuple[OneRun, int]]) -> Iterator[None]:
        """Begins the runs' updates, and commits them at their steps when the body has ended.

        If anything raises, those that are not committed yet are aborted.
        """
        begun: list[OneRun] = []
        written = {id(run) for run, _ in runs}
        shared = [
            (other, counts)
            for other in self._all()
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
            ordered = _ordered(run for run, _ in runs)
            self._fill(ordered)
            for run in ordered:  # also of what was made: replicas make the same
                self._prove(run)
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

    def _fill(self, runs: Iterable[OneRun]) -> None:
        """Makes what the runs compute: on all ranks, or on none."""
        ordered = _ordered(runs)
        for run in ordered:
            run.parameters.stages.ahead()
        for run in ordered:
            self._meet(run)
        for at, run in enumerate(ordered):
            try:
                run.parameters.stages.fill()
            except Exception as error:  # the others have met this rank, and wait for it
                for later in ordered[at + 1 :]:
                    later.parameters.stages.miss()
                if isinstance(error, FaninError):
                    error.key = error.key or run.publication
                raise

    def _lend(self, run: OneRun) -> None:
        if not self._snapshot and run.stands:
            run.parameters.lend()

    def _commit(self, run: OneRun, step: int) -> None:
        devices = run.parameters.devices
        streams = [torch.cuda.current_stream(device) for device in devices]
        stream = None
        if streams:
            _order(streams[1:], streams[:1])
            stream = Stream(int(streams[0].cuda_stream), devices[0])
        self._server.commit(
            run.publication,
            step,
            snapshot=self._snapshot,
            cast=self._casting.dtype,
            stream=stream,
            deltas=run.deltas,
        )
        run.step = self._last[run.publication] = int(step)
        run.stands = True
        self._lend(run)
        if streams:
            if self._snapshot:
                _order(streams[:1], streams[1:])
            run.committed = torch.cuda.Event()
            run.committed.record(streams[0])


def _ordered(runs: Iterable[OneRun]) -> list[OneRun]:
    """As on every rank: those may name their runs in any order, and wait for each other."""
    return sorted(runs, key=lambda run: run.publication)


def _order(before: list[Any], after: list[Any]) -> None:
    """Work that is put on the streams ``after`` from now on waits for what ``before`` hold now."""
    for stream in before:
        event = torch.cuda.Event()
        event.record(stream)
        for other in after:
            other.wait_event(event)
