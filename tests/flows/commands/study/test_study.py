"""`leash study` on a project of two quick stages, and once on the tiny pipeline: kills, failures, search and tables."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import flows
from flows import workspace
from flows.cli import main
from flows.commands.study.study import Study
from flows.commands.study.trials import Call, Space, Trial, read_params
from rlhf_core.errors import UserError
from tasks.records.recorded import read_results
from tests.conftest import RECORDED, call, clean_environment
from tests.faults.conftest import until
from tests.flows.commands.study.conftest import experiments, log

if TYPE_CHECKING:
    from tests.conftest import Ended, Project


@pytest.fixture
def study(home: Path, prefect_api: str) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts `leash study` there."""

    def start(*words: str) -> "subprocess.Popen[str]":
        code = str(Path(flows.__file__).parents[1])
        env = clean_environment() | RECORDED | {"PREFECT_API_URL": prefect_api, "PYTHONPATH": code}
        command = [sys.executable, "-m", "flows.cli", "study", *words]
        return subprocess.Popen(command, cwd=home, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)  # fmt: skip

    return start


def interrupt(process: "subprocess.Popen[str]") -> None:
    """Ctrl-C."""
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_stopped_and_a_killed_study_continue(home: Path, study: Callable[..., "subprocess.Popen[str]"]) -> None:
    """No finished trial runs again, the one that was stopped does, and equal stages are made once."""
    words = ("-S", "ppo.kl.coef=0.3,0.05", "-S", "seed=1,2", "--name", "betas", "--objective", "gold_policy")
    for times, (strike, code) in enumerate([(interrupt, 130), (subprocess.Popen.kill, -9)], start=1):
        process = study(*words)
        until(lambda times=times: log(home).count("evaluate 1 0.05") == times, seconds=400)
        strike(process)
        process.communicate(timeout=120)
        assert process.returncode == code
    before = experiments(home)
    assert set(before) == {"betas-coef=0.3-seed=1", "betas-coef=0.3-seed=2"}
    (home / "go").touch()
    (home / "params.yaml").write_text("an edit\n")
    output, errors = study(*words).communicate(timeout=400)
    assert errors == ""
    assert "study betas continues at commit" in output
    kept = "work/studies/betas/logs/betas-coef=0.05-seed=1.log"
    assert f"starts; progress: {kept}" in output
    assert (home / kept).exists()
    after = experiments(home)
    assert {name: after[name] for name in before} == before
    assert len(after) == 4
    lines = log(home)
    assert [line for line in lines if line.startswith("shared")] == ["shared 1 0.3", "shared 2 0.3"]
    assert lines.count("evaluate 1 0.3") == lines.count("evaluate 2 0.05") == 1
    assert lines.count("evaluate 1 0.05") == 3
    assert list((home / "work/runs").glob("*")) == []
    assert (home / "params.yaml").read_text() == "an edit\n"
    table = (home / "work/studies/betas/table.md").read_text(encoding="utf-8")
    assert "Highest gold_policy: coef 0.3" in table
    assert table in output


@pytest.mark.slow
def test_a_failed_trial_does_not_stop_the_others(home: Path, study: Callable[..., "subprocess.Popen[str]"]) -> None:
    words = ("-S", "ppo.vf_coef=0.6,0.5", "--name", "weights", "--jobs", "2", "--retries", "0")
    process = study(*words)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 1, output
    assert set(experiments(home)) == {"weights-vf_coef=0.5"}
    kept = home / "work/runs/weights-vf_coef=0.6/tree"
    assert kept.exists()
    assert re.search(
        rf"weights-vf_coef=0.6 FAILED: evaluate: .*this trial fails.*kept in {re.escape(str(kept))}", output
    )
    table = (home / "work/studies/weights/table.md").read_text(encoding="utf-8")
    assert re.search("vf_coef=0.6 FAILED: .*this trial fails", table)


