# SPDX-License-Identifier: Apache-2.0
"""A real SGLang over HTTP, on the CPU and in an environment of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from fanin.sglang import LOADER
from vllm_server import TREE, HttpServer, die_with_parent, free_ports, plugin_path
from worlds import HERE, PYTHON, child_environment

SGLANG = TREE / ".deps" / "sglang" / "bin" / "python"
KERNELS = HERE / "sglang_kernels"
PROXY = TREE / "tests" / "support" / "frame_proxy.py"

needs_sglang = pytest.mark.skipif(
    not SGLANG.exists(), reason="SGLang is not installed: run tools/setup sglang"
)


def sglang_environment(*paths: str, **more: str) -> dict[str, str]:
    """For a process of that environment: the tests' fanin, and stand-ins for SGLang's kernels."""
    more |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }  # there may be no compiler
    environment = child_environment(**more)
    environment.pop("SGLANG_PLUGINS", None)
    before = environment["PYTHONPATH"]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, str(KERNELS), before])
    return environment


def plugin_of(scratch: Path, module: str) -> str:
    """The path with which SGLang finds this module's `register` as a plugin."""
    folder = scratch / "fanin_tests-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fanin-tests\nVersion: 0\n")
    entry = f"[sglang.srt.plugins]\nfanin_tests = {module}:register\n"
    (folder / "entry_points.txt").write_text(entry)
    return str(scratch)


class SGLangServer(HttpServer):
    """The server, its scheduler of each rank and its detokenizer.

    more: variables of the environment. ranks: of tensor parallelism. Two share a NUMA node, which
    SGLang wants to be told, and speak by gloo, which SGLang's groups do on a CPU if they find no
    NCCL. paths: of plugins.
    """

    ready = "/model_info"

    def __init__(
        self,
        model: Path,
        scratch: Path,
        *arguments: str,
        ranks: int = 1,
        paths: tuple[str, ...] = (),
        **more: str,
    ) -> None:
        port = free_ports()
        variables = sglang_environment(
            *paths,
            *plugin_path(scratch),
            str(PYTHON),
            SGLANG_CPU_OMP_THREADS_BIND="|".join(str(rank) for rank in _cores(ranks)),
            SGLANG_NCCL_SO_PATH=str(scratch / "no-nccl"),
            **more,
        )
        command = [
            str(SGLANG),
            "-B",
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(model),
        ]
        command += ["--host", "127.0.0.1", "--port", str(port), "--tp-size", str(ranks)]
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        command += [
            "--disable-cuda-graph",
            "--disable-overlap-schedule",
            "--skip-tokenizer-init",
        ]
        command += ["--mem-fraction-static", "0.1", "--max-total-tokens", "4096"]
        command += ["--max-running-requests", "4", "--skip-server-warmup"]
        command += ["--custom-weight-loader", LOADER, *arguments]
        super().__init__("sglang", command, variables, scratch, port)

    def post(self, path: str, **body: Any) -> Any:
        """The answer, if it is HTTP 200."""
        return self.ask("POST", path, body, 120.0)

    def output(self, prompts: Sequence[Sequence[int]], count: int, timeout: float = 120.0) -> Any:
        """For each prompt, alone: the greedy tokens and their log probabilities."""
        found = []
        for prompt in prompts:
            answer = self.ask("POST", "/generate", generation(prompt, count), timeout)
            told = answer["meta_info"]["output_token_logprobs"]
            found.append((answer["output_ids"], [one[0] for one in told]))
        return found

    @contextlib.contextmanager
    def streaming(self, prompt: Sequence[int], count: int, **more: Any) -> Iterator[Iterator[Any]]:
        """The events of one request, as they come; leaving it ends the request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = generation(prompt, count) | {"stream": True, "return_logprob": False} | more
        headers = {"Content-Type": "application/json"}
        with contextlib.closing(connection):
            connection.request("POST", "/generate", json.dumps(body), headers)
            lines = connection.getresponse()
            yield (json.loads(line[6:]) for line in lines if line.startswith(b"data: {"))

    def version(self) -> str:
        return str(self.ask("GET", "/model_info")["weight_version"])

    def wait_log(self, words: str, within: float = 60.0) -> None:
        """Until a scheduler has said so."""
        deadline = time.monotonic() + within
        while words not in self.log_text():
            assert time.monotonic() < deadline, f"no {words!r} within {within:.0f} s"
            time.sleep(0.05)

    def seen(self, prompts: Sequence[Sequence[int]], count: int) -> Any:
        """What a user sees of the weights; nothing is left of what was computed before."""
        self.post("/flush_cache?timeout=60")  # waits until a finished request has left its batch
        return self.output(prompts, count), self.checksums()

    def checksums(self) -> Any:
        """Of every parameter, rank after rank."""
        ranks = self.post("/weights_checker", action="checksum")["ranks"]
        return [one["checksums"] for one in ranks]


def _cores(count: int) -> list[int]:
    """A core for each rank, one after the other while there are any."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[rank % len(cores)] for rank in range(count)]


def generation(prompt: Sequence[int], count: int) -> dict[str, Any]:
    """A request of `/generate`."""
    how = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": how, "return_logprob": True}


class BrokenLink:
    """Stands before the ranks at *addresses*, and lets so many bytes of each one's weights pass and
    no more. target: where to pull from instead."""

    def __init__(self, addresses: Sequence[str], passed: int) -> None:
        command = [sys.executable, "-B", str(PROXY), ",".join(addresses)]
        self._process = subprocess.Popen(
            [*command, "--hold-reads", str(passed)],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.target: list[str] = []

    def __enter__(self) -> Self:
        try:
            self.target = self._lines.get(timeout=60).split(",")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(timeout=60)
        self._reader.join(timeout=60)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.strip())

    def wait_held(self, within: float = 120.0) -> None:
        """Until that many bytes of every rank have passed: a part of a step has landed."""
        for _ in self.target:
            assert self._lines.get(timeout=within) == "held"
