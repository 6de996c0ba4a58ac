# SPDX-License-Identifier: Apache-2.0
"""Configuration: files, variables that override them, and messages that say what to do."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from fanin._options import Credentials
from fanin.config import (
    ConfigError,
    InferenceConfig,
    OrchestratorConfig,
    TrainerConfig,
    engine_credentials,
    inference_config,
    orchestrator_config,
    trainer_config,
    validate_together,
)
from fanin.errors import RequestError

TRAINER = """
max_steps = 100
[model]
name = "Qwen/Qwen3-0.6B"
[model.lora]
rank = 16
alpha = 32
target_modules = ["q_proj"]
[optim]
lr = 1e-5
[weight_broadcast]
type = "nixl"
"""
ORCHESTRATOR = """
[model.lora]
name = "policy"
alpha = 32.0
[weight_broadcast]
type = "nixl"
engines = ["http://10.0.0.7:8000/", "https://engine-2"]
timeout = 30
"""
INFERENCE = """
enable_lora = true
[weight_broadcast]
type = "nixl"
trainer = "/run/job/weights"
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "config.toml"
    path.write_text(text)
    return path


# ------------------------------------------------------------------- trainer


def test_trainer_defaults_and_file(tmp_path: Path) -> None:
    assert trainer_config(environ={}) == TrainerConfig()
    config = trainer_config(write(tmp_path, TRAINER), {})
    assert config == TrainerConfig(lora_alpha=32.0)
    text = TRAINER + (
        'port = 7000\nserver_name = "job"\nbind = "10.0.0.1"\nadvertise = "node-1"\n'
        'allow = ["10.0.0.0/8", "fd00::/8"]\nlease = 0.25\nsnapshot = true\ncast = "BF16"\n'
        'port_by = "local"\ntrusted_network = true\ndata_threads = 4\n'
        "nice = 5\ndeltas = 4\n"
    )
    config = trainer_config(write(tmp_path, text), {})
    assert config.server_arguments() == {
        "base_port": 7000,
        "name": "job",
        "bind": "10.0.0.1",
        "advertise": "node-1",
        "allow": "10.0.0.0/8,fd00::/8",
        "trusted_network": True,
        "lease": 0.25,
        "data_threads": 4,
        "nice": 5,
        "snapshot": True,
        "cast": "BF16",
        "deltas": 4,
        "port_by": "local",
    }


def test_variables_override_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, TRAINER + "port = 7000\nsnapshot = true\n")
    environ = {
        "FANIN_PORT": "8000",
        "FANIN_SNAPSHOT": "0",
        "FANIN_LEASE": " 0.5 ",
        "FANIN_NICE": "-2",
    }
    config = trainer_config(path, environ)
    assert (config.port, config.snapshot, config.lease, config.nice) == (8000, False, 0.5, -2)
    # An empty variable is one that is not set.
    assert trainer_config(path, {"FANIN_PORT": ""}).port == 7000


