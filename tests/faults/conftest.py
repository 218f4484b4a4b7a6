"""What tests of faults share."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 240.0) -> None:
    """Wait until the condition holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within its time"
        time.sleep(0.05)


def log_of(root: Path) -> list[str]:
    """The lines `stage event` of the toy project's log."""
    path = root / "log.txt"
    return [" ".join(line.split()[:2]) for line in path.read_text().splitlines()] if path.exists() else []
