# SPDX-License-Identifier: Apache-2.0
"""A launch's secret: servers and clients that have it, another one, or none."""

import secrets
from pathlib import Path

import fanin
import pytest
from local_world import addresses, publish, servers


def secret(folder: Path, name: str) -> Path:
    file = folder / name
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32) + "\n")
    return file


def client(ranks: list[fanin.Server], file: Path | str | None) -> fanin.Client:
    return fanin.Client(addresses(ranks), use_unix=False, use_ucx=False, secret_file=file)


def test_who_has_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = secret(tmp_path, "one"), secret(tmp_path, "other")
    with servers(secret_file=one) as ranks:
        publish(ranks, 1)
        with client(ranks, str(one)) as reader:
            assert [p.step for p in reader.publications()] == [1, 1, 1]
        monkeypatch.setenv("FANIN_SECRET_FILE", str(one))
        with client(ranks, None) as reader:
            assert len(reader.publications()) == len(ranks)
        with pytest.raises(fanin.ConnectionFailedError, match="another secret"):
            client(ranks, other)
        with pytest.raises(fanin.ConnectionFailedError, match="demands the launch's secret"):
            client(ranks, "")


def test_files_that_others_may_read_are_none(tmp_path: Path) -> None:
    file = secret(tmp_path, "open")
    file.chmod(0o644)
    with pytest.raises(fanin.FaninError, match="mode 0644"), servers(secret_file=file):
        pass
    with pytest.raises(fanin.FaninError, match="cannot read the secret file"):
        fanin.Client(secret_file=tmp_path / "none")
