# SPDX-License-Identifier: Apache-2.0
"""A real vLLM over HTTP, the small model it serves, and what PEFT says it must answer."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib.metadata
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import tomllib

TREE = Path(__file__).resolve().parents[2]
VOCABULARY = 256
RANK = 8
ALPHA = 16
LONGEST = 65536  # tokens of prompt and answer
#: How much longer than elsewhere all takes here.
SLOWNESS = float(os.environ.get("FANIN_TEST_SLOWNESS", "1"))
READY_WITHIN = 240.0 * SLOWNESS
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


# ------------------------------------------------------------------------------- the model


def save_model(directory: Path) -> Path:
    """A two-layer random Qwen2 and a tokenizer of whole words, as vLLM and PEFT read them."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of whole words, one for each number of the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers generates."""
    import torch

    inputs = torch.tensor([prompt])
    with torch.no_grad():
        whole = model.eval().generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in whole[0, len(prompt) :]]


class Oracle:
    """PEFT's own greedy generation on the same base model."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def tokens(self, adapter: Path | None, prompt: list[int], count: int) -> list[int]:
        """The tokens that follow the prompt with the adapter of this directory, or without."""
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
        return greedy(model, prompt, count)


# ------------------------------------------------------------------------------ the server


class Refused(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body = body

    @property
    def message(self) -> str:
        """The error's own sentence, of vLLM's form or of the plugin's."""
        if isinstance(self.body, dict) and isinstance(self.body.get("error"), dict):
            return str(self.body["error"].get("message"))
        return str(self.body)


def free_ports(count: int = 1) -> int:
    """The first of *count* consecutive ports that nobody has.

    Below those that the kernel gives to connections that go out: one of them could get the port
    before whoever is to listen there does, even one that asks for the server that was there.
    """
    while True:
        first = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def plugin_path(scratch: Path) -> list[str]:
    """What goes in front of PYTHONPATH for the entry points to be found: nothing if installed."""
    try:
        importlib.metadata.distribution("fanin")
        return []
    except importlib.metadata.PackageNotFoundError:
        pass
    project = tomllib.loads((TREE / "python" / "pyproject.toml").read_text())["project"]
    version = "0.0.0"
    folder = scratch / "entry-points" / f"fanin-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fanin\nVersion: {version}\n")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {value}" for name, value in entries.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return [str(TREE / "python"), str(folder.parent)]


def die_with_parent() -> None:
    """In the child: SIGKILL when the test's process goes without having cleaned up."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class HttpServer:
    """One server process and its children, in a process group of their own.

    name: of its log, and of what is said about it. variables: its whole environment.
    """

    ready = "/health"  # answers when all is there

    def __init__(
        self, name: str, command: list[str], variables: dict[str, str], scratch: Path, port: int
    ) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = scratch / f"{name}.log"
        self.started = time.monotonic()
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=scratch,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, within: float = READY_WITHIN) -> Self:
        """Until `ready` answers; the end of the log is in the error if it never does."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended while starting:\n{self.log_end()}")
            try:
                if self.request("GET", self.ready, timeout=5.0)[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"{self.name} was not ready within {within:.0f} s:\n{self.log_end()}")

    def stop(self) -> None:
        """Ends the whole group, whatever state it is in."""
        group = self._process.pid
        try:
            os.killpg(group, signal.SIGTERM)
            self._process.wait(timeout=15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(timeout=15)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_end(self, characters: int = 4000) -> str:
        return self.log_text()[-characters:]

    # -------------------------------------------------------------------- what one may ask it

    def request(
        self, method: str, path: str, body: Any = None, timeout: float = 60.0
    ) -> tuple[int, Any]:
        """One request on a connection of its own: the status and the body, decoded if JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 60.0) -> Any:
        """As `request`, but only the body, and `Refused` unless the status is 200."""
        status, answer = self.request(method, path, body, timeout)
        if status != 200:
            raise Refused(status, answer)
        return answer


class VllmServer(HttpServer):
    """One API server process and its engine core."""

    def __init__(
        self,
        model: Path,
        scratch: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        plugins: bool = True,
        adapters: bool = True,
    ) -> None:
        port = free_ports()
        self.base = "base"
        variables = dict(os.environ)
        variables |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "FANIN_ALLOW_TRAINERS": "any",  # it listens on loopback, without a key
            "TOKENIZERS_PARALLELISM": "false",
        }
        if plugins:
            before = [variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else []
            path = [*plugin_path(scratch), *before, str(Path(__file__).parent)]
            variables["PYTHONPATH"] = os.pathsep.join(path)
            variables["VLLM_PLUGINS"] = "fanin"
        else:
            variables["VLLM_PLUGINS"] = ""
        variables |= environment or {}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", self.base]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--max-model-len", str(LONGEST), "--max-num-seqs", "8"]
        command += ["--enforce-eager", *arguments]
        if adapters:
            command += ["--enable-lora", "--max-lora-rank", str(RANK)]
        super().__init__("vllm", command, variables, scratch, port)

    def tokens(
        self, model: str, prompt: list[int], count: int = 16, timeout: float = 60.0
    ) -> list[int]:
        """The tokens of a greedy completion by this model's or adapter's name."""
        body = self.completion(model, prompt, count)
        return list(self.ask("POST", "/v1/completions", body, timeout)["choices"][0]["token_ids"])

    @staticmethod
    def completion(model: str, prompt: list[int], count: int) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def names(self) -> list[str]:
        return [model["id"] for model in self.ask("GET", "/v1/models")["data"]]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels; 0 when there is none."""
        total = 0.0
        for line in str(self.ask("GET", "/metrics")).splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] != name:
                continue
            if all(f'{key}="{wanted}"' in head for key, wanted in labels.items()):
                total += float(value)
        return total


class TokenStream:
    """A request that streams its tokens; a thread notes them as they come."""

    def __init__(self, engine: VllmServer, model: str, prompt: list[int], count: int) -> None:
        self.tokens: list[int] = []
        self.came: list[float] = []  # time.monotonic() of each token
        self.error = ""  # what ended it in the middle
        self._changed = threading.Condition()
        self._ended = False
        self._connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=120)
        body = engine.completion(model, prompt, count) | {"stream": True}
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        # Kept for shutdown(): http.client lets go of it when the answer is the last.
        self._socket = self._connection.sock
        self._answer = self._connection.getresponse()
        if self._answer.status != 200:
            raise Refused(self._answer.status, self._answer.read().decode())
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                for line in self._answer:
                    if line.startswith(b"data: {"):
                        self._note(json.loads(line[6:]))
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _note(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        if "error" in event:
            self.error = str(event["error"])
            return
        tokens = [t for choice in event["choices"] for t in choice.get("token_ids") or []]
        with self._changed:
            self.tokens += tokens
            self.came += [now] * len(tokens)
            self._changed.notify_all()

    @property
    def running(self) -> bool:
        with self._changed:
            return not self._ended

    def wait_for(self, count: int, within: float = 60.0) -> None:
        """Until so many tokens have come in all."""
        with self._changed:
            enough = self._changed.wait_for(
                lambda: len(self.tokens) >= count or self._ended, within
            )
            if not enough or len(self.tokens) < count:
                raise RuntimeError(f"{len(self.tokens)} tokens, not {count}, within {within:.0f} s")

    def wait_end(self, within: float = 60.0) -> None:
        """Until the engine has ended it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, within):
                raise RuntimeError(f"not ended within {within:.0f} s")

    def close(self) -> None:
        """Leaves the engine, which then stops generating."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._answer.close()
        self._connection.close()
