"""Equal inputs, equal bytes: with torn and bit-flipped checkpoints, other checkpoint intervals and numbers of loader
workers, and never with the state of other inputs. (Two clones, hash seed, time zone and locale: test_pipeline.py.)"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tasks.stage.progress import Progress

if TYPE_CHECKING:
    from tests.conftest import Ended, Project, TinyRun

    Main = Callable[[Project, str], Ended]

LOOPS = {"base": 4, "sft": 12, "preferences": 4, "reward": 4, "ppo": 4, "evaluate": 2, "dpo": 3}
"""A stage and a progress line near its end."""


class CutOff(BaseException):
    """Ends the process at once."""


@pytest.fixture
def cut_off(finished: "Project", stage_main: "Main", monkeypatch: pytest.MonkeyPatch) -> "Callable[[str], Project]":
    """A project whose stage was ended near its end, with a checkpoint a step."""

    def run(stage: str) -> "Project":
        finished.set("runtime.tracking", False)
        finished.set("runtime.checkpoint_every", 1)
        update, told = Progress.update, [0]

        def updated(progress: Progress, step: int, left: float | None = None, **values: float | None) -> None:
            update(progress, step, left, **values)
            told[0] += progress.unit != "reference answer"
            if told[0] == LOOPS[stage]:
                raise CutOff

        with monkeypatch.context() as patch:
            patch.setattr(Progress, "update", updated)
            with pytest.raises(CutOff):
                stage_main(finished, stage)
        return finished

    return run


def state_files(project: "Project", stage: str) -> list[Path]:
    """What the newest checkpoint, or the journal that grew last, holds."""
    state = project.root / "work" / stage
    checkpoints = sorted(state.rglob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if checkpoints:
        return sorted(path for path in checkpoints[-1].rglob("*") if path.is_file())
    return sorted(state.rglob("*.journal"))[-1:]


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def tear(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


@pytest.mark.slow
@pytest.mark.chosen("flip-preferences", "flip-ppo", "flip-dpo", "tear-base", "tear-reward", "tear-evaluate")
@pytest.mark.parametrize("stage", LOOPS)
@pytest.mark.parametrize("damage", [flip, tear])
def test_failure_01_damaged_state_is_reported_and_not_used(
    tiny_run: "TinyRun",
    cut_off: "Callable[[str], Project]",
    stage_main: "Main",
    damage: Callable[[Path, random.Random], None],
    stage: str,
) -> None:
    project = cut_off(stage)
    draw = random.Random(f"{stage} {damage.__name__}")
    file = draw.choice(state_files(project, stage))
    damage(file, draw)
    again = stage_main(project, stage)
    assert again.code == 0
    name = file.name if file.suffix == ".journal" else file.relative_to(project.root).parts[-2]
    assert [line for line in again.stdout.splitlines() if name in line], f"{file} was damaged and was not reported"
    assert project.outputs() == tiny_run.project.outputs()


@pytest.mark.slow
@pytest.mark.chosen("sft")
@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_the_checkpoint_interval_changes_nothing(tiny_run: "TinyRun", finished: "Project", stage: str) -> None:
    finished.set("runtime.tracking", False)
    finished.set("runtime.checkpoint_every", 3)
    shutil.rmtree(finished.root / "models" / stage)
    done = finished.stage(stage)
    assert done.returncode == 0, done.stderr
    assert finished.outputs() == tiny_run.project.outputs()


def test_the_state_of_other_inputs_is_never_used(
    tiny_run: "TinyRun", cut_off: "Callable[[str], Project]", stage_main: "Main"
) -> None:
    """Cut off with one learning rate, run with another, then with the first again: that one continues, and ends in the
    bytes of an uninterrupted run."""
    project = cut_off("ppo")
    first = project.params()["ppo"]["learning_rate"]
    project.set("ppo.learning_rate", 3e-4)
    other = stage_main(project, "ppo")
    assert (other.code, "continues" in other.stdout) == (0, False)
    assert project.outputs()["plots/ppo.csv"] != tiny_run.project.outputs()["plots/ppo.csv"]
    project.set("ppo.learning_rate", first)
    again = stage_main(project, "ppo")
    assert (again.code, "continues after step" in again.stdout) == (0, True)
    assert project.outputs() == tiny_run.project.outputs()
