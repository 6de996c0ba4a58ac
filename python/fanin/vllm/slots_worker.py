# SPDX-License-Identifier: Apache-2.0
"""Pulls of a worker into the layout of its slots, how it learns one, and how adapters are added.

A layout is learnt from an adapter that is here as a directory: vLLM's own code is run over numbers
(:mod:`fanin.vllm.slots`), and what the layout then makes of the directory is compared with what
vLLM's own load makes of it, byte for byte. Only a layout that has passed that is ever used.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fanin._otel import within
from fanin.engine.clients import Target, remaining
from fanin.engine.faults import to_wire
from fanin.engine.pulls import PullService, catalog_digest, phases_of, version_of
from fanin.engine.slot_table import Seat
from fanin.errors import CancelledError, FaninError, HostError, StaleError
from fanin.vllm.slots import Layout, Slots, prove, unfit, unfitting
from fanin.vllm.worker import Done, Jobs

__all__ = ["WorkerSlots"]

_log = logging.getLogger("vllm.fanin")

Progress = Callable[[int, int], None]


def _short(error: MemoryError) -> HostError:
    return HostError.make(str(error) or "no memory for an adapter", "keep fewer adapters")


class _Hold:
    """An image that the engine may ask for by its path; what a lease is to a directory."""

    def __init__(self, slots: Slots, path: str) -> None:
        self._slots, self._path = slots, path

    def release(self, *, delete: bool) -> bool:
        self._slots.release(self._path)
        return True


class _Nothing:
    """What a job that brought no adapter gives back."""

    def release(self, *, delete: bool) -> bool:
        return False


class WorkerSlots:
    """The slots of one worker, and its jobs. Made in the engine's thread."""

    def __init__(self, worker: Any) -> None:
        why = unfit(worker)
        if why:
            raise unfitting(why)
        self._slots = Slots(worker)
        #: Of jobs that bring an adapter which vLLM has numbered already.
        self._numbered: dict[str, dict[str, Any]] = {}
        self.jobs = Jobs()

    def start(self, job: dict[str, Any], service: Callable[[], PullService]) -> None:
        """Begins a pull, or to learn a layout; see :class:`fanin.engine.slots_way.SlotWay`.

        Returns at once. service: makes the one to pull with; called in the job's thread.
        """
        seat = None if job["learn"] else self._slots.keep_seat()
        if job.get("number"):
            self._numbered[job["id"]] = job

        def run(progress: Progress) -> Done:
            try:
                with within(job.get("trace")):
                    return self._run(job, seat, service, progress)
            except MemoryError as error:
                raise _short(error) from error
            finally:
                self._slots.let_go(seat)

        self.jobs.start(job["id"], run)

    def _run(
        self,
        job: dict[str, Any],
        seat: Seat | None,
        service: Callable[[], PullService],
        progress: Progress,
    ) -> Done:
        self._slots.use_device()
        target = Target(
            tuple(job["addresses"]), job["server_name"], job["world"], job.get("secret_file")
        )
        deadline = time.monotonic() + float(job["timeout"])
        with service().pool.borrow(target, job["world"], deadline) as client:
            if job["learn"]:
                return self._learn(client, job, deadline)
            return self._pull(seat, client, job, deadline, progress)

    # ------------------------------------------------------------------ adding

    def report(self, name: str, seconds: float = 0.0) -> dict[str, Any]:
        """How far a job is, in the engine's thread; where no request runs it waits for the end of
        the job, at most *seconds*.

        The adapter of one that is done and came with vLLM's number is added here and now.
        """
        told = self.jobs.linger(name, seconds if self._slots.idle() else 0.0)
        job = self._numbered.get(name)
        if job is None or told["state"] != "done":
            return told
        answer = self.add(job)
        if answer["error"] is not None:
            return {**told, "state": "failed", "error": answer["error"]}
        return {**told, "added": True}

    def add(self, adapter: dict[str, Any]) -> dict[str, Any]:
        """Adds an adapter to vLLM's, or says why not; raises nothing. In the engine's thread.

        adapter: adapter, its name; number, path, is_3d.
        """
        from vllm.lora.request import LoRARequest

        try:
            self._slots.loader.add_adapter(
                LoRARequest(
                    adapter["adapter"],
                    adapter["number"],
                    adapter["path"],
                    is_3d_lora_weight=adapter["is_3d"],
                )
            )
        except MemoryError as error:
            return {"error": to_wire(_short(error))}
        except Exception as error:
            _log.warning("fanin: %s was not added", adapter["adapter"], exc_info=True)
            return {"error": to_wire(error)}
        return {"error": None}

    def drop(self, path: str, name: str) -> None:
        """Forgets jobs by their name or by what they brought, and vLLM what they added."""
        for key, job in list(self._numbered.items()):
            if key == name or job["path"] == path:
                del self._numbered[key]
                self._slots.loader.remove_adapter(job["number"])
        self.jobs.drop(name=name, path=path)

    # ------------------------------------------------------------------ a pull

    def _pull(
        self,
        seat: Seat | None,
        client: Any,
        job: dict[str, Any],
        deadline: float,
        progress: Progress,
    ) -> Done:
        layout = self._slots.layout(job["layout"])
        if layout is None:
            raise unfitting("this worker does not know the layout any more")
        path = job["path"]
        if self._slots.hold(path) is not None:  # another caller has brought it
            return self._done(job, path)
        image = self._slots.take(layout)
        try:
            result = client.pull_into(
                job["run"],
                image.packed.tensors,
                step=int(job["step"]),
                timeout=remaining(deadline),
                dtype=image.packed.dtype,
                stream=image.stream,
                max_bytes=job["how"]["max_bytes"],
                progress=progress,
            )
            self._check_catalog(client, job, deadline)
            image.finish()
            self._slots.fill_seat(seat, image)
        except BaseException:
            self._slots.give_back(image)
            raise
        if self._slots.hold(path, image) is not image:
            self._slots.give_back(image)
        self._slots.settle()
        return self._done(job, path, result)

    def _done(self, job: dict[str, Any], path: str, result: Any = None) -> Done:
        """result: of the pull, None: another one's adapter was here."""
        return Done(
            path=path,
            world=job["world"],
            step=int(job["step"]),
            bytes=0 if result is None else int(result.bytes),
            reused=result is None,
            transport="" if result is None else str(result.path),
            is_3d=job["is_3d"],
            lease=_Hold(self._slots, path),
            phases={} if result is None else phases_of(result),
            ranks=0 if result is None else len(result.ranks),
        )

    def _check_catalog(self, client: Any, job: dict[str, Any], deadline: float) -> None:
        """Whether what was pulled is laid out, and scaled, as the layout says."""
        found = client.publications(timeout=remaining(deadline))
        if version_of(found, job["run"]) == job["version"]:
            return
        entries = client.catalog(job["run"], timeout=remaining(deadline))
        metadata = client.metadata(job["run"], timeout=remaining(deadline))
        if catalog_digest(entries, metadata) != job["digest"]:
            raise StaleError.make(
                "the trainer has changed the adapter's tensors or configuration meanwhile",
                "ask again",
            )

    # ---------------------------------------------------------------- learning

    def _learn(self, client: Any, job: dict[str, Any], deadline: float) -> Done:
        begun = time.monotonic()
        entries = client.catalog(job["run"], timeout=remaining(deadline))
        self._check_catalog(client, job, deadline)
        try:
            layout = self._proven(entries, job)
        except FaninError:
            raise
        except Exception as error:
            if not Path(job["path"]).is_dir():
                raise CancelledError.make("the directory has been retired", "") from error
            # vLLM's own code, with what it does not expect.
            raise unfitting(f"{type(error).__name__}: {error}") from error
        self._slots.keep(job["layout"], layout)
        _log.info(
            "fanin: run %s: %d tensors go into %d of vLLM's slots; recorded and proven in %.3f s",
            job["run"],
            len(layout.mapping.wanted()),
            len(layout.parts),
            time.monotonic() - begun,
        )
        return Done("", job["world"], int(job["step"]), 0, False, "", job["is_3d"], _Nothing())

    def _proven(self, entries: Any, job: dict[str, Any]) -> Layout:
        from vllm.lora.request import LoRARequest

        config = json.loads((Path(job["path"]) / "adapter_config.json").read_text())
        how = {"is_3d": job["is_3d"], "dtype": job["how"]["dtype"]}
        layout = Layout.record(self._slots.loader, entries, config, **how)
        image = self._slots.take(layout)
        request = LoRARequest("fanin-proof", 1, job["path"], is_3d_lora_weight=job["is_3d"])
        prove(self._slots.loader, image, request)
        self._slots.give_back(image)
        return layout
