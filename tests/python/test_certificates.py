# SPDX-License-Identifier: Apache-2.0
"""Certificates instead of a launch's secret."""

import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import fanin
import pytest
from fanin.info import secret_arguments
from local_world import PATIENCE, addresses, publish, servers


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


def test_who_has_one_reads(certificates: Path) -> None:
    with servers(**of(certificates, "ranks")) as ranks:
        publish(ranks, 1)
        with client(ranks, of(certificates, "reader")) as reader:
            assert [p.step for p in reader.publications()] == [1, 1, 1]
        with pytest.raises(fanin.ConnectionFailedError, match="does not believe the certificate"):
            client(ranks, of(certificates, "foreign"))
        with pytest.raises(fanin.ConnectionFailedError, match="demands a certificate"):
            client(ranks, {"tls_cert": "", "tls_key": "", "tls_ca": ""})
    with pytest.raises(fanin.FaninError, match="needs .fanin://JOB/rank/"):
        servers(**of(certificates, "reader")).__enter__()


AUTHORITY = """
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 -subj '/CN=my job' \
    -addext basicConstraints=critical,CA:TRUE -keyout ca.key -out ca.pem
for who in 'rank/*' reader; do
    name=${who%%/*}
    printf 'subjectAltName=URI:fanin://my-job/%s\nauthorityKeyIdentifier=none\n' "$who" >ext
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj / \
        -keyout "$name.key" -out csr
    openssl x509 -req -in csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 3 -extfile ext \
        -out "$name.pem"
done
chmod 0600 *.key
"""


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two authorities of one name: one made anew, or a forger's."""
    if not shutil.which("openssl"):
        pytest.skip("needs the command openssl")
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    for folder in folders:
        subprocess.run(["bash", "-ec", AUTHORITY], cwd=folder, check=True, capture_output=True)
    return folders


def test_another_authority_of_the_same_name(
    alike: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Its signatures do not fit: both ends say so, the rank in its log, and not that memory is
    lacking."""
    one, other = alike
    theirs = {**of(other, "reader"), "tls_ca": one / "ca.pem"}
    with servers(**of(one, "rank")) as ranks:
        publish(ranks, 1)
        with client(ranks, of(one, "reader")) as reader:
            assert len(reader.publications()) == 3
        said = "is not believed: certificate signature failure"
        with pytest.raises(fanin.ConnectionFailedError, match=said) as caught:
            client(ranks, of(other, "reader"))
        assert "tls_ca" in caught.value.remedy
        with pytest.raises(
            fanin.ConnectionFailedError, match="does not believe the cert"
        ) as caught:
            client(ranks, theirs)
        assert "tlsv1 alert" in str(caught.value)

    def is_told() -> bool:
        refusals = [one for one in caplog.records if "session-refused" in str(vars(one))]
        return any(said in one.getMessage() for one in refusals)

    deadline = time.monotonic() + PATIENCE
    while not is_told():  # a thread brings the library's lines
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)
    assert "memory" not in caplog.text


def test_a_certificate_goes_before_the_secret_of_a_trainers_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FANIN_SECRET_FILE", raising=False)
    monkeypatch.setenv("FANIN_TLS_CERT", "/run/tls/tls.crt")
    assert secret_arguments("/run/secret/launch") == {}
