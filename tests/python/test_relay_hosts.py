# SPDX-License-Identifier: Apache-2.0
"""Readers of several hosts that hand on: what each has to prove, and what it is told."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_world import nixl_fetch
from namespaces import Alone

WHOLE = 8 << 20


def of(folder: Path, name: str, ca: str = "ca") -> dict[str, str]:
    files = {"tls_cert": f"{name}.pem", "tls_key": f"{name}.key", "tls_ca": f"{ca}.pem"}
    return {field: str(folder / file) for field, file in files.items()}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Alone]:
    with Alone("relay_hosts.py") as switch:
        yield switch


class Fleet:
    """A trainer on a host, and readers on others, with what they prove themselves by."""

    def __init__(self, hosts: Alone, **credentials: str) -> None:
        self._hosts, self._step = hosts, 0
        self.trainer = hosts.ask(host="trainer", do="serve", **credentials)["address"]

    def commit(self) -> None:
        self._step += 1
        self._digest = self._hosts.ask(host="trainer", do="commit", step=self._step)["digest"]

    def reader(self, name: str, **credentials: Any) -> dict[str, Any]:
        """{}, or what it has failed with."""
        return self._hosts.ask(host=name, do="reader", trainer=self.trainer, **credentials)

    def pull(self, name: str) -> dict[str, Any]:
        """A pull that brings the trainer's very bytes."""
        told = self._hosts.ask(host=name, do="pull", step=self._step)
        assert told.get("digest") == self._digest, told
        assert told["bytes_from_origin"] + told["bytes_from_relays"] >= WHOLE
        return told

    def refused(self, name: str, **credentials: Any) -> dict[str, Any]:
        """The failure of a reader, which gets nothing."""
        told = self.reader(name, **credentials)
        return told or self._hosts.ask(host=name, do="pull", step=self._step)

    def share(self, first: str, second: str) -> int:
        """Bytes that *second* had of *first*, of the first step of which it had some, or of the
        third: who is slow to be found is done without."""
        for _ in range(3):
            self.commit()
            self.pull(first)
            if brought := self.pull(second)["bytes_from_relays"]:
                return int(brought)
        return 0


def test_who_names_relay_hands_on_to_other_hosts(hosts: Alone, certificates: Path) -> None:
    fleet = Fleet(hosts, **of(certificates, "ranks"))
    for name in ("one", "two"):
        assert not fleet.reader(name, **of(certificates, "relay"))
    assert fleet.share("one", "two") > 0


def test_who_is_no_relay_of_the_job_is_refused(hosts: Alone, certificates: Path) -> None:
    fleet = Fleet(hosts, **of(certificates, "ranks"))
    fleet.commit()
    for name, said, remedy in (
        ("reader", 'needs "fanin://JOB/relay/NAME"', "with that URI as alternative name"),
        ("relay-elsewhere", 'is to be a rank of "job2"', "a rank of the job?"),
        ("foreign-relay", "does not believe the certificate", "in the rank's tls_ca"),
    ):
        told = fleet.refused("one", **of(certificates, name))
        assert said in told["error"]
        assert remedy in told["remedy"]


def test_who_plays_a_relay_is_not_read_and_is_told_of(hosts: Alone, certificates: Path) -> None:
    """It is a reader of the job, and shows other readers a certificate that is not a relay's of the
    job. They do without it."""
    fleet = Fleet(hosts, **of(certificates, "ranks"))
    for name, said, remedy in (
        ("relay-elsewhere", 'is to be a relay of "job"', "names relay/NAME"),
        ("foreign-relay", "is not believed", "FANIN_TLS_CA"),
    ):
        assert not fleet.reader("one", shows=of(certificates, name), **of(certificates, "relay"))
        assert not fleet.reader("two", **of(certificates, "relay"))
        lines: list[str] = []
        for _ in range(3):
            fleet.commit()
            fleet.pull("one")
            told = fleet.pull("two")
            assert told["bytes_from_relays"] == 0
            lines += [line for line in told["log"] if line.startswith("the relay at 10.91.")]
        (line,) = lines  # once, however many pulls
        assert said in line
        assert remedy in line


def test_a_secret_of_several_hosts(hosts: Alone, tmp_path: Path) -> None:
    files = {}
    for name in ("same", "other"):
        files[name] = tmp_path / name
        files[name].touch(mode=0o600)
        files[name].write_text(secrets.token_hex(32))
    fleet = Fleet(hosts, secret_file=str(files["same"]))
    for name in ("one", "two"):
        assert not fleet.reader(name, secret_file=str(files["same"]))
    assert fleet.share("one", "two") > 0
    told = fleet.refused("one", secret_file=str(files["other"]))
    assert "has another secret than" in told["error"]
    assert "the secret file of one launch" in told["remedy"]
    told = fleet.refused("one", secret_file="")
    assert "demands the launch's secret" in told["error"]
    assert "FANIN_SECRET_FILE" in told["remedy"]


def test_a_cache_hands_on_no_more_in_a_second_than_it_may(hosts: Alone, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    fleet = Fleet(hosts, secret_file=str(secret))
    fleet.commit()
    words = [nixl_fetch(), "relay", fleet.trainer, "full:0", "--secret-file", str(secret)]
    words += ["--network", "10.91.0.0/16", "--rate", "0.004", "--no-ucx"]
    assert " step 1 " in hosts.ask(host="cache", do="run", words=words)["line"]
    brought = tries = 0
    while not brought:  # who is slow to be found is done without
        tries += 1
        assert tries < 4
        assert not fleet.reader("one", secret_file=str(secret))
        began = time.monotonic()
        brought = fleet.pull("one")["bytes_from_relays"]
    at_once = 4 << 20  # a MiB by each data thread
    assert brought <= at_once + 4e6 * (time.monotonic() - began)


def test_a_host_whose_power_fails_is_done_without(hosts: Alone, certificates: Path) -> None:
    """It says nothing any more, not even that it is gone."""
    fleet = Fleet(hosts, **of(certificates, "ranks"))
    for name in ("ends", "two"):
        assert not fleet.reader(name, **of(certificates, "relay"))
    assert fleet.share("ends", "two") > 0
    fleet.commit()
    fleet.pull("ends")
    hosts.ask(host="ends", do="end")
    fleet.pull("two")
