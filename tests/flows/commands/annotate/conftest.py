"""Annotation sessions: in memory of the test, and as the real command in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.commands.annotate.store import Store, create
from flows.commands.annotate.tasks import Task
from flows.server import _free_port
from tests.conftest import ROOT, clean_environment

ADDRESS = re.compile(r"^(.+): (http://[\d.]+:\d+/\?token=\S+)$", re.MULTILINE)


def task(number: int, answers: int = 2, right: int | None = None) -> Task:
    """A task whose texts contain its number."""
    texts = tuple(f"answer {place} of {number}" for place in range(answers))
    return Task([{"role": "user", "content": f"question {number}"}], texts, (True,) * answers, right)


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """A session with these tasks."""
    made: list[Store] = []

    def make(tasks: list[Task], name: str = "labels", **settings: Any) -> Store:
        create(tmp_path / f"{name}.db", {"overlap": 1, "gold_every": 10, "seed": 1} | settings, tasks)
        store = Store(tmp_path / f"{name}.db")
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_questions(path: Path, prompts: int, answers: int = 2) -> Path:
    rows = [
        {"prompt": f"question {i}", "responses": [f"answer {place} of {i}" for place in range(answers)]}
        for i in range(prompts)
    ]
    return write_rows(path, rows)


@dataclass
class Served:
    """`leash annotate` in a folder of its own."""

    root: Path
    port: int
    process: "subprocess.Popen[str] | None" = None
    printed: str = ""
    addresses: dict[str, str] = field(default_factory=dict)

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run `leash annotate` to its end."""
        return subprocess.run(
            self._words(*arguments), cwd=self.root, env=environment(), capture_output=True, text=True, check=False,
            timeout=100,
        )  # fmt: skip

    def start(self, *arguments: str) -> dict[str, str]:
        """Start the server and return the addresses that it prints."""
        log = self.root / "annotate.log"
        with log.open("w", encoding="utf-8") as file:
            words = self._words("--port", str(self.port), *arguments)
            self.process = subprocess.Popen(
                words, cwd=self.root, env=environment(), stdout=file, stderr=subprocess.STDOUT, text=True
            )
        deadline = time.monotonic() + 100
        while "stop with Ctrl-C" not in (text := log.read_text(encoding="utf-8")):
            assert self.process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        self.addresses = dict(ADDRESS.findall(text))
        assert self.addresses, text
        return self.addresses

    def stop(self, number: int = signal.SIGINT) -> str:
        """Send a signal, wait for the end, and return all that was printed."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(timeout=60)
        return (self.root / "annotate.log").read_text(encoding="utf-8")

    def _words(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", "annotate", *arguments]


def environment() -> dict[str, str]:
    return clean_environment() | {"PYTHONPATH": str(ROOT), "USER": os.environ.get("USER", "me"), "LOGNAME": "owner"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A folder that counts as a project, without samples."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    (root / "params.yaml").write_text("trust_remote_code: false\n", encoding="utf-8")
    found = Served(root, _free_port())
    yield found
    if found.process is not None and found.process.poll() is None:
        found.process.kill()
        found.process.wait()
