"""`leash run --params FILE`: params.yaml is replaced by a valid file only, and no edit of the user's is lost."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flows.params_file import replace_params
from rlhf_core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git repository with examples/ and a committed params.yaml."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copyfile(ROOT / "params.yaml", tmp_path / "params.yaml")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


def test_a_file_takes_the_place_of_what_git_has(project: Path) -> None:
    for name in ("quick", "tiny"):  # the second replaces the first
        replace_params(project, project / f"examples/{name}.yaml")
        assert (project / "params.yaml").read_bytes() == (project / f"examples/{name}.yaml").read_bytes()


def test_a_file_of_ones_own_is_taken_a_second_time_as_a_stopped_run_needs(project: Path) -> None:
    own = project / "own.yaml"
    own.write_text((project / "params.yaml").read_text().replace("seed: 1", "seed: 2"))
    for _ in range(2):
        replace_params(project, own)
        assert (project / "params.yaml").read_bytes() == own.read_bytes()


def test_an_edit_that_git_does_not_have_is_kept(project: Path) -> None:
    edited = (project / "params.yaml").read_text() + "# mine\n"
    (project / "params.yaml").write_text(edited)
    with pytest.raises(UserError, match=r"params.yaml: has changes that are not in git, and --params writes this file"):
        replace_params(project, project / "examples/quick.yaml")
    assert (project / "params.yaml").read_text() == edited


def test_a_file_that_is_not_valid_is_named_and_nothing_is_written(project: Path) -> None:
    wrong = project / "wrong.yaml"
    wrong.write_text((project / "params.yaml").read_text().replace("seed: 1", "seed: -1"))
    with pytest.raises(UserError, match=r"wrong.yaml: seed: "):
        replace_params(project, wrong)
    with pytest.raises(UserError, match="file not found"):
        replace_params(project, project / "missing.yaml")
    assert (project / "params.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()
