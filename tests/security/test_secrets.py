"""Secrets are in the environment and nowhere else: every file of the project and all output is searched."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tasks.params.secrets import is_secret
from tasks.tracking.record import flatten
from tasks.tracking.settings import HOLD_VARIABLE, without_credentials

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

Main = Callable[["Project", str], "Ended"]
SECRETS = {
    "MLFLOW_TRACKING_URI": "http://somebody:s3cret-mlflow@127.0.0.1:9/path",
    "MLFLOW_TRACKING_TOKEN": "s3cret-mlflow-token",
    "HF_TOKEN": "s3cret-hf",
    "PREFECT_API_KEY": "s3cret-prefect",
    "AWS_SECRET_ACCESS_KEY": "s3cret-aws",
    "OPENAI_API_KEY": "s3cret-openai",
}
"""Nothing listens at port 9."""


def leaks(root: Path) -> list[str]:
    """The files below `root`, names included, that contain a secret, without these tests."""
    found = [path for path in root.rglob("*") if path.is_file() and root / "tests" not in path.parents]
    return [str(path) for path in found if "s3cret" in path.name or b"s3cret" in path.read_bytes()]


def printed(done: "subprocess.CompletedProcess[str]") -> str:
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_stage_with_a_dead_server_keeps_the_secrets_of_its_environment(project: "Project") -> None:
    project.dvc("repro", "check_data")
    done = project.stage("ingest", **SECRETS, **{HOLD_VARIABLE: ""})
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in printed(done)
    assert list((project.root / "work" / "tracking").iterdir())
    assert leaks(project.root) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [["doctor"], ["ui"], ["run"], ["serve"]])
def test_commands_show_addresses_without_their_secrets(project: "Project", command: list[str]) -> None:
    servers = {"PREFECT_API_URL": "http://somebody:s3cret-prefect@127.0.0.1:9/api"}
    done = project.run(sys.executable, "-m", "flows.cli", *command, **SECRETS, **servers)
    assert "s3cret" not in printed(done)
    assert "127.0.0.1:9" in printed(done)
    assert "Traceback" not in done.stderr
    assert leaks(project.root) == []


@pytest.mark.parametrize("block", ["", "ppo", "preferences", "base"])
def test_a_secret_in_params_yaml_is_refused_without_its_value(project: "Project", stage_main: Main, block: str) -> None:
    project.set(f"{block}.api_key".strip("."), "s3cret-parameter")
    ended = stage_main(project, "check")
    assert ended.code == 2
    assert f"{block}.api_key".strip(".") + ": unknown parameter" in ended.stderr
    assert "s3cret" not in ended.stderr
    params = project.root / "params.yaml"
    assert leaks(project.root) == [str(params)]


@pytest.mark.parametrize(
    "line", ["api_key: [s3cret", "api_key: s3cret\napi_key: s3cret", "api_key: !s3cret-x s3cret-y"]
)
def test_a_line_that_is_no_yaml_is_not_repeated(project: "Project", stage_main: Main, line: str) -> None:
    params = project.root / "params.yaml"
    params.write_text(params.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    ended = stage_main(project, "check")
    assert ended.code == 2
    assert "no valid YAML" in ended.stderr
    assert "s3cret-y" not in ended.stderr
    assert 's3cret"' not in ended.stderr


NAMES = (
    "api_key judge.api_key hf_token token a.token AWS_SECRET_ACCESS_KEY db.password x.secret auth_token openai-api-key"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert list(flatten({name: "s3cret"}).values()) == ["(hidden)"]


def test_no_parameter_of_ours_is_taken_for_a_secret(project: "Project") -> None:
    assert not [name for name in flatten(project.params()) if is_secret(name)]
    assert not is_secret("preferences.stop_tokens")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://a:s3cret@host/x failed", "at http://host/x failed"),
        ("https://s3cret@host", "https://host"),
        ("postgresql://a:s3@cret@host:5/db", "postgresql://host:5/db"),
        ("http://host/x?token=s3cret&b=1 failed", "http://host/x failed"),
        ("sqlite:////home/me/mlflow.db", "sqlite:////home/me/mlflow.db"),
        ("http://host:5000/a@b", "http://host:5000/a@b"),
    ],
)
def test_addresses_lose_their_credentials(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
