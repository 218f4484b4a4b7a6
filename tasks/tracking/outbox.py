"""The outbox stores tracking events on the local disk until MLflow has received them.

Each stage process has a folder `work/outbox/<stage>-<key>-<time>-<pid>/`: `events.jsonl` (append-only), `files/`
(copies of artifacts), `state.json` (the sender's position) and two lock files. Does not import mlflow.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.locks import FileLock, is_held
from tasks.tracking.settings import main_checkout

EVENTS = "events.jsonl"
STATE = "state.json"
OWNER_LOCK = "owner.lock"
SENDER_LOCK = "sender.lock"
NAME = re.compile(r"[^.].*-\d{20}-\d+")
LINK_ABOVE_BYTES = 8 * 2**20  # copying more could block the training for more than 50 ms


class Unreachable(Exception):
    """MLflow cannot be reached now; unsent events stay in the outbox."""


def outbox_folder(root: Path) -> Path:
    """The folder that holds the outboxes of all workspaces of the main checkout of `root`."""
    return main_checkout(root) / "work" / "outbox"


def now_ms() -> int:
    """Wall-clock time in milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True)
class Event:
    """One line of `events.jsonl`; `end` is the byte offset after it."""

    kind: str
    at: int
    body: dict[str, Any]
    end: int


@dataclass
class State:
    """The sender's position for one address; a new address starts from the beginning."""

    uri: str
    offset: int = 0
    parent_id: str | None = None
    run_id: str | None = None
    closed: bool = False
    replayed: bool = False
    last_steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, uri: str) -> State:
        """The state saved in `folder`, or a new one if there is none for this address."""
        try:
            state = cls(**json.loads((folder / STATE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls(uri)
        return state if state.uri == uri else cls(uri)

    def save(self, folder: Path) -> None:
        """Write the state atomically."""
        fresh = folder / f".{STATE}"
        fresh.write_text(json.dumps(asdict(self)), encoding="utf-8")
        fresh.replace(folder / STATE)


class Outbox:
    """Writes events; owned by one process until it ends."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn
        self._mutex = threading.Lock()
        self._owner = FileLock(folder / OWNER_LOCK)
        self._fd: int | None = None
        self._torn = False
        self._files = 0

    @classmethod
    def create(cls, root: Path, series: str, warn: Callable[[str], None]) -> Outbox:
        """A new outbox. `series` is the stage and its key; outboxes of a series are sent in order."""
        name = f"{series}-{time.time_ns():020d}-{os.getpid()}"
        outbox = cls(outbox_folder(root) / name, warn)
        with best_effort(warn):
            hidden = outbox_folder(root) / f".new-{name}"
            hidden.mkdir(parents=True)
            outbox._owner = FileLock(hidden / OWNER_LOCK)
            outbox._owner.acquire()
            outbox._fd = os.open(hidden / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            hidden.rename(outbox.folder)
        return outbox

    def append(self, kind: str, **body: Any) -> None:
        """Add one event in one system call. If the disk is full the event is lost with a warning."""
        line = _line(kind, **body)
        with self._mutex, best_effort(self._warn):
            if self._fd is None:
                return
            data = b"\n" * self._torn + line
            self._torn = os.write(self._fd, data) != len(data)

    def keep(self, path: Path) -> str | None:
        """Copy the file `path` into the outbox, or link it if it is large; its path in the outbox, or None."""
        with self._mutex, best_effort(self._warn):
            target = self._new_file(path.name)
            if path.stat().st_size > LINK_ABOVE_BYTES and path.stat().st_dev == target.parent.stat().st_dev:
                os.link(path, target)
            else:
                shutil.copyfile(path, target)
            return target.relative_to(self.folder).as_posix()
        return None

    def keep_text(self, name: str, text: str) -> str | None:
        """Write `text` as a file in the outbox; its path in the outbox, or None."""
        with self._mutex, best_effort(self._warn):
            target = self._new_file(name)
            target.write_text(text, encoding="utf-8", errors="backslashreplace")
            return target.relative_to(self.folder).as_posix()
        return None

    def _new_file(self, name: str) -> Path:
        self._files += 1
        target = self.folder / "files" / str(self._files) / name
        target.parent.mkdir(parents=True)
        return target

    def close(self) -> None:
        """Release the outbox; no event may follow."""
        with self._mutex:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            self._owner.release()


class Appender:
    """Appends metrics to the outbox of another process, one line in one system call; after that process has removed it,
    to nothing. Raises OSError when it is already gone."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / EVENTS, os.O_WRONLY | os.O_APPEND)

    def metrics(self, values: dict[str, float], step: int) -> None:
        """One step; it is lost when the disk is full."""
        with suppress(OSError):
            os.write(self._fd, _line("metrics", metrics=values, step=step))


@contextmanager
def best_effort(warn: Callable[[str], None]) -> Iterator[None]:
    """Turn an OSError into a warning."""
    try:
        yield
    except OSError as error:
        warn(f"tracking: not recorded ({error}); the stage goes on")


def pending(root: Path) -> list[Path]:
    """All outboxes, the oldest first. Deletes the remains of removed ones."""
    folders = []
    for folder in outbox_folder(root).glob("*"):
        if folder.name.startswith(".gone-"):
            shutil.rmtree(folder, ignore_errors=True)
        elif NAME.fullmatch(folder.name) and (folder / EVENTS).is_file():
            folders.append(folder)
    return sorted(folders, key=created)


def created(folder: Path) -> int:
    """Creation time in nanoseconds."""
    return int(folder.name.rsplit("-", 2)[1])


def series(folder: Path) -> str:
    """The stage and key of the outbox."""
    return folder.name.rsplit("-", 2)[0]


def is_owned(folder: Path) -> bool:
    """Whether the process that writes this outbox is alive and has not closed it."""
    return is_held(folder / OWNER_LOCK)


def read_events(folder: Path, offset: int, limit: int = 500) -> list[Event]:
    """Up to `limit` complete lines from byte `offset`; a broken line is an event without a kind."""
    events: list[Event] = []
    with (folder / EVENTS).open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            if not line.endswith(b"\n"):  # still being written
                break
            offset += len(line)
            try:
                body = json.loads(line)
                events.append(Event(str(body.pop("kind")), int(body.pop("at")), body, offset))
            except (ValueError, KeyError, AttributeError):
                events.append(Event("", 0, {}, offset))
            if len(events) == limit:
                break
    return events


def waiting(folder: Path, uri: str) -> int:
    """The number of events that the address with this mark has not received."""
    return len(read_events(folder, State.load(folder, uri).offset, limit=sys.maxsize))


def remove(folder: Path) -> None:
    """Delete an outbox; other processes see all of it or nothing."""
    gone = folder.with_name(f".gone-{folder.name}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _line(kind: str, **body: Any) -> bytes:
    text = json.dumps({"kind": kind, "at": now_ms(), **body}, ensure_ascii=False, default=_plain)
    return f"{text}\n".encode(errors="backslashreplace")


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
