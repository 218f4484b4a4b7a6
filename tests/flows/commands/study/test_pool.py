"""`leash study --pool`: two workers in clones of their own, one git remote, one DVC remote, one Prefect and one MLflow
server; one worker is lost in the middle of a trial, which is noticed after 50 seconds in place of 95."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient

import flows
from flows import server
from tasks.records.recorded import read_results
from tests.conftest import call, clean_environment
from tests.faults.conftest import until
from tests.flows.commands.study.conftest import experiments, log

Start = Callable[..., "subprocess.Popen[str]"]
Work = Callable[[Path], "subprocess.Popen[str]"]
TRIALS = ("betas-coef=0.05-seed=1", "betas-coef=0.3-seed=1")


@pytest.fixture
def shared(home: Path, tmp_path: Path) -> Path:
    """The project with a git remote, which has its commit, and a DVC remote. Returns the bare git repository."""
    bare = tmp_path / "bare.git"
    call(tmp_path, "git", "init", "--quiet", "--bare", str(bare))
    call(home, sys.executable, "-m", "dvc", "remote", "add", "--default", "store", str(tmp_path / "store"))
    (tmp_path / "store").mkdir()
    call(home, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--all", "--message", "remote")
    call(home, "git", "remote", "add", "origin", str(bare))
    call(home, "git", "push", "--quiet", "origin", "HEAD:refs/heads/main")
    call(bare, "git", "symbolic-ref", "HEAD", "refs/heads/main")
    return bare


@pytest.fixture
def start(home: Path, tmp_path: Path, database: Path) -> Iterator[tuple[Start, Work]]:
    """Starts `leash` in a folder, or a worker in a clone, with both servers in its environment; all ends with the
    test."""
    shutil.copy2(database, tmp_path / "mlflow.db")
    port = server._free_port()
    environment = clean_environment() | {
        "PYTHONPATH": str(Path(flows.__file__).parents[1]),
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}",
        "PREFECT_API_URL": "",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }
    words = ["-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--port", str(port),
             "--artifacts-destination", str(tmp_path / "artifacts"), "--workers", "1"]  # fmt: skip
    with (tmp_path / "mlflow.log").open("w") as output:
        tracking = subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=output, stderr=output)
    begun = [tracking]

    def begin(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "flows.cli", *arguments]
        with (tmp_path / f"{folder.name}-{arguments[0]}.log").open("w") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, text=True, start_new_session=True
            )
        begun.append(process)
        return process

    def work(clone: Path) -> "subprocess.Popen[str]":
        """Prefect's own command; the clone does not hold the code, so it is named."""
        words = ["worker", "start", "--pool", "machines", "--type", "process"]
        variables = {"LEASH_HOME": str(clone), "PREFECT_HOME": str(tmp_path / f"{clone.name}-prefect")}
        with (tmp_path / f"{clone.name}-worker.log").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", *words], cwd=clone, env=environment | variables, stdout=output,
                stderr=output, text=True, start_new_session=True,
            )  # fmt: skip
        begun.append(process)
        return process

    del environment["PREFECT_API_URL"]
    prefect = server._free_port()
    assert begin(home, "up", "--port", str(prefect)).wait(timeout=150) == 0
    environment["PREFECT_API_URL"] = f"http://127.0.0.1:{prefect}/api"
    environment["PREFECT_API_AUTH_STRING"] = (home / server.PASSWORD).read_text()
    notice = (
        f"from pathlib import Path; from flows.automations import install; install(Path({str(home)!r}), seconds=50)"
    )
    assert subprocess.run([sys.executable, "-c", notice], env=environment, check=False).returncode == 0
    until(lambda: server.answers(environment["MLFLOW_TRACKING_URI"]))
    yield begin, work
    for process in begun:
        lose(process)
    assert begin(home, "up", "--stop").wait(timeout=60) == 0


def lose(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Kill a process and all that it has started, at once, as when a machine is lost."""
    with suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid)
        for one in (tree, *tree.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trial_of_a_lost_worker_is_run_by_another_and_gives_the_same_bytes(
    home: Path, shared: Path, start: tuple[Start, Work], tmp_path: Path
) -> None:
    begin, work = start
    workers = {}
    for name in ("one", "two"):
        call(tmp_path, "git", "clone", "--quiet", str(shared), name)
        workers[tmp_path / name] = work(tmp_path / name)
    until(lambda: all("worker" in (tmp_path / f"{name}-worker.log").read_text().lower() for name in ("one", "two")))
    study = begin(home, "study", "-S", "ppo.kl.coef=0.05,0.3", "-S", "seed=1", "--name", "betas", "--pool", "machines")
    until(lambda: any("evaluate 1 0.05" in log(clone) for clone in workers), seconds=240)
    (busy,) = [clone for clone in workers if "evaluate 1 0.05" in log(clone)]
    (other,) = [clone for clone in workers if clone != busy]
    until(lambda: set(experiments(shared)) == {TRIALS[1]}, seconds=240)
    lose(workers[busy])
    (other / "go").touch()
    assert study.wait(timeout=500) == 0
    printed = (tmp_path / f"{home.name}-study.log").read_text()
    assert f"{TRIALS[0]}  its worker was lost" in printed
    assert "evaluate 1 0.05" in log(other)
    found = experiments(home)
    assert set(found) == set(TRIALS)
    assert experiments(shared) == found
    assert "Failed to create" not in printed + (tmp_path / "two-worker.log").read_text()
    check_same_bytes(home, tmp_path, found[TRIALS[0]])
    check_tracked(f"{(tmp_path / 'mlflow.db')}")


def check_same_bytes(home: Path, tmp_path: Path, experiment: str) -> None:
    """One `dvc repro` without workers and remotes gives the same dvc.lock."""
    alone = tmp_path / "a/b/c/d/alone"  # work.py notes its runs four folders above
    alone.parent.mkdir(parents=True)
    call(tmp_path, "git", "clone", "--quiet", str(home), str(alone))
    (alone / "params.yaml").write_text(call(home, "git", "show", f"{experiment}:params.yaml"))
    (tmp_path / "a" / "go").touch()
    call(alone, sys.executable, "-m", "dvc", "repro")
    assert call(home, "git", "show", f"{experiment}:dvc.lock") == (alone / "dvc.lock").read_text()
    figures = read_results(home, experiment, "metrics/evaluate.json")["metrics/evaluate.json"]
    assert figures == (alone / "metrics/evaluate.json").read_bytes()


def check_tracked(database: str) -> None:
    """Both trials are finished runs on the MLflow server, children of the study's run."""
    client = MlflowClient(f"sqlite:///{database}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = {run.info.run_name: run for run in client.search_runs(experiments)}
    for name in TRIALS:
        assert runs[name].info.status == "FINISHED"
        assert runs[name].data.tags["mlflow.parentRunId"] == runs["betas"].info.run_id
