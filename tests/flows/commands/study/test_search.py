"""A search that was killed continues: what it was trying comes first, and counts once."""

from pathlib import Path

import optuna
import pytest

from flows.commands.study import grid
from flows.commands.study.search import Search

SPACE = grid.read_space(["ppo.kl.coef=interval(0.1,0.5)", "ppo.vf_coef=interval(0.1,0.5)"], [])


def settings(folder: Path, budget: int) -> list[tuple[str, ...]]:
    """Those of earlier processes, then those that this one tries, all told a score."""
    search = Search(folder, SPACE, budget, maximise=True)
    found = search.tried()
    while (suggestion := search.next(len(found))) is not None:
        found.append(suggestion.values)
        search.tell(suggestion, 1.0)
    return found


def test_a_setting_that_was_being_tried_is_the_next(tmp_path: Path) -> None:
    """Also where the process that tries it again is killed."""
    first = settings(tmp_path, 1)
    killed = Search(tmp_path, SPACE, 4, maximise=True).next(1)
    search = Search(tmp_path, SPACE, 4, maximise=True)
    assert search.tried() == first
    again = search.next(1)
    assert killed is not None
    assert again is not None
    assert again.values == killed.values
    found = settings(tmp_path, 4)
    assert found[:2] == [*first, killed.values]
    assert len(set(found)) == 4


@pytest.mark.parametrize("known", [{}, {"ppo.kl.coef": 0.2}])
def test_a_setting_without_all_its_values_is_passed_over(tmp_path: Path, known: dict[str, float]) -> None:
    """The process was killed while Optuna wrote them."""
    first = settings(tmp_path, 1)
    study = optuna.load_study(study_name=tmp_path.name, storage=f"sqlite:///{tmp_path / 'optuna.db'}")
    trial = study.ask()
    for name, value in known.items():
        trial.suggest_float(name, value, value)
    found = settings(tmp_path, 3)
    assert found[:1] == first
    assert len(set(found)) == 3
