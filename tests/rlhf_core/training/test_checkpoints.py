"""`checkpoints.py` and `files.py`: atomic, the last two kept, damage found and reported."""

import os
from itertools import product
from pathlib import Path

import pytest

from rlhf_core import files
from rlhf_core.errors import UserError
from rlhf_core.training.checkpoints import Checkpoints


def write(store: Checkpoints, step: int) -> None:
    with store.write(step) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "weights").write_bytes(bytes(100) + bytes([step]))
        (folder / "state").write_text(str(step), encoding="utf-8")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, messages: list[str]) -> Checkpoints:
    return Checkpoints(tmp_path / "state", messages.append)


def test_an_empty_folder_holds_nothing(store: Checkpoints) -> None:
    assert store.newest() is None


def test_the_last_two_are_kept_and_the_newest_is_found(store: Checkpoints, messages: list[str]) -> None:
    """Also where the names would sort otherwise as text."""
    for step in (8, 9, 100):
        write(store, step)
    assert names(store.folder) == ["checkpoint-100", "checkpoint-9"]
    newest = store.newest()
    assert newest is not None
    assert (newest / "state").read_text(encoding="utf-8") == "100"
    assert messages == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


ADDED = lambda path: path.with_name("more").touch()  # noqa: E731


@pytest.mark.parametrize(
    ("file", "damage"),
    [*product(["deep/weights", "state", "seal.json"], [flip, cut, ADDED]), ("seal.json", Path.unlink)],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(
    store: Checkpoints, messages: list[str], damage: object, file: str
) -> None:
    write(store, 1)
    write(store, 2)
    damage(store.folder / "checkpoint-2" / file)  # type: ignore[operator]
    newest = store.newest()
    assert newest is not None
    assert newest.name == "checkpoint-1"
    assert len(messages) == 1
    assert "checkpoint-2" in messages[0]
    assert names(store.folder) == ["checkpoint-1"], "the damaged one is removed"


@pytest.mark.parametrize("file", ["deep/weights", "state"])
def test_a_missing_file_is_an_error_and_nothing_is_removed(store: Checkpoints, messages: list[str], file: str) -> None:
    """It may lie on a disk that is not mounted: the one checkpoint is not taken for none."""
    write(store, 1)
    place = store.folder / "checkpoint-1" / file
    content = place.read_bytes()
    place.unlink()
    with pytest.raises(UserError, match=f"checkpoint-1/{file}: this file of a checkpoint is missing") as error:
        store.newest()
    assert "\n" not in str(error.value)
    place.write_bytes(content)
    assert store.newest() == store.folder / "checkpoint-1"
    assert messages == []


def test_both_damaged_is_none(store: Checkpoints, messages: list[str]) -> None:
    write(store, 1)
    write(store, 2)
    for step in (1, 2):
        flip(store.folder / f"checkpoint-{step}" / "state")
    assert store.newest() is None
    assert len(messages) == 2


class Killed(BaseException):
    """What a process cannot catch."""


@pytest.mark.parametrize("call", range(20))
def test_a_kill_at_any_call_leaves_a_whole_checkpoint(
    store: Checkpoints, messages: list[str], monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """At every system call that reaches the disk: the old one or the new one is found, whole."""
    write(store, 1)
    left = [call]

    def mortal(function: object) -> object:
        def called(*arguments: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*arguments, **options)  # type: ignore[operator]

        return called

    with monkeypatch.context() as patch:
        for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, mortal(getattr(os, name)))
        patch.setattr(Path, "replace", mortal(Path.replace))
        patch.setattr(files, "remove", mortal(files.remove))
        try:
            write(store, 2)
        except Killed:
            assert left[0] < 0
    newest = Checkpoints(store.folder, messages.append).newest()
    assert newest is not None
    step = newest.name.removeprefix("checkpoint-")
    assert (newest / "state").read_text(encoding="utf-8") == step
    write(store, 3)
    assert names(store.folder)[-1] == "checkpoint-3"


def test_atomic_replaces_files_by_folders_and_back(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "place"
    with files.atomic(place) as partial:
        partial.write_text("a file", encoding="utf-8")
    with files.atomic(place) as partial:
        partial.mkdir()
        (partial / "inside").touch()
    assert names(place) == ["inside"]
    with files.atomic(place) as partial:
        partial.write_text("again", encoding="utf-8")
    assert place.read_text(encoding="utf-8") == "again"
    assert names(place.parent) == ["place"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.write_text("old", encoding="utf-8")

    def fail() -> None:
        with files.atomic(place) as partial:
            partial.write_text("half", encoding="utf-8")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert names(tmp_path) == ["place"]
    assert place.read_text(encoding="utf-8") == "old"
