# SPDX-License-Identifier: Apache-2.0
"""A model's directory that begins with an older one and what has changed since."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fanin
import local_world
import numpy as np
import pytest
from fanin.errors import FaninError
from local_world import PATIENCE
from safetensors.numpy import load_file

RUN, KEPT = "full:0", 4
FILE = "model.safetensors"


def model(rows: int = 300) -> dict[str, np.ndarray]:
    """Words, bytes and floats; a head that is tied to its embedding."""
    random = np.random.default_rng(rows)
    embedding = random.integers(0, 1 << 16, (rows, 400), np.uint16)
    return {
        "embed.weight": embedding,
        "head.weight": embedding,
        "gate.weight": random.integers(0, 256, (rows, 301), np.uint8),
        "norm.weight": random.standard_normal((rows, 7), np.float32),
    }


class Trainer:
    """Ranks that publish snapshots: each a part of the rows, or all of them as replicas."""

    def __init__(self, ranks: list[fanin.Server], *, replicas: bool = False) -> None:
        self.ranks, self.replicas = ranks, replicas
        self.random = np.random.default_rng(1)
        self.step = 0
        self.serve(model())

    def serve(self, now: dict[str, np.ndarray]) -> None:
        """These tensors from now on."""
        self.now = now
        for server in self.ranks:
            if self.step:
                server.begin_update(RUN)
            shards = (self.shard(server.rank, name, one) for name, one in now.items())
            server.put(RUN, list(shards), replace=True)
            if self.step:
                server.abort_update(RUN)
        self.commit()

    def shard(self, rank: int, name: str, one: np.ndarray) -> fanin.Shard:
        if self.replicas:
            return fanin.shard_of(name, one)
        rows = np.array_split(np.arange(len(one)), len(self.ranks))[rank]
        offset = (int(rows[0]),) + (0,) * (one.ndim - 1)
        return fanin.shard_of(name, one[rows[0] : rows[-1] + 1], shape=one.shape, offset=offset)

    def commit(self, share: float = 0.004) -> None:
        """The next step, in which that share of all words has changed."""
        for one in self.now.values():
            words = one.reshape(-1).view(np.uint8)
            words[self.random.random(words.size) < share / 2] += 1
        self.step += 1
        for server in self.ranks:
            if self.step > 1:
                server.begin_update(RUN)
            server.commit(RUN, self.step, snapshot=True, wait=True, deltas=KEPT)

    def check(self, directory: Path) -> None:
        """The directory holds this step, as another library reads it."""
        held: dict[str, np.ndarray] = {}
        for file in directory.glob("*.safetensors"):
            held |= load_file(file)
        assert held.keys() == self.now.keys()
        for name, one in self.now.items():
            assert held[name].dtype == one.dtype
            assert held[name].tobytes() == one.tobytes(), name
        assert json.loads((directory / "fanin.json").read_text())["step"] == self.step

    def pull(self, directory: Path, old: Path | None = None, **options: Any) -> fanin.PullResult:
        """As a program that is started for each step."""
        with local_world.client_of(self.ranks) as client:
            result = client.pull_model(RUN, directory, delta_from=old, timeout=PATIENCE, **options)
        self.check(directory)
        assert sorted(one for one in os.listdir(directory.parent) if one[0] == ".") == []
        return result


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with local_world.servers(2) as ranks:
        yield Trainer(ranks)


def digest(directory: Path) -> dict[str, str]:
    """Of every file."""
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in directory.iterdir()}


@pytest.fixture
def old(trainer: Trainer, tmp_path: Path) -> Path:
    """Of the step before."""
    where = tmp_path / "old"
    result = trainer.pull(where, where)
    assert result.whole_because == "there is no older directory"
    trainer.commit()
    return where


def assert_delta(result: fanin.PullResult, base: int) -> None:
    assert result.whole_because == ""
    assert (result.base_step, result.verified, result.restarts) == (base, True, 0)
    assert 0 < result.patch_bytes < result.bytes / 4


def whole(trainer: Trainer, old: Path, new: Path, because: str, **options: Any) -> None:
    before = digest(old)
    result = trainer.pull(new, old, **options)
    assert because in result.whole_because
    assert digest(old) == before


# ------------------------------------------------------------------------------ the usual


@pytest.mark.parametrize("options", [{}, {"max_file_bytes": 200_000}], ids=["one", "files"])
def test_one_directory_after_the_other(
    trainer: Trainer, tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer.pull(tmp_path / "1", tmp_path / "0", **options)
    for missed in range(1, KEPT + 1):
        before, step = tmp_path / str(trainer.step), trainer.step
        for _ in range(missed):
            trainer.commit()
        held = digest(before)
        assert_delta(trainer.pull(tmp_path / str(trainer.step), before, **options), step)
        assert digest(before) == held
    for _ in range(KEPT + 1):
        trainer.commit()
    whole(
        trainer,
        tmp_path / str(trainer.step - KEPT - 1),
        tmp_path / "last",
        "no patches from the step",
        **options,
    )


def test_a_directory_is_replaced(trainer: Trainer, old: Path) -> None:
    old.chmod(0o700)
    kept = os.open(old / FILE, os.O_RDONLY)
    size, before = os.fstat(kept).st_size, (old / FILE).read_bytes()
    for _ in range(3):
        assert_delta(trainer.pull(old, old), trainer.step - 1)
        trainer.commit()
    assert old.stat().st_mode & 0o777 == 0o700
    assert os.pread(kept, size + 1, 0) == before  # who has it open reads on
    os.close(kept)
    trainer.pull(old, old)
    inode = old.stat().st_ino
    assert trainer.pull(old, old).reused
    assert old.stat().st_ino == inode


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_a_directory_that_is_read_only(trainer: Trainer, old: Path) -> None:
    """Nothing of it is left beside the new one, which has its mode."""
    old.chmod(0o555)
    words = ["setpriv", "--bounding-set", "-dac_override", *command(trainer, old)]
    subprocess.run([*words, "--delta-from", old], check=True, timeout=PATIENCE)
    trainer.check(old)
    assert old.stat().st_mode & 0o777 == 0o555
    assert os.listdir(old.parent) == ["old"]


def test_nothing_has_changed(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    trainer.pull(old, old)
    result = trainer.pull(tmp_path / "copy", old)
    assert (result.whole_because, result.base_step, result.patch_bytes) == (
        "",
        trainer.step,
        0,
    )


def test_by_a_link(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("old")
    assert_delta(trainer.pull(tmp_path / "new", tmp_path / "current"), trainer.step - 1)


def test_replicas(tmp_path: Path) -> None:
    """Each process chooses among replicas; a patch is of the one that was read."""
    where = tmp_path / "model"
    with local_world.servers(2) as ranks:
        trainer = Trainer(ranks, replicas=True)
        trainer.pull(where, where)
        for _ in range(8):
            trainer.commit()
            assert_delta(trainer.pull(where, where), trainer.step - 1)


# --------------------------------------------------------------------- what is read whole


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("name", "damage", "because"),
    [
        ("a bit", lambda old: flip(old / FILE, -1000), "not what the ranks held"),
        ("a bit of a header", lambda old: flip(old / FILE, 30), "not the files"),
        ("cut", lambda old: os.truncate(old / FILE, 100_000), "not the files"),
        ("no file", lambda old: (old / FILE).unlink(), "a file is missing in"),
        (
            "a folder",
            lambda old: ((old / FILE).unlink(), (old / FILE).mkdir()),
            "no regular one",
        ),
        (
            "others'",
            lambda old: (old / FILE).chmod(0o666),
            "may write a file of the older",
        ),
        ("all others'", lambda old: old.chmod(0o777), "other users (chmod go-w)"),
        (
            "identity of others",
            lambda old: (old / "fanin.json").chmod(0o666),
            "write fanin.json",
        ),
        (
            "no identity",
            lambda old: (old / "fanin.json").unlink(),
            "no readable fanin.json",
        ),
        (
            "half of it",
            lambda old: os.truncate(old / "fanin.json", 99),
            "no readable fanin.json",
        ),
        (
            "no base",
            lambda old: forge(old / "fanin.json", lambda f: f.pop("delta_base")),
            "does not say which copies",
        ),
        (
            "no ranks",
            lambda old: forge(old / "fanin.json", lambda f: f["delta_base"].pop("ranks")),
            "another plan",
        ),
        (
            "no rank",
            lambda old: forge(old / "fanin.json", lambda f: f["delta_base"]["ranks"].pop()),
            "another plan",
        ),
        (
            "numbers",
            lambda old: forge(
                old / "fanin.json",
                lambda f: f["delta_base"]["ranks"][0].update(generation="7"),
            ),
            "does not say which copies",
        ),
        (
            "a seed",
            lambda old: forge(old / "fanin.json", lambda f: f["delta_base"].update(plan="0" * 32)),
            "another plan",
        ),
        (
            "no patches from",
            lambda old: forge(
                old / "fanin.json",
                lambda f: f["delta_base"]["ranks"][0].update(generation=-3),
            ),
            "no patches from the step",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_damaged(
    trainer: Trainer, old: Path, tmp_path: Path, name: str, damage: Any, because: str
) -> None:
    del name
    damage(old)
    before = {one.name: one.stat().st_mtime_ns for one in old.iterdir()}
    result = trainer.pull(tmp_path / "new", old)
    assert because in result.whole_because
    assert {one.name: one.stat().st_mtime_ns for one in old.iterdir()} == before
    trainer.commit()
    assert_delta(trainer.pull(tmp_path / "next", tmp_path / "new"), trainer.step - 1)


def test_what_is_no_directory_of_ours(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = trainer.pull(tmp_path / "1", tmp_path / "file").whole_because
    assert told == "what is given as the older directory is none"
    if os.geteuid() != 0:
        return
    os.chown(old, 4321, 4321)
    told = trainer.pull(tmp_path / "2", old).whole_because
    assert told == "the older directory belongs to another user"


def test_a_damaged_directory_is_replaced(trainer: Trainer, old: Path) -> None:
    flip(old / FILE, -1000)
    assert "not what the ranks held" in trainer.pull(old, old).whole_because
    flip(old / FILE, -1000)  # of the step that is asked for
    assert "not what the ranks held" in trainer.pull(old, old).whole_because


def test_a_base_that_lies(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    """It says that it is of the newest copies, and so that nothing is to be read."""
    trainer.pull(tmp_path / "new", old)
    newest = json.loads((tmp_path / "new" / "fanin.json").read_text())["delta_base"]
    forge(old / "fanin.json", lambda found: found.update(delta_base=newest))
    whole(trainer, old, tmp_path / "again", "not what the ranks held")


def test_another_launch(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    with local_world.servers(2) as ranks:
        again = Trainer(ranks)
        again.commit()
        whole(again, old, tmp_path / "new", "started again")
        again.pull(old, old)
        again.commit()
        assert_delta(again.pull(old, old), again.step - 1)


def test_another_launch_of_the_same_world(trainer: Trainer, old: Path) -> None:
    """Its step has the number of the one that is there, and other bytes."""
    trainer.pull(old, old)
    with local_world.servers(2, world_id=trainer.ranks[0].world_id) as ranks:
        again = Trainer(ranks)
        again.commit(0.9)
        assert (again.step, again.pull(old, old).reused) == (trainer.step, False)
        assert again.pull(old, old).reused


def test_other_tensors(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    more = {"more.weight": np.ones((4, 4), np.float32)}
    trainer.serve(trainer.now | more)
    whole(trainer, old, tmp_path / "more", "tables of a rank have changed")
    trainer.serve(model(rows=500) | more)
    whole(trainer, tmp_path / "more", tmp_path / "larger", "tables of a rank have changed")
    trainer.commit()
    assert_delta(trainer.pull(tmp_path / "next", tmp_path / "larger"), trainer.step - 1)


def test_other_files(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    whole(trainer, old, tmp_path / "new", "another plan", max_file_bytes=200_000)


def test_another_dtype(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    with local_world.client_of(trainer.ranks) as client:
        result = client.pull_model(RUN, new, delta_from=old, dtype="BF16", timeout=PATIENCE)
    assert result.whole_because == "tensors arrive as another dtype"
    whole(trainer, new, tmp_path / "back", "converted to another dtype")


def test_without_patches(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    for server in trainer.ranks:
        server.begin_update(RUN)
        server.commit(RUN, trainer.step + 1, snapshot=True, wait=True)
    trainer.step += 1
    whole(trainer, old, tmp_path / "new", "keeps no patches")
    assert "delta_base" not in json.loads((tmp_path / "new" / "fanin.json").read_text())


# ------------------------------------------------------------------------- what is refused


def test_what_is_not_replaced(trainer: Trainer, old: Path) -> None:
    for mine in ("tokenizer.json", "config.json", "model-00001-of-00002.safetensors"):
        (old / mine).write_text("mine")
        before = digest(old)
        with pytest.raises(FaninError, match=f"'{mine}' in it was made by no pull"):
            trainer.pull(old, old)
        assert digest(old) == before
        (old / mine).unlink()
    forge(old / "fanin.json", lambda found: found.update(publication="full:1"))
    before = digest(old)
    with pytest.raises(FaninError, match="another publication"):
        trainer.pull(old, old)
    (old / "fanin.json").unlink()
    del before["fanin.json"]
    with pytest.raises(FaninError, match=r"no readable fanin\.json"):
        trainer.pull(old, old)
    assert digest(old) == before


def test_another_publication(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    forge(old / "fanin.json", lambda found: found.update(publication="full:1"))
    whole(trainer, old, tmp_path / "new", "another publication")


# ----------------------------------------------------------------------------- the command


def command(trainer: Trainer, *words: str | Path) -> list[str]:
    target = ",".join(local_world.addresses(trainer.ranks))
    return [
        local_world.nixl_fetch(),
        "pull",
        target,
        RUN,
        *map(str, words),
        "--path",
        "stream",
    ]


def run(trainer: Trainer, *words: str | Path, status: int = 0) -> str:
    done = subprocess.run(
        command(trainer, *words),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_the_command(trainer: Trainer, tmp_path: Path) -> None:
    where = tmp_path / "model"
    told = run(trainer, where, "--delta-from", where)
    assert f"delta     nothing of {where} was used: there is no older directory" in told
    trainer.commit()
    told = run(trainer, where, "--delta-from", where)
    assert "of patches since step 1, " in told
    trainer.check(where)
    trainer.commit()
    told = json.loads(run(trainer, where, "--delta-from", where, "--json"))
    assert (told["base_step"], told["whole_because"], told["verified"]) == (
        2,
        None,
        True,
    )
    assert 0 < told["patch_bytes"] < told["bytes"] / 4
    trainer.check(where)
    assert "was there already" in run(trainer, where, "--delta-from", where)
    told = json.loads(run(trainer, tmp_path / "new", "--delta-from", tmp_path / "no", "--json"))
    assert (told["base_step"], told["whole_because"]) == (
        None,
        "there is no older directory",
    )
    assert "base_step" not in json.loads(run(trainer, tmp_path / "plain", "--json"))


def test_the_rate_of_reading(trainer: Trainer, old: Path) -> None:
    """Is that of the patches: no link carries the whole in that time."""
    for where in (old, old.with_name("beside")):  # of which nothing has changed since
        told = run(trainer, where, "--delta-from", old)
        found = re.search(r"^read +([\d.]+) (us|ms|s) +([\d.]+) (MB|GB)/s$", told, re.M)
        assert found, told
        took, unit, rate, prefix = found.groups()
        seconds = float(took) * {"us": 1e-6, "ms": 1e-3, "s": 1}[unit]
        read = seconds * float(rate) * {"MB": 1e6, "GB": 1e9}[prefix]
        assert read < sum(one.nbytes for one in trainer.now.values()) / 4


def test_the_list(trainer: Trainer, old: Path) -> None:
    words = [
        local_world.nixl_fetch(),
        "list",
        ",".join(local_world.addresses(trainer.ranks)),
    ]
    told = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "run full:0: deltas lead 1 step back; the last has 1." in told.stdout
    trainer.commit()
    told = subprocess.run(
        [*words, "--json"], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    for rank in json.loads(told.stdout)["runs"][0]["ranks"]:
        assert rank["patches"] == 2
        assert 0 < rank["patch_bytes"] < rank["bytes"] / 10
    with local_world.client_of(trainer.ranks) as client:
        assert client.pull_model(RUN, old, delta_from=old, timeout=PATIENCE).patch_bytes > 0


def test_killed(trainer: Trainer, old: Path) -> None:
    """At any moment: the directory is of one step or the next, whole."""
    rounds = np.linspace(0, 0.06, 25)
    for seconds in rounds:
        before = digest(old)
        process = subprocess.Popen(
            command(trainer, old, "--delta-from", old, "-q"), stdout=subprocess.DEVNULL
        )
        time.sleep(seconds)
        process.kill()
        process.wait()
        if digest(old) != before:
            trainer.check(old)
            trainer.commit()
    trainer.commit()
    trainer.pull(old, old)  # which clears up


def test_two_at_once(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    places = [old, old, tmp_path / "a", tmp_path / "b"]
    told: list[fanin.PullResult] = []

    def pull(place: Path) -> None:
        with local_world.client_of(trainer.ranks) as client:
            told.append(client.pull_model(RUN, place, delta_from=old, timeout=PATIENCE))

    for _ in range(5):
        threads = [threading.Thread(target=pull, args=(place,)) for place in places]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        for place in places:
            trainer.check(place)
        for place in places[2:]:
            shutil.rmtree(place)
        trainer.commit()
    assert len(told) == 5 * len(places)
    assert sum(one.reused for one in told) == 5


def test_a_full_disk(trainer: Trainer, old: Path, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    size = sum(one.stat().st_size for one in old.iterdir()) * 3 // 2
    script = (
        f"mount -t tmpfs -o size={size} tmpfs /mnt && cp -r {old} /mnt/model && "
        'before=$(sha256sum /mnt/model/*) && "$@"; status=$?; '
        '[ "$before" = "$(sha256sum /mnt/model/*)" ] && [ "$(ls -A /mnt)" = model ] || exit 99; '
        "exit $status"
    )
    words = command(trainer, "/mnt/model", "--delta-from", "/mnt/model")
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, "full", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, "no room for" in done.stderr) == (15, True), done.stderr


def test_a_rank_that_dies(trainer: Trainer, old: Path) -> None:
    before = digest(old)
    trainer.ranks[1].close()
    with local_world.client_of(trainer.ranks) as client, pytest.raises(FaninError):
        client.pull_model(RUN, old, delta_from=old, timeout=1.5)
    assert digest(old) == before
    assert os.listdir(old.parent) == ["old"]


def step_of(directory: Path) -> int:
    """0: there is none, or it is just being replaced."""
    try:
        step: int = json.loads((directory / "fanin.json").read_text())["step"]
    except FileNotFoundError:
        return 0
    return step


def wait_for(trainer: Trainer, where: Path) -> None:
    end = time.monotonic() + PATIENCE
    while step_of(where) != trainer.step:
        assert time.monotonic() < end
        time.sleep(0.01)
    trainer.check(where)


def tell_ranks(info: Path, trainer: Trainer) -> None:
    ports = [one.port - one.rank for one in trainer.ranks]
    hosts = [{"host": "127.0.0.1", "base_port": at, "ranks": [i]} for i, at in enumerate(ports)]
    new = info.with_suffix(".new")
    new.write_text(json.dumps({"hosts": hosts}))
    new.replace(info)


def test_the_loop_of_the_page(trainer: Trainer, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "deltas.md"
    script = page.read_text().split("```bash\n")[1].split("```")[0]
    where = tmp_path / "model"
    paths = f"{Path(local_world.nixl_fetch()).parent}:{os.environ['PATH']}"
    info = tmp_path / "nixl_info.json"
    tell_ranks(info, trainer)
    told = {"TRAINER": str(info), "DIR": str(where)}
    loop = subprocess.Popen(
        ["bash", "-eu", "-c", script],
        env=os.environ | told | {"PATH": paths, "PAUSE": "0.1"},
        start_new_session=True,
    )
    try:
        for _ in range(4):
            wait_for(trainer, where)
            trainer.commit()
        with local_world.servers(2) as ranks:  # started again, from its first step
            again = Trainer(ranks)
            tell_ranks(info, again)
            wait_for(again, where)
    finally:
        os.killpg(loop.pid, signal.SIGKILL)
        loop.wait(PATIENCE)