# (lines added to the trainer's section, what the message says, what it advises)
TRAINER_MISTAKES = [
    ("prot = 1", "weight_broadcast.prot is unknown", "'port'"),
    ("sever_name = 'x'", "weight_broadcast.sever_name is unknown", "'server_name'"),
    ("zzz = 1", "weight_broadcast.zzz is unknown", "known are"),
    ("port = 70000", "weight_broadcast.port is 70000", "an integer from 0 to 65535"),
    ("port = 6000.5", "weight_broadcast.port is 6000.5", "an integer"),
    ("port = true", "weight_broadcast.port is True", "an integer"),
    ("server_name = ' '", "weight_broadcast.server_name", "not empty"),
    ("bind = 'node-1'", "weight_broadcast.bind is 'node-1'", "numeric address"),
    ("bind = '0.0.0.0'", "all interfaces", "one address"),
    ("bind = '10.0.0.1'", "needs to know whom", "allow"),
    ("allow = 'tens'", "weight_broadcast.allow is 'tens'", "networks such as"),
    ("trusted_network = true", "no network is given", "allow"),
    ("data_threads = 0", "weight_broadcast.data_threads is 0", "an integer from 1 to 16"),
    ("stranger_share = 1", "weight_broadcast.stranger_share is unknown", "known are"),
    ("nice = 20", "weight_broadcast.nice is 20", "an integer from -20 to 19"),
    ("lease = -1", "weight_broadcast.lease is -1", "a number of seconds from 0 to 60"),
    ("lease = nan", "weight_broadcast.lease is nan", "a number of seconds"),
    ("cast = 'bf16'", "only snapshots can be cast", "snapshot = true"),
    ("cast = 'int8'\nsnapshot = true", "weight_broadcast.cast is 'int8'", '"bf16", "f16"'),
    ("port_by = 'node'", "weight_broadcast.port_by is 'node'", '"global", "local"'),
    ("snapshot = 'maybe'", "weight_broadcast.snapshot is 'maybe'", "true or false"),
    ("secret = '/s'", "weight_broadcast.secret is unknown", "'secret_file'"),
    ("tls_certificate = '/c'", "weight_broadcast.tls_certificate is unknown", "'tls_cert'"),
    ("secret_file = ''", "weight_broadcast.secret_file is ''", "not empty"),
    ("secret_file = 's'", "weight_broadcast.secret_file: 's' is no absolute path", "whole path"),
    ("tls_cert = '/c'\ntls_ca = '/a'", "tls_cert: tls_key is missing", "give all three"),
    ("tls_ca = '/a'", "tls_ca: tls_cert is missing", "give all three"),
    (
        "secret_file = '/s'\ntls_ca = '/a'",
        "weight_broadcast.tls_ca a certificate",
        "give one of them",
    ),
]


@pytest.mark.parametrize(("line", "problem", "advice"), TRAINER_MISTAKES)
def test_trainer_mistakes(tmp_path: Path, line: str, problem: str, advice: str) -> None:
    path = write(tmp_path, TRAINER + line + "\n")
    with pytest.raises(ConfigError) as caught:
        trainer_config(path, {})
    assert problem in caught.value.message
    assert str(path) in caught.value.message
    assert advice in caught.value.remedy


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_config(write(tmp_path, TRAINER), {"FANIN_PORT": "six"})
    assert "environment: FANIN_PORT is 'six'" in caught.value.message
    with pytest.raises(ConfigError, match="environment: FANIN_CAST: only snapshots"):
        trainer_config(environ={"FANIN_CAST": "bf16"})


def test_config_errors_are_value_errors() -> None:
    with pytest.raises(ValueError):
        trainer_config(environ={"FANIN_PORT": "six"})
    assert issubclass(ConfigError, RequestError)


def test_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weight_broadcast.type is 'nccl'"):
        trainer_config(write(tmp_path, TRAINER.replace('"nixl"', '"nccl"')), {})
    with pytest.raises(ConfigError, match="weight_broadcast.type is missing"):
        trainer_config(write(tmp_path, TRAINER.replace('type = "nixl"', "")), {})


def test_only_loading_adapters_needs_lora(tmp_path: Path) -> None:
    """A trainer of whole models has no [model.lora], and WeightServer takes the same arguments."""
    text = '[weight_broadcast]\ntype = "nixl"\nport = 6100\n[model]\nname = "x"\n'
    assert trainer_config(write(tmp_path, text), {}).server_arguments()["base_port"] == 6100
    with pytest.raises(ConfigError, match="LoRA is not enabled") as caught:
        orchestrator_config(write(tmp_path, text.replace("port = 6100\n", "")), {})
    assert "[model.lora]" in caught.value.remedy


