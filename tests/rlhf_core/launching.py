"""Processes that train together, as a launcher such as torchrun starts them, but forked (`tests/warm.py`)."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests import warm
from tests.conftest import ROOT, clean_environment

SECONDS = 600.0
GRACE = 20.0
"""Seconds that the others have where one has failed; torchrun kills them, too."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(module: str, count: int, folder: Path, options: dict[str, Any], fails: bool = False) -> dict[str, Any]:
    """What `python -m module folder options` saves in `run.pt` in so many processes; empty where it saves nothing. Each
    must end well, or with `fails` none."""
    folder.mkdir()
    environment = clean_environment() | {"PYTHONPATH": str(ROOT)}
    if count > 1:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        environment |= {name: str(value) for name, value in group.items()}
    started = []
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
        with (folder / f"log-{rank}").open("w") as log:
            command = [sys.executable, "-m", module, str(folder), json.dumps(options)]
            process = warm.Popen(command, cwd=ROOT, env=environment | own, stdout=log, stderr=log, text=True)
            started.append(process)
    deadline = time.monotonic() + SECONDS
    while any(process.poll() is None for process in started):
        if any(process.poll() for process in started):
            deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            for process in started:
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    printed = "\n".join((folder / f"log-{rank}").read_text()[-3000:] for rank in range(count))
    assert {process.returncode != 0 for process in started} == {fails}, printed
    saved = folder / "run.pt"
    return torch.load(saved, weights_only=True) if saved.exists() else {}
