"""The name of a project on shared servers."""

import subprocess
from pathlib import Path

import pytest

from tasks.naming import project_name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "My project!"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder


def test_the_folder_without_a_remote(root: Path) -> None:
    assert project_name(root) == "My-project"


@pytest.mark.parametrize(
    "address", ["https://user:key@example.org/team/judge-rm.git", "git@example.org:team/judge-rm.git", "/srv/judge-rm/"]
)
def test_the_last_part_of_the_origin(root: Path, address: str) -> None:
    subprocess.run(["git", "remote", "add", "origin", address], cwd=root, check=True)
    assert project_name(root) == "judge-rm"


def test_the_parameter_wins(root: Path) -> None:
    subprocess.run(["git", "remote", "add", "origin", "/srv/judge-rm"], cwd=root, check=True)
    (root / "params.yaml").write_text("runtime: {project: night}\n")
    assert project_name(root) == "night"
    (root / "params.yaml").write_text("runtime: {project: null}\n")
    assert project_name(root) == "judge-rm"
