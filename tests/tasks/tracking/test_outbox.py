"""The outbox alone: appending never fails the stage, and damage is limited to the damaged event."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.locks import FileLock, is_held
from tasks.tracking import outbox
from tasks.tracking.outbox import Outbox, State
from tasks.tracking.tracker import PipelineIdentity, PipelineTracker, flatten


def test_on_a_full_disk_the_event_is_lost_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    box = Outbox.create(tmp_path, "ppo-abc", said.append)
    box.append("tags", tags={"n": "1"})
    real, full = os.write, OSError(errno.ENOSPC, "No space left on device")

    def half(fd: int, data: bytes) -> int:
        return real(fd, data[: len(data) // 2])

    def none(fd: int, data: bytes) -> int:
        raise full

    monkeypatch.setattr(os, "write", half)
    box.append("tags", tags={"n": "2"})
    monkeypatch.setattr(os, "write", none)
    box.append("tags", tags={"n": "3"})
    monkeypatch.setattr(os, "write", real)
    box.append("tags", tags={"n": "4"})
    box.close()
    events = outbox.read_events(box.folder, 0)
    assert [event.body["tags"]["n"] for event in events if event.kind] == ["1", "4"]
    assert len(said) == 1
    assert "No space left" in said[0]


def test_without_an_outbox_the_stage_goes_on(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file where a folder should be", encoding="utf-8")
    said: list[str] = []
    tracker = PipelineTracker.open(tmp_path, PipelineIdentity("k" * 64, {}), warn=said.append)
    tracker.headline({"kl": 1.0})
    tracker.close()
    assert said


def test_an_incomplete_line_is_not_read(tmp_path: Path) -> None:
    box = Outbox.create(tmp_path, "ppo-abc", print)
    box.append("tags", tags={"n": "ü"})
    (first,) = outbox.read_events(box.folder, 0)
    with (box.folder / outbox.EVENTS).open("ab") as file:
        file.write(b'{"kind": "tags", "at": 1, ')
        file.flush()
        assert outbox.read_events(box.folder, first.end) == []
        file.write(b'"tags": {}}\n')
    (second,) = outbox.read_events(box.folder, first.end)
    assert (second.kind, second.at) == ("tags", 1)
    assert len(outbox.read_events(box.folder, 0, limit=1)) == 1


def test_numpy_numbers_and_broken_text_are_written(tmp_path: Path) -> None:
    box = Outbox.create(tmp_path, "ppo-abc", print)
    box.append("metrics", metrics={"kl": np.float32(0.5)}, step=np.int64(3))
    box.append("tags", tags={"n": "\ud800"})
    first, second = outbox.read_events(box.folder, 0)
    assert first.body == {"metrics": {"kl": 0.5}, "step": 3}
    assert second.kind == "tags"


def test_a_big_artifact_is_linked_and_a_missing_one_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "LINK_ABOVE_BYTES", 10)
    said: list[str] = []
    box = Outbox.create(tmp_path, "ppo-abc", said.append)
    (tmp_path / "big").write_bytes(b"x" * 11)
    place = box.keep(tmp_path / "big")
    assert place is not None
    assert (box.folder / place).samefile(tmp_path / "big")
    assert box.keep(tmp_path / "missing") is None
    assert len(said) == 1


def test_ownership_ends_with_the_lock(tmp_path: Path) -> None:
    box = Outbox.create(tmp_path, "ppo-abc", print)
    assert outbox.is_owned(box.folder)
    assert not FileLock(box.folder / outbox.OWNER_LOCK).acquire()
    box.close()
    assert not outbox.is_owned(box.folder)
    assert not is_held(tmp_path / "nowhere" / "lock")


def test_outboxes_are_found_in_the_order_they_were_made(tmp_path: Path) -> None:
    boxes = [Outbox.create(tmp_path, series, print) for series in ("sft-b", "ppo-c", "sft-a")]
    (outbox.outbox_folder(tmp_path) / ".gone-sft-b").mkdir()
    (outbox.outbox_folder(tmp_path) / "notes").mkdir()
    assert outbox.pending(tmp_path) == [box.folder for box in boxes]
    assert not (outbox.outbox_folder(tmp_path) / ".gone-sft-b").exists()
    assert outbox.series(boxes[0].folder) == "sft-b"


def test_a_state_of_another_address_or_a_broken_one_starts_from_the_beginning(tmp_path: Path) -> None:
    State("here", offset=7, run_id="r").save(tmp_path)
    assert State.load(tmp_path, "here").offset == 7
    assert State.load(tmp_path, "there") == State("there")
    (tmp_path / outbox.STATE).write_text('{"uri": "here", "off', encoding="utf-8")
    assert State.load(tmp_path, "here") == State("here")


def test_parameters_are_flattened_and_secrets_hidden() -> None:
    flat = flatten(
        {"ppo": {"kl": {"coef": 1e-4}, "pad_token": "<pad>", "stop": [1, 2]}, "a": None, "hub": {"token": "hf_x"}}
    )
    assert flat == {
        "ppo.kl.coef": "0.0001",
        "ppo.pad_token": "<pad>",
        "ppo.stop": "[1, 2]",
        "a": "null",
        "hub.token": "(hidden)",
    }
    assert json.loads(flat["ppo.stop"]) == [1, 2]
