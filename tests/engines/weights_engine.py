# SPDX-License-Identifier: Apache-2.0
"""vLLM in a process of its own, without a server, filled by the backend `fanin`.

`Engine` starts this file as a program and calls it. What it generates is compared by tokens and by
the log probabilities of all of them, which are equal to the last bit when the weights are.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hurting import before_module, run_short
from vllm_server import plugin_path
from worlds import HERE, PYTHON, Child, Control

PROMPTS = ([5, 9, 13, 17, 21], [200, 3, 77])
COUNT = 16
FP8_KERNEL = "FANIN_TEST_FP8_KERNEL"
"""In the environment: vLLM's build for CPUs gets a kernel of block fp8, of that kind."""


class Engine:
    """One vLLM; a `with` block ends it.

    alone: all of it in one process. environment: variables of it. options: what `LLM` takes beside
    the model.
    """

    script = "weights_engine.py"
    patience = 300.0  # seconds, for one answer

    def __init__(
        self,
        model: Path,
        scratch: Path,
        name: str = "engine",
        alone: bool = True,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self._alone = alone
        # Workers in processes of their own find the plugin by its entry point.
        path = [*plugin_path(scratch), str(PYTHON), str(HERE)]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        variables = {
            "PYTHONPATH": os.pathsep.join(path),
            "VLLM_PLUGINS": "fanin",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers are more than NUMA nodes
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if alone else "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._child = Child(
            name,
            self.script,
            {"model": "" if model == Path() else str(model), "options": options},
            scratch,
            **(variables | (environment or {})),
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._alone and self._child.process.poll() is None:
            # Its engine core and workers would outlive it.
            with contextlib.suppress(AssertionError, OSError):
                self._child.tell("exit")
                self._child.wait(60)
        self._child.close()

    def wait_ready(self) -> Engine:
        self._child.expect("ready", self.patience)
        return self

    def _do(self, what: str, **fields: Any) -> Any:
        self._child.tell(what, **fields)
        return self._child.expect("done", self.patience)["result"]

    def call(self, method: str, *arguments: Any) -> str:
        """A method of the LLM; what it raised, "" if nothing."""
        return str(self._do("call", method=method, arguments=arguments))

    def good(self, method: str, *arguments: Any) -> None:
        failure = self.call(method, *arguments)
        assert not failure, failure

    def init(self, trainer: Any, **more: Any) -> str:
        info = {"trainer": trainer, "timeout": 60, **more}
        return self.call("init_weight_transfer_engine", {"init_info": info})

    def update(self, step: Any) -> str:
        return self.call("update_weights", {"update_info": {"step": step}})

    def pull(self, step: int) -> None:
        """A whole update, which has to succeed."""
        self.good("start_weight_update")
        self.good("update_weights", {"update_info": {"step": step}})
        self.good("finish_weight_update", f"step-{step}")

    def hurt(self, at: int) -> None:
        """When the next update installs its module number *at*, memory is short."""
        self._do("hurt", at=at)

    def update_while(self, step: int, at: int, meanwhile: Callable[[], Any]) -> str:
        """An update that stands still before its module number *at*, *meanwhile* is done; what it
        raised, "" if nothing."""
        self._do("hold", at=at)
        self._child.tell(
            "call", method="update_weights", arguments=[{"update_info": {"step": step}}]
        )
        self._child.expect("held", 60)
        meanwhile()
        self._child.tell("go")
        return str(self._child.expect("done", 300)["result"])

    def check(self, step: int, poison: bool = True) -> dict[str, Any]:
        """`fanin.check.weights`: the report, or {"error": ...}."""
        return dict(self._do("check", step=step, poison=poison))

    def served(self, addresses: list[str], run: str = "0") -> dict[str, Any]:
        """`fanin.check.served`: the report, or {"error": ...} beside it."""
        return dict(self._do("served", addresses=addresses, run=run))

    def take_out(self, guard: str = "") -> None:
        """From now on this guard of init is out, and no other; "": none is. alone=True only."""
        self._do("take_out", guard=guard)

    def narrow(self, path: str) -> None:
        """The model holds this parameter in BF16, whatever its class says."""
        self._do("narrow", path=path)

    def scribble(self, path: str, draft: bool = False) -> None:
        """Writes one element of a parameter."""
        self._do("scribble", path=path, draft=draft)

    def version(self) -> str:
        return str(self._do("version"))

    def versions(self) -> Any:
        """Of each answer of the last output: which tokens are of which weight version."""
        return self._do("versions")

    def output(self, adapter: Path | None = None) -> Any:
        """Tokens and log probabilities of this engine's weights, with an adapter or without."""
        return self._do("output", adapter="" if adapter is None else str(adapter))

    def refusal(self) -> str:
        """What generating raises, "" if it generates."""
        return self.call("generate", [{"prompt_token_ids": list(PROMPTS[0])}])

    def memory(self) -> int:
        """Bytes that the process has resident."""
        return int(self._do("memory"))

    def log(self) -> str:
        return self._child.log.read_text(errors="replace")


class Judge(Engine):
    """Another vLLM, which loads directories as it is started with them."""

    def __init__(self, scratch: Path, **options: Any) -> None:
        super().__init__(Path(), scratch, "judge", **options)

    def output_of(self, model: Path, adapter: Path | None = None, **options: Any) -> Any:
        """What a vLLM that has loaded this directory generates."""
        self._do("load", model=str(model), options=options)
        return self.output(adapter)


# --------------------------------------------------------------------------- in the child


def make(model: str, **options: Any) -> Any:
    from vllm import LLM

    plain = {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128}
    return LLM(model, **(plain | options))


def generate(engine: Any, spans: list[Any], adapter: str, tokens: Any = PROMPTS) -> Any:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    how = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in tokens]
    found = []
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    for answer in engine.generate(prompts, how, use_tqdm=False, lora_request=lora):
        one = answer.outputs[0]
        spans.append([[span.version, span.start, span.end] for span in one.weight_versions or []])
        found.append([list(one.token_ids), one.cumulative_logprob])
    return found


class Served:
    def __init__(self, options: dict[str, Any], control: Control) -> None:
        import fanin.vllm

        self.control = control
        if FP8_KERNEL in os.environ:
            from quantized import install_kernel

            install_kernel()
        fanin.vllm.register()
        fanin.vllm.register()  # as vLLM does in one process
        self.engine: Any = None
        self.taken_out: tuple[Any, str, Any] | None = None
        if options["model"]:
            backend = {"backend": "fanin"}
            self.engine = make(
                options["model"], weight_transfer_config=backend, **options["options"]
            )

    def call(self, method: str, arguments: list[Any]) -> str:
        try:
            getattr(self.engine, method)(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def hurt(self, at: int) -> None:
        before_module(at, run_short)

    def hold(self, at: int) -> None:
        def wait() -> None:
            self.control.say("held")
            assert self.control.hear(timeout=60.0)["event"] == "go"

        before_module(at, wait)

    def check(self, step: int, poison: bool) -> dict[str, Any]:
        import fanin.check

        try:
            report = fanin.check.weights(self.engine, step, poison=poison)
        except fanin.FaninError as error:
            return {"error": str(error)}
        workers = report.workers
        return {
            "workers": workers,
            "modules": report.modules,
            "bytes": report.bytes,
            "unseen": list(report.unseen),
            "kept": list(report.kept),
        }

    def served(self, addresses: list[str], run: str) -> dict[str, Any]:
        from dataclasses import asdict

        import fanin.check

        try:
            return asdict(fanin.check.served(self.engine, addresses, run))
        except fanin.FaninError as error:
            report = getattr(error, "report", None)
            return {"error": str(error)} | (asdict(report) if report else {})

    def take_out(self, guard: str) -> None:
        if self.taken_out is not None:
            setattr(*self.taken_out)
            self.taken_out = None
        if guard:
            owner, name, stand_in = guards()[guard]
            self.taken_out = (owner, name, getattr(owner, name))
            setattr(owner, name, stand_in)

    def narrow(self, path: str) -> None:
        import torch

        def convert(model: Any) -> None:
            parameter = model.get_parameter(path)
            parameter.data = parameter.data.to(torch.bfloat16)

        self.engine.apply_model(convert)

    def draft(self) -> Any:
        return self.engine.llm_engine.model_executor.driver_worker.worker.get_draft_model()

    def scribble(self, path: str, draft: bool) -> None:
        def write(model: Any) -> None:
            model.get_parameter(path).data.view(-1)[3] = 9

        if draft:
            write(self.draft())
        else:
            self.engine.apply_model(write)

    def version(self) -> str:
        return str(self.engine.get_weight_version())

    def output(self, adapter: str) -> Any:
        self.spans: list[Any] = []
        return generate(self.engine, self.spans, adapter)

    def versions(self) -> Any:
        return self.spans

    def load(self, model: str, options: dict[str, Any]) -> None:
        self.engine = None
        gc.collect()
        self.engine = make(model, **options)

    def memory(self) -> int:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def guards() -> dict[str, tuple[Any, str, Callable[..., Any]]]:
    """What refuses a publication at init: where it is, and what lets all pass in its place."""
    from fanin.mapping import Recording
    from fanin.mapping._record import _Checker
    from fanin.vllm import weights

    refuse = _Checker._refuse

    def refuse_filled(one: Any, index: int, name: str, why: str, unfilled: int = 0) -> None:
        if not unfilled:
            refuse(one, index, name, why)

    return {
        "coverage": (weights, "refuse_missed", lambda *_: None),
        "ties": (Recording, "tie_conflicts", lambda _: []),
        "unfilled": (_Checker, "_refuse", refuse_filled),
    }


def main() -> None:
    control = Control()
    served = Served(json.loads(sys.argv[1]), control)
    control.say("ready")
    while (what := (command := control.hear(timeout=3600.0)).pop("event")) != "exit":
        control.say("done", result=getattr(served, what)(**command))
    if served.engine is not None:
        served.engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
