"""SIGTERM and Ctrl-C in every long loop: the present step is finished and saved, the run ends as KILLED, and the same
command continues behind that step to the same bytes. A second signal insists."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from mlflow.tracking import MlflowClient

from tasks.stage.progress import Progress
from tasks.tracking.exporter import export

if TYPE_CHECKING:
    from tests.conftest import Ended, Project, TinyRun

    Main = Callable[[Project, str], Ended]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Within a block, sends this process signals at the `count`-th progress line."""

    @contextmanager
    def plan(count: int, *signals: signal.Signals) -> Iterator[None]:
        update, told = Progress.update, [0]

        def updated(progress: Progress, step: int, left: float | None = None, **values: Any) -> None:
            update(progress, step, left, **values)
            told[0] += progress.unit != "reference answer"
            if told[0] == count:
                for number in signals:
                    os.kill(os.getpid(), number)

        with monkeypatch.context() as patch:
            patch.setattr(Progress, "update", updated)
            yield

    return plan


def delete_state(project: "Project", stage: str) -> None:
    """No state of the stage, and no checkpoint but the one after a signal."""
    project.set("runtime.checkpoint_every", 1000)
    shutil.rmtree(project.root / "work" / stage, ignore_errors=True)


LOOPS = [("base", 2, 3), ("sft", 7, 7), ("preferences", 2, 256), ("reward", 3, 4), ("ppo", 2, 2), ("evaluate", 1, 80)]
LOOPS += [("dpo", 2, 3), ("best_of_n", 1, 128)]
"""A stage, the progress line at which the signal comes, and behind which step (or sample) it then continues."""


@pytest.mark.slow
@pytest.mark.chosen("sft-7-7", "preferences-2-256", "ppo-2-2", "evaluate-1-80")
@pytest.mark.parametrize(("stage", "line", "step"), LOOPS)
def test_a_signal_is_answered_with_a_checkpoint(
    tiny_run: "TinyRun",
    finished: "Project",
    stage_main: "Main",
    tell: Callable[..., Any],
    stage: str,
    line: int,
    step: int,
) -> None:
    finished.set("runtime.tracking", False)
    delete_state(finished, stage)
    with tell(line, signal.SIGINT if step % 2 else signal.SIGTERM):
        ended = stage_main(finished, stage)
    assert ended.code == 130
    assert "stopping when this step is done and saved" in ended.stderr
    assert ended.stderr.splitlines()[-1] == f"{stage}: interrupted; the same command continues"
    again = stage_main(finished, stage)
    assert again.code == 0
    continues = [line for line in again.stdout.splitlines() if "continues after" in line and "reference:" not in line]
    assert [re.findall(r"continues after (?:\w+ )+(\d+)", line) for line in continues] == [[str(step)]]
    assert finished.outputs() == tiny_run.project.outputs()


def test_a_second_signal_ends_at_once(
    tiny_run: "TinyRun", finished: "Project", stage_main: "Main", tell: Callable[..., Any]
) -> None:
    finished.set("runtime.tracking", False)
    delete_state(finished, "ppo")
    with tell(2, signal.SIGTERM, signal.SIGINT):
        assert stage_main(finished, "ppo").code == 130
    again = stage_main(finished, "ppo")
    assert (again.code, "continues after step" in again.stdout) == (0, False)
    assert finished.outputs() == tiny_run.project.outputs()


def test_mlflow_shows_killed_and_then_continues_the_run(
    finished: "Project", stage_main: "Main", tell: Callable[..., Any]
) -> None:
    delete_state(finished, "ppo")
    address = f"sqlite:///{finished.root / 'mlflow.db'}"

    def newest() -> Any:
        export(finished.root, address)
        client = MlflowClient(address)
        runs = client.search_runs(["1"], "tags.`leash.stage` = 'ppo'", order_by=["attributes.start_time DESC"])
        steps = [point.step for point in client.get_metric_history(runs[0].info.run_id, "ppo/kl")]
        return runs[0].info.run_id, runs[0].info.status, steps

    with tell(2, signal.SIGTERM):
        stage_main(finished, "ppo")
    run_id, *rest = newest()
    assert rest == ["KILLED", [1, 2]]
    stage_main(finished, "ppo")
    assert newest() == (run_id, "FINISHED", [1, 2, 3, 4])
