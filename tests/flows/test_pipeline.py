"""The flow, really run by Prefect (this is also the check of the fastapi and sqlalchemy pins)."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
from prefect.client.orchestration import get_client

from flows.pipeline import pipeline
from flows.stages import PipelineFailed
from rlhf_core.errors import UserError
from rlhf_core.ppo.health import Alert
from tests.faults.conftest import log_of, until

DIAMOND = {
    "first": ("work", []),
    "left": ("wait", ["first"]),
    "right": ("wait", ["first"]),
    "last": ("work", ["left", "right"]),
}


def states(root: Path, **options: Any) -> dict[str, str]:
    return {stage: outcome.state for stage, outcome in pipeline(root=str(root), **options).items()}


def moments(root: Path) -> dict[str, list[float]]:
    """Stage -> when it began and ended, attempt after attempt."""
    times: dict[str, list[float]] = {}
    for line in (root / "log.txt").read_text().splitlines():
        stage, _, moment, *_ = line.split()
        times.setdefault(stage, []).append(float(moment))
    return times


def test_two_drivers_one_graph(
    toy: Callable[..., Path], serial: Callable[[Path], None], prefect_api: str, tmp_path: Path
) -> None:
    root = toy(DIAMOND)
    twin = shutil.copytree(root, tmp_path / "twin")
    (twin / "go").touch()
    serial(twin)
    (root / "metrics").mkdir()
    figures = {"win_rate": 0.875, "win_rate_low": 0.8, "win_rate_high": 0.9}
    (root / "metrics" / "summary.json").write_text(json.dumps(figures))
    (root / "metrics" / "evaluate.json").write_text(json.dumps({**figures, "win_rate_judge": "gold rubric"}))
    both = Thread(target=go_when_two_have_begun, args=(root,))
    both.start()
    assert states(root, jobs=2) == dict.fromkeys(DIAMOND, "Completed")
    both.join()
    times = moments(root)
    assert max(times["left"][0], times["right"][0]) < min(times["left"][1], times["right"][1]), "not side by side"
    assert (root / "dvc.lock").read_bytes() == (twin / "dvc.lock").read_bytes()

    assert states(root) == dict.fromkeys(DIAMOND, "UpToDate")
    (root / "left.out").unlink()
    assert states(root, stages=["left"]) == {"first": "UpToDate", "left": "Restored"}
    assert len(moments(root)["left"]) == 2
    assert_prefect_knows()


def go_when_two_have_begun(root: Path) -> None:
    """Let the stages end that wait, at the latest after a minute."""
    with suppress(AssertionError):
        until(lambda: {"left begin", "right begin"} <= set(log_of(root)), seconds=60)
    (root / "go").touch()


def assert_prefect_knows() -> None:
    """The states have their names in Prefect, too, and the artifacts are there."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        artifacts = [(artifact.key, str(artifact.data)) for artifact in client.read_artifacts(limit=200)]
        flow_runs = client.read_flow_runs(limit=50)
    assert any(run.state is not None and run.state.is_completed() for run in flow_runs)
    tables = [json.loads(data) for key, data in artifacts if key == "leash-metrics"]
    assert any({"stage": "evaluate", "metric": "win_rate", "value": "0.875"} in rows for rows in tables)
    assert any(key == "leash-progress" and float(data) == 100 for key, data in artifacts)
    pages = [data for key, data in artifacts if key == "leash-report"]
    assert any("win rate of the policy against SFT | 0.875" in page for page in pages)


def test_an_alert_is_an_event(toy: Callable[..., Path], prefect_api: str) -> None:
    root = toy({"ppo": ("work", [])})
    alert = Alert("kl_spike", 3, "KL 9.1", "a smaller learning rate")
    (root / "say.txt").write_text(f"[ppo] step 3/5\n[ppo] ALERT {alert}\n")
    graph = "stages:\n  ppo:\n    cmd: cat say.txt | tee out\n    deps: [say.txt]\n    outs: [out]\n"
    (root / "dvc.yaml").write_text(graph)
    pipeline(root=str(root))
    wanted = {"filter": {"event": {"name": ["leash.alert.kl_spike"]}}}

    def found() -> list[dict[str, Any]]:
        with get_client(sync_client=True) as client:
            return list(client._client.post("/events/filter", json=wanted).json()["events"])

    until(found, seconds=30)
    (event,) = found()
    assert event["resource"]["prefect.resource.id"] == "leash.stage.ppo"
    assert event["payload"] == {"alert": str(alert)}


def test_a_users_error_is_tried_once_and_a_crash_again(toy: Callable[..., Path], prefect_api: str) -> None:
    root = toy(
        {
            "shaky": ("crash 1", []),
            "after_shaky": ("work", ["shaky"]),
            "wrong": ("refuse 'ppo.clip_ratio: must be > 0 (got -1)'", []),
            "after_wrong": ("work", ["wrong"]),
        }
    )
    with pytest.raises(PipelineFailed) as caught:
        states(root, retries=2, retry_delay_seconds=0.1)
    assert [str(error) for error in caught.value.errors] == ["wrong: ppo.clip_ratio: must be > 0 (got -1)"]
    assert caught.value.is_user_error
    assert {one.stage: one.state for one in caught.value.outcomes} == {
        "shaky": "Completed",
        "after_shaky": "Completed",
        "wrong": "Failed",
        "after_wrong": "NotRun",
    }
    times = moments(root)
    assert len(times["shaky"]) == 3, "began, began again, ended"
    assert len(times["wrong"]) == 2
    assert "after_wrong" not in times


def test_an_unknown_stage_starts_nothing(toy: Callable[..., Path], prefect_api: str) -> None:
    root = toy({"one": ("work", [])})
    with pytest.raises(UserError, match=r"unknown stage eno; dvc.yaml has: one"):
        states(root, stages=["eno"])
    assert not (root / "log.txt").exists()


def test_the_flow_can_be_pickled_as_serve_does() -> None:
    import flows.pipeline

    cloudpickle.register_pickle_by_value(flows.pipeline)
    try:
        assert cloudpickle.loads(cloudpickle.dumps(pipeline)).name == "leash"
    finally:
        cloudpickle.unregister_pickle_by_value(flows.pipeline)