def test_an_experiment_of_other_parameters_is_no_result(home: Path, tmp_path: Path) -> None:
    """Another clone, or an earlier study of the same name, has made it."""
    other, same = Trial("betas-seed=1", (), ("ppo.vf_coef=0.7", "seed=1")), Trial("betas-seed=1", (), ("seed=1",))
    head = workspace.resolve(home, "HEAD")
    call(home, "git", "update-ref", f"refs/exps/{head[:2]}/{head[2:]}/{other.name}", head)
    read_params(home, head, [other, same])
    made = Study(home, "betas", head, Call(()), Space((), (), (1,)))
    made.run_trial(other)
    assert (other.state, other.metrics) == ("failed", {})
    assert "with other parameters; choose another --name, or `dvc exp remove betas-seed=1`" in other.message
    made.run_trial(same)
    assert same.state == "finished"


def test_trials_try_a_busy_server_again(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this process, as every `leash run`, gives a lost server up soon."""
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "1")
    code = "import os, sys; print(os.environ['PREFECT_CLIENT_MAX_RETRIES']); sys.exit(1)"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec python3 -c "{code}"\n')
    (tmp_path / "python").chmod(0o755)
    trial, head = Trial("as-committed", (), ()), workspace.resolve(home, "HEAD")
    read_params(home, head, [trial])
    made = Study(home, "betas", head, Call(()), Space((), (), ()))
    made.run_trial(trial)
    assert trial.state == "failed"
    assert (made.folder / "logs" / "as-committed.log").read_text() == "5\n"


def test_what_a_trial_prints_is_in_its_log_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial takes minutes to hours, and its log is the only place that shows its progress."""
    head, seen = workspace.resolve(home, "HEAD"), []

    def run(space: Any, receive: Callable[[str], None], *_: Any) -> Any:
        receive("[7/11 ppo] step 1/30")
        seen.append((home / "work/studies/betas/logs/one.log").read_text())
        raise UserError("stopped")

    monkeypatch.setattr("flows.isolated.run", run)
    trial = Trial("one", (), ())
    read_params(home, head, [trial])
    Study(home, "betas", head, Call(()), Space((), (), ())).run_trial(trial)
    assert (trial.state, seen) == ("failed", ["[7/11 ppo] step 1/30\n"])


def test_where_the_server_is_lost_no_other_trial_fails(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial waits, the study ends with one line, and what the trial printed stays in its log."""

    def run(space: Any, receive: Callable[[str], None], *_: Any) -> Any:
        receive("[7/11 ppo] step 1/30")
        raise UserError("exit 1")

    monkeypatch.setattr("flows.isolated.run", run)
    monkeypatch.setattr("flows.server.BUSY_SECONDS", 0.0)
    monkeypatch.setenv("PREFECT_API_URL", "http://user:secret@127.0.0.1:1/api")
    trials, head = [Trial(name, (), ()) for name in ("one", "two")], workspace.resolve(home, "HEAD")
    read_params(home, head, trials)
    made = Study(home, "betas", head, Call(()), Space((), (), ()), trials=trials)
    for _ in range(2):
        with pytest.raises(UserError, match=r"server at http://127\.0\.0\.1:1/api does not answer; .*\(exit 1"):
            made.run()
    assert [trial.state for trial in trials] == ["waiting"] * 2
    assert (home / "work/studies/betas/logs/one.log").read_text() == "[7/11 ppo] step 1/30\n" * 2


@pytest.mark.slow
def test_a_search_finds_the_best_and_continues(home: Path, study: Callable[..., "subprocess.Popen[str]"]) -> None:
    words = ["-S", "ppo.kl.coef=interval(0.1,0.5)", "-S", "seed=1", "--name", "found", "--constraint",
             "kl_per_sequence < 2", "--objective", "gold_policy", "--search", "3"]  # fmt: skip
    process = study(*words)
    until(lambda: len(experiments(home)) >= 2, seconds=200)
    process.kill()
    process.communicate(timeout=60)
    before = experiments(home)
    process = study(*words)
    output, errors = process.communicate(timeout=250)
    assert (process.returncode, errors) == (0, ""), output
    after = experiments(home)
    assert {name: after[name] for name in before} == before
    assert len(after) == 3
    files = [read_results(home, each, "metrics/evaluate.json") for each in after.values()]
    figures = [json.loads(each["metrics/evaluate.json"]) for each in files]
    allowed = [each["gold_policy"] for each in figures if each["kl_per_sequence"] < 2]
    assert re.search(rf"Highest gold_policy where kl_per_sequence < 2: coef [\d.]+, −{-max(allowed):.3f}", output)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-S", "ppo.kl.coef=-1"], "ppo.kl.coef: "),
        (["-S", "ppo.kl.coef"], "-S ppo.kl.coef: "),
        (["--objective", "gold_policy +"], "invalid syntax"),
        (["--commit", "absent"], "git knows no commit 'absent'"),
        (["--search", "3"], "--search needs a parameter to vary"),
        (["--name", "///"], "cannot be a name"),
    ],
)
def test_a_wrong_call_is_one_line_and_changes_nothing(
    home: Path, in_process: Callable[..., "Ended"], monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["leash", "study", *words])
    ended = in_process(home, main)
    assert ended.code == 2
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (home / "work/studies").exists()


def test_a_study_does_not_run_the_committed_parameters_in_place_of_edited_ones(
    home: Path, in_process: Callable[..., "Ended"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["leash", "study", "-S", "seed=1,2"])
    with (home / "params.yaml").open("a", encoding="utf-8") as params:
        params.write("# another setting\n")
    ended = in_process(home, main)
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert "params.yaml has edits that are not committed" in ended.stderr
    assert not (home / "work/studies").exists()


def test_another_study_of_this_name_is_refused(
    home: Path, in_process: Callable[..., "Ended"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["leash", "study", "-S", "seed=1,2", "--name", "betas"])
    folder = home / "work/studies/betas"
    folder.mkdir(parents=True)
    record = {"commit": workspace.resolve(home, "HEAD"), "call": {}, "command": "leash study -S a=1 --name betas"}
    (folder / "study.json").write_text(json.dumps(record))
    assert in_process(home, main).stderr == (
        "error: study betas was begun as `leash study -S a=1 --name betas`; call it so, or choose another --name\n"
    )


@pytest.mark.slow
def test_the_tiny_pipeline(finished: "Project", prefect_api: str) -> None:
    """Two β. SFT comes from DVC's cache; the results are in DVC, MLflow and the tables."""
    finished.evaluate_little()
    call(
        finished.root, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--all", "-m", "little"
    )
    words = ("-S", "ppo.kl.coef=0.05,0.2", "--methods", "ppo", "--name", "betas", "--objective", "gold_policy")
    command = [sys.executable, "-m", "flows.cli", "study", *words, "--jobs", "2"]
    before = finished.run("git", "status", "--porcelain").stdout
    done = finished.run(*command, PREFECT_API_URL=prefect_api)
    assert done.returncode == 0, done.stdout + done.stderr
    found = experiments(finished.root)
    assert set(found) == {f"betas-coef={beta}" for beta in (0.05, 0.2)}
    logs = [path.read_text() for path in (finished.root / "work/studies/betas/logs").glob("*.log")]
    assert ["sft] restored" in text for text in logs] == [True, True]
    assert not any("sft] ran in" in text for text in logs)
    assert (finished.root / "work/studies/betas/frontier.png").stat().st_size > 10_000
    assert {"betas"} | set(found) <= mlflow_names(finished.root)
    assert finished.run("git", "status", "--porcelain").stdout == before


def mlflow_names(root: Path) -> set[str]:
    """The study's run and its children."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    (study,) = [run for run in runs if "leash.study_run" in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == study.info.run_id]
    assert {run.info.status for run in (study, *children)} == {"FINISHED"}
    return {run.info.run_name for run in (study, *children)}
