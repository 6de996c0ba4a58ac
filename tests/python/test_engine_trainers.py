# SPDX-License-Identifier: Apache-2.0
"""A worker finds its trainer again wherever it went, and asks for no more than it has to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fanin.config import ConfigError
from fanin.engine.clients import Source
from fanin.engine.trainers import Published, Trainer, left, without
from fanin.errors import (
    CancelledError,
    FaninError,
    NotFoundError,
    PullTimeoutError,
    SupersededError,
    UnreachableError,
)
from fanin.info import TrainerInfo, write_info

WORLDS = ("0123456789abcdef" * 2, "fedcba9876543210" * 2)


@dataclass
class Entry:
    name: str
    dtype: str = "BF16"
    shape: tuple[int, ...] = (4, 4)


@dataclass
class Place:
    """A trainer's ranks, and a count of what they were asked."""

    world: str = WORLDS[0]
    digest: str = "d1"
    names: tuple[str, ...] = ("a", "b")
    more: tuple[str, ...] = ()
    waits: dict[int, type[FaninError]] = field(default_factory=dict)  # that fail, by step
    down: bool = False
    made: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0
    catalogs: int = 0

    def client(self, addresses: list[str], **options: Any) -> Any:
        if self.down:
            raise UnreachableError.make("nobody answers", address=addresses[0])
        self.made.append({"addresses": addresses, **options})
        return Client(self)


@dataclass
class Client:
    place: Place

    def wait(self, run: str, timeout: float, step: int | None = None) -> int:
        if self.place.down:
            raise UnreachableError.make("rank 0 is gone", rank=0)
        if step is not None and (wrong := self.place.waits.get(step)):
            raise wrong.make(f"step {step} does not come")
        if step is not None and self.place.more:
            self.place.names, self.place.more, self.place.digest = self.place.more, (), "d2"
        return step or 1

    def publications(self, timeout: float) -> list[Any]:
        one = type("P", (), {"name": "full:0", "key_digest": self.place.digest})
        other = type("P", (), {"name": "lora:0", "key_digest": "zzz"})
        return [other, one]

    def ranks(self) -> list[Any]:
        return [type("R", (), {"world_id": self.place.world, "connected": True})]

    def catalog(self, run: str, timeout: float, owners: bool) -> list[Entry]:
        assert not owners
        self.place.catalogs += 1
        return [Entry(name) for name in self.place.names]

    def metadata(self, run: str, timeout: float) -> dict[str, str]:
        return {"format": "pt"}

    def close(self) -> None:
        self.place.closed += 1


def soon() -> float:
    return time.monotonic() + 5


def test_a_catalog_is_read_once() -> None:
    place = Place()
    trainer = Trainer(Source.of("127.0.0.1:6000"), "full:0", place.client)
    first = trainer.ready(soon())
    assert trainer.ready(soon()) is first
    assert first.layout() == (("a", "BF16", (4, 4)), ("b", "BF16", (4, 4)))
    assert (place.catalogs, len(place.made)) == (1, 1)
    assert place.made[0]["world_id"] is None


def test_what_is_published_has_changed() -> None:
    place = Place()
    trainer = Trainer(Source.of("127.0.0.1:6000"), "full:0", place.client)
    first = trainer.ready(soon())
    place.digest, place.names = "d2", ("a", "b", "c")
    assert trainer.ready(soon()).layout() != first.layout()
    assert (place.catalogs, len(place.made)) == (2, 1)


def test_what_comes_with_a_step_has_changed() -> None:
    """It was waited for, and the names before it were the old ones."""
    place = Place(more=("a", "b", "c"))
    trainer = Trainer(Source.of("127.0.0.1:6000"), "full:0", place.client)
    first = trainer.ready(soon())
    assert [entry.name for entry in first.entries] == ["a", "b"]
    assert [entry.name for entry in trainer.ready(soon(), 2).entries] == ["a", "b", "c"]


@pytest.mark.parametrize("wrong", [SupersededError, PullTimeoutError, CancelledError])
def test_a_step_that_does_not_come_costs_no_connection(wrong: type[FaninError]) -> None:
    place = Place(waits={9: wrong})
    trainer = Trainer(Source.of("127.0.0.1:6000"), "full:0", place.client)
    first = trainer.ready(soon())
    with pytest.raises(wrong):
        trainer.ready(soon(), 9)
    assert trainer.ready(soon(), 1) is first
    assert (place.closed, len(place.made)) == (0, 1)


def test_a_trainer_that_is_started_again_is_found_by_its_file(tmp_path: Path) -> None:
    write_info(tmp_path, TrainerInfo(("127.0.0.1:6000",), WORLDS[0]))
    place = Place()
    trainer = Trainer(Source.of(str(tmp_path)), "full:0", place.client)
    first = trainer.ready(soon())
    write_info(tmp_path, TrainerInfo(("127.0.0.1:7000", "127.0.0.1:7001"), WORLDS[1]))
    place.world = WORLDS[1]
    second = trainer.ready(soon())
    assert (first.world, second.world) == WORLDS
    assert second.layout() == first.layout()
    assert place.closed == 1
    assert place.made[1]["addresses"] == ["127.0.0.1:7000", "127.0.0.1:7001"]
    assert place.made[1]["world_id"] == WORLDS[1]


def test_after_a_failure_it_connects_anew() -> None:
    place = Place()
    trainer = Trainer(Source.of("127.0.0.1:6000"), "full:0", place.client)
    trainer.ready(soon())
    place.down = True
    for _ in range(2):
        with pytest.raises(UnreachableError):
            trainer.ready(soon())
    assert place.closed == 1
    place.down = False
    trainer.ready(soon())
    assert len(place.made) == 2


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    trainer = Trainer(Source.of(str(tmp_path / "nixl_info.json")), "full:0", Place().client)
    with pytest.raises(NotFoundError, match="nixl_info.json"):
        trainer.ready(soon())


def test_what_the_model_does_not_have_is_left_out() -> None:
    names = ("model.layers.61.a", "model.layers.6.a", "lm_head")
    whole = Published(tuple(Entry(name) for name in names), {}, "d", WORLDS[0])
    assert without(whole, ()) == whole
    left_over = without(whole, ("model.layers.61.*", "nothing"))
    assert [entry.name for entry in left_over.entries] == [
        "model.layers.6.a",
        "lm_head",
    ]


def test_no_time_is_left() -> None:
    with pytest.raises(PullTimeoutError, match="longer timeout"):
        left(time.monotonic() - 1)


def test_an_engine_that_hands_on_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place is looked at when the engine is told of the trainer, not in its first update."""
    monkeypatch.setenv("FANIN_PLACE", "east/r1/h1")
    with pytest.raises(ConfigError, match="FANIN_PLACE"):
        Trainer(Source.of("127.0.0.1:6000"), "full:0", relay="host")
    Trainer(Source.of("127.0.0.1:6000"), "full:0")
    monkeypatch.setenv("FANIN_PLACE", "east/r1")
    place = Place()
    trainer = Trainer(Source.of("127.0.0.1:6000"), "full:0", place.client, relay="host")
    trainer.ready(soon())
    given: dict[str, Any] = {}
    monkeypatch.setattr("fanin.relay.Relay", lambda addresses, **how: given.update(how))
    assert trainer.reader is None
    assert given["place"] == "east/r1"
