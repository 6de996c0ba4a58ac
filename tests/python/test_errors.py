# SPDX-License-Identifier: Apache-2.0
"""The hierarchy of exceptions."""

from __future__ import annotations

import copy
import pickle

import fanin
import pytest
from fanin import errors
from fanin._library import check, library, new_error

CODES = sorted(errors._NAMES, reverse=True)


@pytest.mark.parametrize("code", CODES)
def test_names_and_retryability_are_the_librarys(code: int) -> None:
    lib = library()
    assert lib.fanin_status_name(code).decode() == errors.status_name(code)
    assert fanin.FaninError("x", code=code).retryable == lib.fanin_status_is_retryable(code)


def test_every_code_of_the_library_is_known() -> None:
    lib = library()
    for code in range(-700, 0):
        name = lib.fanin_status_name(code).decode()
        assert errors.status_name(code) == name


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (-100, fanin.RequestError),
        (-101, fanin.RequestError),
        (-102, fanin.NotFoundError),
        (-103, fanin.StateError),
        (-200, fanin.StaleError),
        (-201, fanin.PullTimeoutError),
        (-202, fanin.CancelledError),
        (-203, fanin.SupersededError),
        (-204, fanin.PausedError),
        (-299, fanin.PullAgainError),
        (-300, fanin.UnreachableError),
        (-302, fanin.ConnectionFailedError),
        (-402, fanin.PeerError),
        (-501, fanin.HostError),
        (-600, fanin.ProcessError),
        (-699, fanin.ProcessError),
        (-700, fanin.FaninError),
    ],
)
def test_classes_of_codes(code: int, kind: type[fanin.FaninError]) -> None:
    assert errors.error_class(code) is kind


def test_what_the_library_says_is_carried() -> None:
    said = new_error()
    said.rank, said.sys_errno, said.ucx_status = 3, 111, -5
    said.phase, said.address, said.key = b"read", b"10.0.0.1:6003", b"lora:0:x"
    said.message, said.remedy = b"it \xff broke", b"mend it"
    with pytest.raises(fanin.StaleError) as caught:
        check(-200, said)
    error = caught.value
    assert (error.code, error.name, error.rank) == (-200, "FANIN_ERR_STALE", 3)
    assert (error.key, error.address, error.phase) == ("lora:0:x", "10.0.0.1:6003", "read")
    assert (error.sys_errno, error.ucx_status) == (111, -5)
    assert (error.message, error.remedy) == ("it \ufffd broke", "mend it")
    assert str(error) == (
        "it \ufffd broke (key 'lora:0:x', rank 3, address 10.0.0.1:6003); remedy: mend it"
    )


def test_the_remedy_of_a_network_without_open_has_pythons_words() -> None:
    with pytest.raises(fanin.RequestError, match="is not a loopback address.*open=True and allow="):
        fanin.Server(world_id=bytes(15) + b"x", rank=0, world_size=1, bind="192.0.2.1")


def test_a_failure_without_a_word_gets_the_codes_text() -> None:
    with pytest.raises(fanin.HostError) as caught:
        check(-501, new_error())
    assert str(caught.value) == "out of memory" and caught.value.rank is None


def test_text_does_not_repeat_what_the_message_says() -> None:
    error = fanin.PeerError.make("rank 3 at h:1 lacks k", key="k", rank=3, address="h:1")
    assert str(error) == "rank 3 at h:1 lacks k"
    other = fanin.PeerError.make("rank 31 broke", key="k", rank=3)
    assert str(other) == "rank 31 broke (key 'k', rank 3)"


def test_errors_made_in_python() -> None:
    error = fanin.NotFoundError.make("no such run", "name one", key="lora:9")
    assert (error.code, error.name) == (-102, "FANIN_ERR_NOT_FOUND")
    assert isinstance(error, fanin.RequestError) and not error.retryable
    assert str(error) == "no such run (key 'lora:9'); remedy: name one"
    assert fanin.PeerError.make("x", code=-403).name == "FANIN_ERR_INCOMPLETE"
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, fanin.FaninError):
            made = kind.make("x")
            assert (
                kind is fanin.FaninError
                or isinstance(made, errors.error_class(made.code))
                or (issubclass(errors.error_class(made.code), kind))
            )


def test_a_timeout_is_a_timeout_error() -> None:
    error = fanin.PullTimeoutError.make("too late")
    assert isinstance(error, TimeoutError) and isinstance(error, OSError)
    assert str(error) == "too late" and error.retryable


class TwoParents(fanin.RequestError, ValueError):
    """As other modules of the package derive theirs."""


@pytest.mark.parametrize(
    "error",
    [
        fanin.PullTimeoutError("late", remedy="wait", rank=2, key="k", address="a:1", phase="read"),
        fanin.FaninError("x", code=-555, sys_errno=5, ucx_status=-3),
        TwoParents.make("wrong", "right"),
    ],
)
def test_errors_travel_between_processes(error: fanin.FaninError) -> None:
    error.add_note("a note") if hasattr(error, "add_note") else None
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert vars(other) == vars(error) and str(other) == str(error)
        assert other.args == error.args and other.name == error.name
