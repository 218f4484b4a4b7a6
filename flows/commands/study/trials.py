"""What a study tries: every combination of the values that its overrides name, or the settings that Optuna chooses."""

import itertools
import json
import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from flows import workspace
from flows.isolated import as_name
from rlhf_core.errors import UserError, did_you_mean
from rlhf_core.files import atomic
from tasks.params.loader import PARAMS_FILE, parse, parse_yaml, with_absent
from tasks.params.methods import BY_NAME
from tasks.stage.dvc_adapter import Override, overridden, parse_override

SEED, CASE = "seed", "case"
"""`CASE` is how tables and names of trials call the cases of a study file."""
MOST_TRIALS = 1000
DIGITS = 4
"""Significant digits of a number that Optuna suggests: equal to the name of its trial."""
WAITING, RUNNING, FINISHED, FAILED = "waiting", "running", "finished", "failed"


@dataclass(frozen=True)
class Call:
    """What a study was called with; an equal call continues it."""

    overrides: tuple[str, ...]
    methods: tuple[str, ...] = ()
    search: int | None = None
    """How many settings Optuna chooses; None: every combination is run."""
    objective: str | None = None
    constraint: str | None = None
    """Both are expressions over the metrics."""
    maximise: bool = True
    cases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name → overrides: settings of several parameters each, crossed with `overrides`."""
    params: Mapping[str, Any] | None = None
    """The content of a parameter file, laid over params.yaml."""

    @property
    def aim(self) -> str | None:
        """What is best: the objective; without one the gold score for a search, and nothing else."""
        return self.objective or ("gold_policy" if self.search else None)


@dataclass
class Trial:
    """One run of the pipeline: what it changes, how it ended, and what it measured."""

    name: str
    """Also of its DVC experiment and its MLflow run."""
    setting: tuple[tuple[str, str], ...]
    """The varied parameters and their values in Hydra's words, without the seed."""
    overrides: tuple[str, ...]
    """All of them, as `dvc exp run -S` takes them."""
    params: dict[str, Any] = field(default_factory=dict)
    """All of its parameters, see `read_params`."""
    state: str = WAITING
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The content of metrics/*.json by the file's name; of a finished trial only, as `frontier`."""
    frontier: list[dict[str, Any]] = field(default_factory=list)
    """The rows of plots/frontier.csv that have a KL."""
    objective: float | None = None
    violation: float | None = None
    """By how much the constraint is violated; 0 or less where it holds."""
    unmeasured: str = ""
    """Why it is finished and objective or constraint have no value."""
    seconds: float | None = None
    message: str = ""
    """Why it failed, and where its workspace is."""
    lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)
    """Held while it runs: a search can choose one setting twice."""


@dataclass(frozen=True)
class Space:
    """What a study varies."""

    varied: tuple[Override, ...]
    """Overrides with several values, or an interval."""
    fixed: tuple[str, ...]
    """Overrides that all trials have."""
    seeds: tuple[int, ...]
    """Training seeds; empty: the one of params.yaml."""
    cases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The overrides behind each value of `CASE`, if that is varied."""

    def names(self) -> list[str]:
        """The varied parameters, each by as many parts of its name as tell it from the others."""
        return short_names([one.name for one in self.varied])

    def trials(self, study: str, values: Sequence[str]) -> list[Trial]:
        """The trials of one setting, one for each seed: `values` are those of the varied parameters, in their order."""
        setting = tuple((one.name, value) for one, value in zip(self.varied, values, strict=True))
        parts = [f"{short}={value}" for short, value in zip(self.names(), values, strict=True)]
        chosen: list[str] = []
        for varied, value in setting:
            chosen += self.cases[value] if varied == CASE else [f"{varied}={value}"]
        found = []
        for seed in [f"{SEED}={seed}" for seed in self.seeds] or [""]:
            name = as_name("-".join(filter(None, [study, *parts, seed])))
            words = (*self.fixed, *chosen, *filter(None, [seed]))
            found.append(Trial(name, setting, words))
        return found


def read_space(
    overrides: Sequence[str], methods: Sequence[str], cases: Mapping[str, tuple[str, ...]] | None = None
) -> Space:
    """The space of these overrides and cases; `methods` (if any) are the alternatives to PPO that are switched on, all
    others are switched off. Raises UserError for an override that cannot be read, or a parameter or method named
    twice."""
    if unknown := [name for name in methods if name not in BY_NAME and name != "ppo"]:
        hint = did_you_mean(unknown[0], BY_NAME)
        raise UserError(f"--methods {unknown[0]}{hint}; there are: ppo, {', '.join(BY_NAME)}")
    fixed = [f"++{name}.enabled={str(name in methods).lower()}" for name in BY_NAME] if methods else []
    varied = [Override(CASE, tuple(cases))] if cases else []
    seeds: tuple[int, ...] = ()
    known: set[str] = set()
    for text in overrides:
        one = parse_override(text)
        if one.name in known:
            raise UserError(f"-S {text}: {one.name} is given twice; write NAME=A,B for several values")
        known.add(one.name)
        if one.name == CASE:
            raise UserError(
                f"-S {text}: cases are written into a study file, as `cases:` (docs/how-to/compare-runs.md)"
            )
        if one.name == SEED:
            if not one.values or not all(value.isdecimal() for value in one.values):
                raise UserError(f"-S {text}: seeds are whole numbers from 0; write {SEED}=1,2,3 or {SEED}=range(1,4)")
            seeds = tuple(dict.fromkeys(map(int, one.values)))
        elif len(one.values) == 1:
            fixed.append(text)
        elif text.startswith("+"):
            raise UserError(f"-S {text}: a parameter that params.yaml does not have can take one value only")
        else:
            varied.append(one)
    return Space(tuple(varied), tuple(fixed), seeds, cases or {})


def grid(study: str, space: Space) -> list[Trial]:
    """Every combination, each with every seed. Raises UserError for an interval, for more than 1000 trials, and for two
    of one name."""
    if unbounded := [one.name for one in space.varied if one.interval]:
        raise UserError(f"-S {unbounded[0]}=interval(…): an interval needs --search N, the number of its points to try")
    count = max(1, len(space.seeds)) * math.prod(len(one.values) for one in space.varied)
    if count > MOST_TRIALS:
        raise UserError(f"{count} trials are more than {MOST_TRIALS}; name fewer values, or use --search N")
    settings = itertools.product(*(one.values for one in space.varied))
    found = [trial for values in settings for trial in space.trials(study, values)]
    names = [trial.name for trial in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two trials would be named {twice[0]}; name their values so that they differ")
    return found


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of dotted names, as many as make each of them unique: [ppo.kl.coef, dpo.beta] → [coef, beta]."""
    shortened = []
    for name in names:
        parts = name.split(".")
        tails = [".".join(parts[place:]) for place in reversed(range(len(parts)))]
        unique = (tail for tail in tails if sum(f".{other}".endswith(f".{tail}") for other in names) == 1)
        shortened.append(next(unique, name))
    return shortened


def read_params(home: Path, commit: str, trials: Iterable[Trial]) -> None:
    """Set the parameters of each trial. Raises UserError, before anything runs, for a value that params.yaml of the
    commit refuses."""
    from tasks.params.all import Params

    content = parse_yaml(workspace.git(home, "show", f"{commit}:{PARAMS_FILE}"), PARAMS_FILE)
    for trial in trials:
        trial.params = with_absent(overridden(content, trial.overrides))
        parse(Params, trial.params, file=Path(trial.name, PARAMS_FILE))


def default_name(space: Space, commit: str) -> str:
    """A name from the varied parameters and the commit, such as `coef-seed-e70966d`."""
    varied = [*space.names(), *([SEED] if space.seeds else [])] or ["run"]
    return as_name("-".join([*(re.sub(r"\W", "_", name) for name in varied), commit[:7]]))


class Search:
    """Suggests settings with Optuna's tree-structured Parzen estimator (Bergstra et al. 2011). A file holds what was
    suggested: a later process begins with the same settings, whose trials are there or run again."""

    def __init__(self, path: Path, space: Space, budget: int, maximise: bool) -> None:
        """`path` is the file, `budget` the number of settings to try in all, those of earlier processes included."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._path = path
        self._suggested: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else []
        known = len(self._suggested)  # the seed: else a later process draws the same numbers again
        sampler = optuna.samplers.TPESampler(seed=known, multivariate=True, n_startup_trials=min(10, budget))
        self.study = optuna.create_study(direction="maximize" if maximise else "minimize", sampler=sampler)
        self._distributions = {one.name: _distribution(one) for one in space.varied}
        for params in self._suggested:
            self.study.enqueue_trial(params)

    def next(self) -> tuple[optuna.Trial, tuple[str, ...]]:
        """The next setting: Optuna's trial, and the values of the varied parameters as words."""
        trial = self.study.ask(self._distributions)
        if trial.number >= len(self._suggested):
            self._suggested.append(trial.params)
            with atomic(self._path) as place:
                place.write_text(json.dumps(self._suggested) + "\n", encoding="utf-8")
        found = [trial.params[name] for name in self._distributions]
        return trial, tuple(f"{one:.{DIGITS}g}" if isinstance(one, float) else str(one) for one in found)


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
