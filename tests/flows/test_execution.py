"""Stages side by side: one by default, never two on one GPU. Untested on GPUs: the device count is faked here."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.execution import gpus_for
from flows.pipeline import pipeline
from tests.flows.test_pipeline import moments

Toy = Callable[..., Path]
WIDE = {"first": ("work", []), **{name: ("sleep 1", ["first"]) for name in "abcd"}, "last": ("work", list("abcd"))}


@pytest.fixture
def busy() -> Iterator[None]:
    """A process that keeps a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


def most_at_once(root: Path) -> int:
    spans = [tuple(times[-2:]) for times in moments(root).values()]
    return max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)


@pytest.mark.parametrize(
    ("count", "visible", "jobs", "expected"),
    [
        (8, None, 1, [None]),
        (0, None, 3, [None, None, None]),
        (0, "", 2, [None, None]),
        (1, None, 4, ["0"]),
        (4, None, 2, ["0", "1"]),
        (2, "5,GPU-ab", 4, ["5", "GPU-ab"]),
    ],
)
def test_a_gpu_for_each_place(
    monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None, jobs: int, expected: list[str | None]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_for(jobs) == expected


def test_stages_run_one_at_a_time_by_default(toy: Toy, prefect_api: str) -> None:
    root = toy(WIDE)
    pipeline(root=str(root))
    assert most_at_once(root) == 1
    assert list(moments(root)) == ["first", *"abcd", "last"], "not in the order of the graph"


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 3])
def test_no_gpu_has_two_stages_at_a_time(
    gpus: int, toy: Toy, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    root = toy(WIDE)
    worker = (root / "worker.py").read_text()
    (root / "worker.py").write_text(worker.replace("{sys.executable}", "{os.environ['CUDA_VISIBLE_DEVICES']}"))
    pipeline(root=str(root), jobs=8)
    spans: dict[str, list[tuple[float, float]]] = {}
    begun: dict[str, tuple[str, float]] = {}
    for line in (root / "log.txt").read_text().splitlines():
        stage, event, moment, _, gpu = line.split()
        if event == "begin":
            begun[stage] = gpu, float(moment)
        else:
            spans.setdefault(gpu, []).append((begun[stage][1], float(moment)))
    assert set(spans) == {str(index) for index in range(gpus)}
    for times in spans.values():
        times.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))


@pytest.mark.slow
def test_two_jobs_give_the_bytes_of_one_ten_times_under_load(
    toy: Toy, busy: None, serial: Callable[[Path], None], prefect_api: str
) -> None:
    root = toy(WIDE)
    twin = Path(shutil.copytree(root, root.with_name("twin")))
    serial(twin)
    at_once = []
    for _ in range(10):
        for path in (*root.glob("*.out"), root / "dvc.lock", root / "log.txt"):
            path.unlink(missing_ok=True)
        shutil.rmtree(root / ".dvc" / "cache", ignore_errors=True)
        outcomes: dict[str, Any] = pipeline(root=str(root), jobs=2, retries=0)
        assert {one.state for one in outcomes.values()} == {"Completed"}
        assert (root / "dvc.lock").read_bytes() == (twin / "dvc.lock").read_bytes()
        at_once.append(most_at_once(root))
    assert max(at_once) == 2
    assert [path.name for path in (root / "work").iterdir()] == ["driver.lock"]