def test_sections(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \[weight_broadcast\], but \[weight_brodcast\]"):
        trainer_config(write(tmp_path, TRAINER.replace("broad", "brod")), {})
    with pytest.raises(ConfigError, match=r"there is no \[weight_broadcast\]"):
        inference_config({}, write(tmp_path, "x = 1"))
    with pytest.raises(ConfigError, match="weight_broadcast is no table"):
        inference_config({}, write(tmp_path, "weight_broadcast = 1"))
    with pytest.raises(ConfigError, match="model is no table"):
        trainer_config(write(tmp_path, 'model = 1\n[weight_broadcast]\ntype = "nixl"\n'), {})


def test_lora_keys(tmp_path: Path) -> None:
    # What belongs to the trainer's own LoRA settings is left alone, our own misspelt is not.
    with pytest.raises(ConfigError, match="model.lora.aplha is unknown") as caught:
        orchestrator_config(write(tmp_path, ORCHESTRATOR.replace("alpha", "aplha")), {})
    assert "'alpha'" in caught.value.remedy
    assert trainer_config(write(tmp_path, TRAINER), {}).lora_alpha == 32


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        trainer_config(tmp_path / "nowhere.toml", {})
    with pytest.raises(ConfigError, match="no valid TOML"):
        trainer_config(write(tmp_path, "[weight_broadcast\n"), {})
    (tmp_path / "latin.toml").write_bytes(b'x = "\xff"')
    with pytest.raises(ConfigError, match="no valid TOML"):
        trainer_config(tmp_path / "latin.toml", {})


def test_a_misspelt_variable_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fanin.config"):
        inference_config({"FANIN_KEEP_ADAPTER": "3", "FANIN_LIBRARY": "x", "FANIN_PORT": "1"})
    assert [record.getMessage() for record in caplog.records] == [
        "environment: FANIN_KEEP_ADAPTER is unknown and has no effect;"
        " did you mean FANIN_KEEP_ADAPTERS?",
    ]


# -------------------------------------------------------------- orchestrator


def test_orchestrator(tmp_path: Path) -> None:
    config = orchestrator_config(write(tmp_path, ORCHESTRATOR), {})
    assert config == OrchestratorConfig(
        lora_name="policy",
        engines=("http://10.0.0.7:8000", "https://engine-2"),
        timeout=30.0,
        lora_alpha=32.0,
    )
    environ = {
        "FANIN_ENGINES": "http://a:1, http://b:2",
        "FANIN_UPDATE_TIMEOUT": "5",
        "FANIN_LORA_NAME": "other",
        "FANIN_LORA_ALPHA": "8",
        "FANIN_SERVER_NAME": "job",
    }
    expected = OrchestratorConfig("other", ("http://a:1", "http://b:2"), 5.0, "job", 8.0)
    assert orchestrator_config(write(tmp_path, ORCHESTRATOR), environ) == expected
    assert orchestrator_config(environ=environ) == expected


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('name = "policy"', "", "model.lora.name of .* or FANIN_LORA_NAME is missing"),
        ('name = "policy"', 'name = "my policy"', "model.lora.name is 'my policy'"),
        ("alpha = 32.0", "alpha = 0", "model.lora.alpha is 0"),
        ("http://10.0.0.7", "10.0.0.7", "engines is"),
        ("https://engine-2", "http://10.0.0.7:8000", "engines is"),
        ("timeout = 30", "timeout = 0", "timeout is 0"),
        ("timeout = 30", "timeuot = 30", "weight_broadcast.timeuot is unknown"),
    ],
)
def test_orchestrator_mistakes(tmp_path: Path, old: str, new: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        orchestrator_config(write(tmp_path, ORCHESTRATOR.replace(old, new)), {})


# ----------------------------------------------------------------- inference


def test_inference(tmp_path: Path) -> None:
    assert inference_config({}) == InferenceConfig(
        None, None, Path(f"/dev/shm/fanin-{os.getuid()}"), 60.0, 2, "auto", None
    )
    path = write(tmp_path, INFERENCE + "keep = 4\n")
    from_file = InferenceConfig(
        "/run/job/weights", None, Path(f"/dev/shm/fanin-{os.getuid()}"), 60.0, 4, "auto", None
    )
    assert inference_config({"FANIN_CONFIG": str(path)}) == from_file
    assert inference_config({}, path) == from_file
    environ = {
        "FANIN_CONFIG": str(path),
        "FANIN_TRAINER": "10.0.0.1:6000,10.0.0.1:6001",
        "FANIN_SERVER_NAME": "job",
        "NIXL_LORA_CACHE_DIR": "/tmp/cache",
        "FANIN_PULL_TIMEOUT": "12.5",
        "FANIN_KEEP_ADAPTERS": "8",
        "FANIN_PATH": "STREAM",
        "FANIN_ADAPTER_PREFIX": "policy",
        "FANIN_DTYPE": "bf16",
        "FANIN_MAX_BYTES": str((1 << 63) - 1),
        "FANIN_TRUST_CONFIG": "true",
    }
    assert inference_config(environ) == InferenceConfig(
        *("10.0.0.1:6000,10.0.0.1:6001", "job", Path("/tmp/cache"), 12.5, 8, "stream", "policy"),
        dtype="BF16",
        max_bytes=(1 << 63) - 1,
        trust_config=True,
    )
    text = INFERENCE + "max_bytes = 5\ntrust_config = true\n"
    of_file = inference_config({}, write(tmp_path, text))
    assert (of_file.max_bytes, of_file.trust_config) == (5, True)


def test_inference_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANIN_KEEP_ADAPTERS", "7")
    monkeypatch.delenv("FANIN_CONFIG", raising=False)
    assert inference_config().keep == 7


def test_trainer_as_list(tmp_path: Path) -> None:
    text = INFERENCE.replace('"/run/job/weights"', '[["::1", 6000], "a:6001"]')
    assert inference_config({}, write(tmp_path, text)).trainer == "[::1]:6000,a:6001"


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"FANIN_TRAINER": "host:port"}, "FANIN_TRAINER is 'host:port'"),
        ({"NIXL_LORA_CACHE_DIR": "cache"}, "NIXL_LORA_CACHE_DIR is 'cache'"),
        ({"FANIN_PULL_TIMEOUT": "0"}, "FANIN_PULL_TIMEOUT is '0'"),
        ({"FANIN_PULL_TIMEOUT": "inf"}, "FANIN_PULL_TIMEOUT is 'inf'"),
        ({"FANIN_KEEP_ADAPTERS": "0"}, "FANIN_KEEP_ADAPTERS is '0'"),
        ({"FANIN_MAX_BYTES": "0"}, "FANIN_MAX_BYTES is '0'"),
        ({"FANIN_MAX_BYTES": "-1"}, "FANIN_MAX_BYTES is '-1'"),
        ({"FANIN_MAX_BYTES": "16MiB"}, "FANIN_MAX_BYTES is '16MiB'"),
        ({"FANIN_MAX_BYTES": str(1 << 63)}, f"FANIN_MAX_BYTES is '{1 << 63}'"),
        ({"FANIN_TRUST_CONFIG": "2"}, "FANIN_TRUST_CONFIG is '2'"),
        ({"FANIN_PATH": "tcp"}, "FANIN_PATH is 'tcp'"),
        ({"FANIN_ADAPTER_PREFIX": "a b"}, "FANIN_ADAPTER_PREFIX is 'a b'"),
        ({"FANIN_CONFIG": "/nowhere.toml"}, "/nowhere.toml: No such file"),
    ],
)
def test_inference_mistakes(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inference_config(environ)
    assert problem in caught.value.message and caught.value.remedy


def test_inference_needs_lora(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="enable_lora is false"):
        inference_config({}, write(tmp_path, INFERENCE.replace("= true", "= false")))


# --------------------------------------------------------------- credentials

TLS = {"tls_cert": "/run/tls.crt", "tls_key": "/run/tls.key", "tls_ca": "/run/ca.crt"}


def toml(values: dict[str, str]) -> str:
    return "".join(f"{name} = '{value}'\n" for name, value in values.items())


@pytest.mark.parametrize("given", [{"secret_file": "/run/secret"}, TLS])
def test_credentials_of_all_parts(tmp_path: Path, given: dict[str, str]) -> None:
    environ = {f"FANIN_{name.upper()}": value for name, value in given.items()}
    for text, of_environ in ((toml(given), {}), ("", environ)):
        trainer = trainer_config(write(tmp_path, TRAINER + text), of_environ)
        assert trainer.server_arguments().items() >= given.items()
        orchestrator = orchestrator_config(write(tmp_path, ORCHESTRATOR + text), of_environ)
        assert orchestrator.credentials.arguments() == given
        file = write(tmp_path, INFERENCE + text)
        assert inference_config(of_environ, file).credentials.arguments() == given
        named = {**of_environ, "FANIN_CONFIG": str(file), "FANIN_KEEP_ADAPTERS": "none"}
        assert engine_credentials(named).arguments() == given
    assert engine_credentials({}).arguments() == {}


def test_a_variable_goes_before_a_files_credential(tmp_path: Path) -> None:
    path = write(tmp_path, INFERENCE + "secret_file = '/of/file'\n")
    found = inference_config({"FANIN_SECRET_FILE": "relative"}, path).credentials
    assert found.arguments() == {"secret_file": "relative"}  # to the process' directory
    assert inference_config({"FANIN_SECRET_FILE": ""}, path).credentials.secret_file == "/of/file"
    with pytest.raises(ConfigError) as caught:
        inference_config({"FANIN_TLS_CERT": "/c"}, path)
    assert caught.value.message == (
        f"{path}: weight_broadcast.secret_file: a launch's secret,"
        " and environment: FANIN_TLS_CERT a certificate"
    )
    with pytest.raises(ConfigError, match="FANIN_TLS_CERT: tls_key is missing beside it"):
        engine_credentials({"FANIN_TLS_CERT": "/c", "FANIN_TLS_CA": "/a"})


def test_unknown_keys_beside_an_engines_credentials(tmp_path: Path) -> None:
    path = write(tmp_path, INFERENCE + "secret_fiel = '/s'\n")
    with pytest.raises(ConfigError, match="secret_fiel is unknown") as caught:
        engine_credentials({"FANIN_CONFIG": str(path)})
    assert "'secret_file'" in caught.value.remedy


# ------------------------------------------------------------------ together


def job(**changes: Any) -> tuple[TrainerConfig, OrchestratorConfig, InferenceConfig]:
    trainer = TrainerConfig(**changes.pop("trainer", {}))
    orchestrator = OrchestratorConfig(**{"lora_name": "policy", **changes.pop("orchestrator", {})})
    base: dict[str, Any] = {
        "trainer": None,
        "server_name": None,
        "cache_dir": Path("/tmp"),
        "timeout": 60.0,
        "keep": 2,
        "path": "auto",
        "prefix": None,
    }
    return trainer, orchestrator, InferenceConfig(**{**base, **changes.pop("inference", {})})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer": {"server_name": "j"}, "inference": {"server_name": "j"}},
        {"trainer": {"lora_alpha": 32.0}, "orchestrator": {"lora_alpha": 32.0}},
        {"inference": {"prefix": "policy"}},
        {"inference": {"trainer": "127.0.0.1:6000,[::1]:6001,localhost:6002"}},
        {"inference": {"trainer": "/run/10.0.0.1:5"}},
        {"trainer": {"credentials": Credentials("/run/a")}},  # nixl_info.json may name it
        {
            "trainer": {"bind": "10.0.0.1", "allow": "10.0.0.0/8"},
            "inference": {"trainer": "10.0.0.1:6000"},
        },
    ],
)
def test_jobs_that_fit(changes: dict[str, Any]) -> None:
    validate_together(*job(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"inference": {"server_name": "other"}},
            ["server_name differs", "'lora_param_server' (trainer)", "'other' (inference)"],
        ),
        ({"orchestrator": {"server_name": "x"}}, ["server_name differs", "'x' (orchestrator)"]),
        (
            {"trainer": {"lora_alpha": 16.0}, "orchestrator": {"lora_alpha": 32.0}},
            ["alpha differs", "16.0 (trainer)", "32.0 (orchestrator)"],
        ),
        ({"inference": {"prefix": "other"}}, ["adapters' name differs", "'policy'", "'other'"]),
        ({"inference": {"trainer": "10.0.0.1:6000"}}, ["listens on 127.0.0.1 only", "10.0.0.1"]),
        ({"inference": {"trainer": "[fd00::1]:6000"}}, ["listens on 127.0.0.1 only", "fd00::1"]),
        (
            {
                "trainer": {"credentials": Credentials("/run/secret")},
                "inference": {"credentials": Credentials(**TLS)},
            },
            ["show each other differs", "'a secret' (trainer)", "'a certificate' (inference)"],
        ),
    ],
)
def test_jobs_that_do_not_fit(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_together(*job(**changes))
    assert all(word in caught.value.message for word in words)
    assert caught.value.remedy


def test_parts_may_be_missing() -> None:
    validate_together()
    validate_together(inference=job(inference={"server_name": "x"})[2])
