"""Where to try next: Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) over the varied parameters, with
its history in an SQLite file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial, TrialState

from flows.commands.study.grid import Space
from rlhf_core.errors import UserError
from tasks.stage.dvc_adapter import Override

DIGITS = 4
"""Significant digits of a suggested number: equal to the name of its trial."""
ENDED = (TrialState.COMPLETE, TrialState.FAIL)


@dataclass
class Suggestion:
    """One setting to try: a value for each varied parameter, in their order."""

    values: tuple[str, ...]
    trial: Trial


class Search:
    """Suggests settings, and learns from how they did. Settings that a killed study was trying are suggested again."""

    def __init__(self, folder: Path, space: Space, budget: int, maximise: bool) -> None:
        """`budget` is the number of settings to try in all, those of earlier processes included."""
        self._space = space
        self._budget = budget
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(
            storage=f"sqlite:///{folder / 'optuna.db'}",
            study_name=folder.name,
            load_if_exists=True,
            direction="maximize" if maximise else "minimize",
        )
        known = len(self._study.get_trials(deepcopy=False))  # else a later process draws the same numbers again
        self._study.sampler = optuna.samplers.TPESampler(
            seed=known, multivariate=True, n_startup_trials=min(10, budget)
        )
        self._resume()

    def _resume(self) -> None:
        """End what a killed process was trying, and enqueue it again where its setting is known."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)
            if self._is_whole(trial.params):
                self._study.enqueue_trial(trial.params, skip_if_exists=False)

    def tried(self) -> list[tuple[str, ...]]:
        """The settings of earlier processes that have ended, each once."""
        waiting = {
            self._values(each.system_attrs["fixed_params"])
            for each in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        }
        ended = [each.params for each in self._study.get_trials(deepcopy=False, states=ENDED)]
        settings = dict.fromkeys(self._values(params) for params in ended if self._is_whole(params))
        return [one for one in settings if one not in waiting]

    def next(self, began: int) -> Suggestion | None:
        """The next setting; None when `began` settings are the whole budget."""
        if began >= self._budget:
            return None
        distributions = {one.name: _distribution(one) for one in self._space.varied}
        trial = self._study.ask(distributions)
        return Suggestion(self._values(trial.params), trial)

    def tell(self, suggestion: Suggestion, objective: float | None, violation: float | None = None) -> None:
        """How a setting did: its objective (None: it failed), and by how much it violates the constraint (≤ 0: not)."""
        if objective is None:
            self._study.tell(suggestion.trial, state=TrialState.FAIL)
            return
        if violation is not None:
            suggestion.trial.set_constraint("constraint", violation)
        self._study.tell(suggestion.trial, objective)

    def _is_whole(self, params: Mapping[str, Any]) -> bool:
        """Not so where the process was killed between the values of a setting."""
        return all(one.name in params for one in self._space.varied)

    def _values(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(_word(params[one.name]) for one in self._space.varied)


def _word(value: Any) -> str:
    """A number of at most four significant digits, or the word of a choice."""
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def _distribution(one: Override) -> BaseDistribution:
    if one.interval is None:
        return CategoricalDistribution(one.values)
    low, high = one.interval
    try:
        if one.whole:
            return IntDistribution(int(low), int(high), log=one.logarithmic)
        return FloatDistribution(low, high, log=one.logarithmic)
    except ValueError as error:
        raise UserError(f"-S {one.name}: {error}") from None
