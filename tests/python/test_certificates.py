# SPDX-License-Identifier: Apache-2.0
"""Certificates instead of a launch's secret."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import fanin
import pytest
from fanin.info import secret_arguments
from local_world import addresses, publish, servers

MAKE = Path(__file__).parents[1] / "support" / "make-certificates"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("openssl"):
        pytest.skip("needs the command openssl")
    made = tmp_path_factory.mktemp("certificates")
    subprocess.run([MAKE, made], check=True)
    return made


def of(folder: Path, name: str) -> dict[str, Path]:
    return {
        "tls_cert": folder / f"{name}.pem",
        "tls_key": folder / f"{name}.key",
        "tls_ca": folder / "ca.pem",
    }


def client(ranks: list[fanin.Server], files: Mapping[str, Path | str]) -> fanin.Client:
    return fanin.Client(
        addresses(ranks),
        use_unix=False,
        use_ucx=False,
        tls_cert=files["tls_cert"],
        tls_key=files["tls_key"],
        tls_ca=files["tls_ca"],
    )


def test_who_has_one_reads(folder: Path) -> None:
    with servers(**of(folder, "ranks")) as ranks:
        publish(ranks, 1)
        with client(ranks, of(folder, "reader")) as reader:
            assert [p.step for p in reader.publications()] == [1, 1, 1]
        with pytest.raises(fanin.ConnectionFailedError, match="does not believe the certificate"):
            client(ranks, of(folder, "foreign"))
        with pytest.raises(fanin.ConnectionFailedError, match="demands a certificate"):
            client(ranks, {"tls_cert": "", "tls_key": "", "tls_ca": ""})
    with pytest.raises(fanin.FaninError, match="needs .fanin://JOB/rank/"):
        servers(**of(folder, "reader")).__enter__()


def test_a_certificate_goes_before_the_secret_of_a_trainers_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FANIN_SECRET_FILE", raising=False)
    monkeypatch.setenv("FANIN_TLS_CERT", "/run/tls/tls.crt")
    assert secret_arguments("/run/secret/launch") == {}
