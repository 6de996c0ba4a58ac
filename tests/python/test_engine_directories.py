# SPDX-License-Identifier: Apache-2.0
"""Directories of adapters: nobody deletes what another process needs, and none is used twice."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import local_world
import pytest
from fake_trainer import WORLD
from fanin.engine.directories import Lease, Places
from fanin.errors import HostError, PullTimeoutError


def soon() -> float:
    return time.monotonic() + 10.0


def fill(path: Path) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    return path


def test_a_path_is_chosen_once(tmp_path: Path) -> None:
    places = Places(tmp_path)
    first = places.choose(WORLD, "0", "policy", 7)
    assert first == tmp_path / WORLD / "0" / "policy-step7"
    assert places.choose(WORLD, "0", "policy", 7) == first
    places.spend(first, WORLD, "0", "policy", 7)
    second = places.choose(WORLD, "0", "policy", 7)
    assert second == first.with_name("policy-step7-2")
    places.spend(first, WORLD, "0", "policy", 7)
    assert places.choose(WORLD, "0", "policy", 7) == second
    assert places.choose(WORLD, "0", "policy", 8).name == "policy-step8"


def test_a_directory_of_ranks_that_were_started_again_is_left(tmp_path: Path) -> None:
    places, there = Places(tmp_path), {"0": "a", "1": "b"}
    seven = (WORLD, "0", "policy", 7)
    path = places.choose(*seven, lambda _: True)
    path.mkdir(parents=True)
    assert places.choose(*seven, lambda _: True) == path  # it does not say
    (path / "fanin.json").write_text(json.dumps({"incarnations": there}))
    assert places.choose(*seven, lambda then: then != there) == path
    other = places.choose(*seven, lambda then: then == there)
    assert other == path.with_name("policy-step7-2")
    assert Places(tmp_path).choose(*seven, lambda then: then == there) == other


@pytest.mark.parametrize("label", ["../../x", "a/b", "..", ".", "ä" * 300, "x" * 300, "a b"])
def test_names_stay_below_the_root(tmp_path: Path, label: str) -> None:
    path = Places(tmp_path).choose(WORLD, "0", label, 1)
    assert path.parent == tmp_path / WORLD / "0"
    assert len(os.fsencode(path.name)) < 200 and not path.name.startswith("..")


def test_deleted_by_the_last_who_needs_it(tmp_path: Path) -> None:
    places = Places(tmp_path / "root")
    path = places.choose(WORLD, "0", "policy", 7)
    ours = places.lease(path, soon())
    theirs = Places(tmp_path / "root").lease(path, soon())
    fill(path)
    assert ours.release(delete=True) is False and path.exists()
    assert theirs.release(delete=True) is True and not path.exists()
    assert theirs.release(delete=True) is False
    assert list((tmp_path / "root").iterdir()) == []


def test_given_up_but_not_deleted(tmp_path: Path) -> None:
    places = Places(tmp_path)
    path = places.choose(WORLD, "0", "policy", 7)
    lease = places.lease(path, soon())
    fill(path)
    assert lease.release(delete=False) is False
    assert path.exists()


def test_waits_for_the_one_who_deletes(tmp_path: Path) -> None:
    import fcntl

    places = Places(tmp_path)
    path = places.choose(WORLD, "0", "policy", 7)
    places.lease(path, soon()).release(delete=False)
    use = path.parent / f".{path.name}.fanin-use"
    with open(use) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PullTimeoutError):
            places.lease(path, time.monotonic() + 0.05)
        got = []
        waiter = threading.Thread(target=lambda: got.append(places.lease(path, soon())))
        waiter.start()
        use.unlink()
        fcntl.flock(file, fcntl.LOCK_UN)
    waiter.join(10)
    assert use.exists() and got[0].release(delete=True)


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing can be deleted, until it is undone."""

    def none_left(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("fanin.engine.directories.shutil.rmtree", none_left)
        yield patch


def filled(places: Places, *steps: int) -> list[Lease]:
    leases = [places.lease(places.choose(WORLD, "0", "policy", one), soon()) for one in steps]
    for lease in leases:
        fill(lease.path)
    return leases


def test_what_could_not_be_deleted_is_tried_again(
    tmp_path: Path, shortage: pytest.MonkeyPatch
) -> None:
    first, second, third, last = filled(Places(tmp_path / "root"), 1, 2, 3, 4)
    for lease in (first, second):
        with pytest.raises(HostError, match="Too many open files.*tried again"):
            lease.release(delete=True)
    third.release(delete=False)
    assert any("dead" in one.name for one in first.path.parent.iterdir())
    shortage.undo()
    assert first.release(delete=True) is False
    assert last.release(delete=True) is True
    assert [one.name for one in first.path.parent.iterdir() if "step3" not in one.name] == []


def test_what_is_tried_again_may_be_needed_anew_or_gone(
    tmp_path: Path, shortage: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    places = Places(root)
    first, second, last = filled(places, 1, 2, 3)
    for lease in (first, second):
        with pytest.raises(HostError):
            lease.release(delete=True)
    shortage.undo()
    again = places.lease(first.path, soon())
    fill(again.path)
    shutil.rmtree(root / WORLD / "0" / ".policy-step2.fanin-dead")
    (root / WORLD / "0" / ".policy-step2.fanin-use").unlink()
    assert last.release(delete=True) is True and again.path.exists()
    assert again.release(delete=True) is True
    assert list(root.iterdir()) == []


def test_what_was_put_off_is_deleted_with_the_next(tmp_path: Path) -> None:
    first, second = filled(Places(tmp_path / "root"), 1, 2)
    first.postpone()
    first.postpone()
    assert first.path.exists()
    assert second.release(delete=True) is True
    assert list((tmp_path / "root").iterdir()) == []


def test_a_sweep_takes_what_nobody_needs(tmp_path: Path) -> None:
    places = Places(tmp_path)
    left, used, foreign = (places.choose(WORLD, "0", "policy", step) for step in (1, 2, 3))
    program = (
        "import sys, time, os; from pathlib import Path;"
        "from fanin.engine.directories import Places;"
        "path = Path(sys.argv[2]); lease = Places(sys.argv[1]).lease(path, time.monotonic() + 10);"
        "path.mkdir(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path), str(left)], check=True)
    lease = places.lease(used, soon())
    fill(used)
    fill(foreign)  # made by somebody who takes no lease
    assert left.exists()
    assert Places(tmp_path).sweep() == [left]
    assert not left.exists() and used.exists() and foreign.exists()
    assert lease.release(delete=True)


def test_a_sweep_takes_what_a_killed_pull_left(tmp_path: Path) -> None:
    """Half of the adapter and the locks, in a folder that nobody uses again."""
    program = (
        "import os, signal, sys, time; from fanin import Client; from pathlib import Path;"
        "from fanin.engine.directories import Places; root, path = sys.argv[1], Path(sys.argv[2]);"
        "lease = Places(root).lease(path, time.monotonic() + 10);"
        "Client([sys.argv[3]], use_ucx=False, path='stream').pull_adapter(0, path,"
        " progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    places = Places(tmp_path)
    path = places.choose(WORLD, "0", "policy", 1)
    with local_world.servers(1) as ranks:
        local_world.publish(ranks, 1)
        command = [sys.executable, "-c", program, str(tmp_path), str(path)]
        subprocess.run([*command, *local_world.addresses(ranks)], check=False)
    left = [one.name for one in path.parent.iterdir()]
    assert any(".fanin-tmp-" in name for name in left) and not path.exists()
    lease = places.lease(path.with_name("policy-step2"), soon())
    assert Places(tmp_path).sweep() == [path]
    assert [one.name for one in path.parent.iterdir()] == [".policy-step2.fanin-use"]
    assert lease.release(delete=True)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_touches_its_own_only(tmp_path: Path) -> None:
    other = tmp_path / "photos" / "2020"
    other.mkdir(parents=True)
    (other / ".album.fanin-use").touch()
    (other / "album").mkdir()
    assert Places(tmp_path).sweep() == []
    assert (other / "album").exists()
    assert Places(tmp_path / "missing").sweep() == []


@pytest.mark.parametrize("planted", ["world", "run", "a link", "a world's link", "uid"])
def test_a_sweep_leaves_what_others_may_exchange(tmp_path: Path, planted: str) -> None:
    """Whoever can rename in there could put anything of ours in the place of what is deleted."""
    root = tmp_path / "root"
    places = Places(root)
    path = places.choose(WORLD, "0", "policy", 7)
    places.lease(path, soon()).release(delete=False)
    fill(path)
    root.chmod(0o1777)
    world, folder = root / WORLD, root / WORLD / "0"
    if planted == "uid":
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory away")
        os.chown(world, 1, 1)
    elif planted == "world":
        world.chmod(0o777)
    elif planted == "run":
        folder.chmod(0o777)
    else:
        moved = folder if planted == "a link" else world
        moved.rename(tmp_path / "elsewhere")
        moved.symlink_to(tmp_path / "elsewhere")
    assert places.sweep() == [] and path.exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    places = Places(tmp_path / "root")
    path = places.choose(WORLD, "0", "policy", 7)
    places.lease(path, soon()).release(delete=False)
    use = path.parent / f".{path.name}.fanin-use"
    use.unlink()
    use.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostError):
        places.lease(path, soon())
    (tmp_path / "elsewhere").touch()
    fill(path)
    assert places.sweep() == [] and path.exists()


def test_directories_of_others_are_refused(tmp_path: Path) -> None:
    places = Places(tmp_path)
    path = places.choose(WORLD, "0", "policy", 7)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / WORLD).symlink_to(elsewhere)
    with pytest.raises(HostError):
        places.lease(path, soon())
    (tmp_path / WORLD).unlink()
    (tmp_path / WORLD).mkdir()
    (tmp_path / WORLD).chmod(0o777)
    with pytest.raises(HostError):
        places.lease(path, soon())
    tmp_path.chmod(0o777)
    with pytest.raises(HostError, match="go-w"):
        places.lease(path, soon())
    tmp_path.chmod(0o770)
    with pytest.raises(HostError, match="go-w"):
        places.lease(path, soon())
    tmp_path.chmod(0o1777)
    (tmp_path / WORLD).chmod(0o700)
    assert places.lease(path, soon()).release(delete=True) is True
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(HostError, match="NIXL_LORA_CACHE_DIR"):
        Places(file / "x").lease(file / "x" / WORLD / "0" / "y", soon())


def test_the_default_root_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "fanin-1234"
    monkeypatch.setattr("fanin.engine.directories.default_cache_dir", lambda: root)
    places = Places(root)
    path = places.choose(WORLD, "0", "policy", 7)
    assert places.lease(path, soon()).release(delete=False) is False
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    for mode in (0o1777, 0o770, 0o755):
        root.chmod(mode)
        with pytest.raises(HostError, match=f"open to other users.*{mode:04o}"):
            places.lease(path, soon())
        assert places.sweep() == []
    root.chmod(0o700)
    assert places.sweep() == [path]
    root.mkdir(mode=0o700, exist_ok=True)
    root.rename(tmp_path / "elsewhere")
    root.symlink_to("elsewhere")
    with pytest.raises(HostError, match="not a directory"):
        places.lease(path, soon())


@pytest.mark.parametrize("default", [True, False])
def test_a_root_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: bool
) -> None:
    """What another user has made beforehand, with all that a lease would find in it."""
    root = tmp_path / "root"
    places = Places(root)
    path = places.choose(WORLD, "0", "policy", 7)
    places.lease(path, soon()).release(delete=False)
    fill(path)
    if os.geteuid() == 0:
        os.chown(root, 1, 1)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    if default:
        monkeypatch.setattr("fanin.engine.directories.default_cache_dir", lambda: root)
    with pytest.raises(HostError, match="belongs to uid"):
        places.lease(path, soon())
    assert places.sweep() == [] and path.exists()
