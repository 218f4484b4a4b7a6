"""What dead processes left in DVC's list of files at work (`.dvc/tmp/rwlock`). DVC itself strikes out a process that is
gone; but one that is dead and unburied, or whose number another program has by now, blocks it, and so does a file that
was being written when its writer was killed. The list is touched here under DVC's own lock of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil


def sweep(root: Path) -> list[str]:
    """Strike out what no living DVC process stands behind; one line about each."""
    from dvc.lock import LockError, make_lock
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        if repo.tmp_dir is None or not (path := Path(repo.tmp_dir) / "rwlock").is_file():
            return []
        hardlink = repo.config["core"].get("hardlink_lock", False)
        try:
            with make_lock(str(path.with_name("rwlock.lock")), tmp_dir=str(path.parent), hardlink_lock=hardlink):
                return list(_sweep(path))
        except LockError:
            return []


def _sweep(path: Path) -> Iterator[str]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        readers, writers = dict(listed.get("read", {})), dict(listed.get("write", {}))
        dead = [info for infos in readers.values() for info in infos if not works(info)]
        dead += [info for info in writers.values() if not works(info)]
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        path.unlink(missing_ok=True)
        yield "removed .dvc/tmp/rwlock, which a killed DVC process had left half-written"
        return
    if not dead:
        return
    living = {file: [info for info in infos if info not in dead] for file, infos in readers.items()}
    kept = {
        "write": {file: info for file, info in writers.items() if info not in dead},
        "read": {file: infos for file, infos in living.items() if infos},
    }
    path.write_text(json.dumps(kept), encoding="utf-8")
    for info in {json.dumps(info, sort_keys=True): info for info in dead}.values():
        yield f"struck a dead DVC process out of .dvc/tmp/rwlock (PID {info['pid']})"


def works(info: dict[str, Any]) -> bool:
    """Whether the process in an entry of the list is the one that wrote it: DVC notes its number and its arguments."""
    try:
        process = psutil.Process(int(info["pid"]))
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        arguments = str(info["cmd"]).split(" ")[1:]
        return " ".join(process.cmdline()).endswith(" ".join(arguments))
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
