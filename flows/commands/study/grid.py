"""The trials of a study: every combination of the values that its overrides name."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flows import workspace
from flows.isolated import as_name
from rlhf_core.errors import UserError, did_you_mean
from tasks.params.loader import PARAMS_FILE, parse, read_yaml
from tasks.params.methods import BY_NAME
from tasks.stage.dvc_adapter import Override, apply_overrides, parse_override

SEED = "seed"
MOST_TRIALS = 1000


@dataclass(frozen=True)
class Combination:
    """The overrides of one trial: its setting (name → Hydra's word for the value) and its training seed."""

    name: str
    setting: tuple[tuple[str, str], ...]
    seed: int | None
    """None: that of params.yaml."""
    fixed: tuple[str, ...] = ()
    """Overrides that all trials have."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """All of them, as `dvc exp run -S` takes them."""
        seed = () if self.seed is None else (f"{SEED}={self.seed}",)
        return (*self.fixed, *(f"{name}={value}" for name, value in self.setting), *seed)


@dataclass(frozen=True)
class Space:
    """What a study varies."""

    varied: tuple[Override, ...]
    """Overrides with several values, or an interval."""
    fixed: tuple[str, ...]
    seeds: tuple[int, ...]
    """Empty: the one of params.yaml."""

    def names(self) -> list[str]:
        """The varied parameters, each by as many parts of its name as tell it from the others."""
        return short_names([one.name for one in self.varied])


def read_space(overrides: Sequence[str], methods: Sequence[str]) -> Space:
    """The space of these overrides; `methods` (if any) are the alternatives to PPO that are switched on, all others are
    switched off. Raises UserError for an override that cannot be read, or a parameter or method named twice."""
    varied: list[Override] = []
    fixed = _switches(methods)
    seeds: tuple[int, ...] = ()
    known: set[str] = set()
    for text in overrides:
        one = parse_override(text)
        if one.name in known:
            raise UserError(f"-S {text}: {one.name} is given twice; write NAME=A,B for several values")
        known.add(one.name)
        if one.name == SEED:
            seeds = _seeds(text, one)
        elif len(one.values) == 1:
            fixed.append(text)
        elif text.startswith("+"):
            raise UserError(f"-S {text}: a parameter that params.yaml does not have can take one value only")
        else:
            varied.append(one)
    return Space(tuple(varied), tuple(fixed), seeds)


def _switches(methods: Sequence[str]) -> list[str]:
    unknown = [name for name in methods if name not in BY_NAME and name != "ppo"]
    if unknown:
        hint = did_you_mean(unknown[0], BY_NAME)
        raise UserError(f"--methods {unknown[0]}{hint}; there are: ppo, {', '.join(BY_NAME)}")
    return [f"++{name}.enabled={str(name in methods).lower()}" for name in BY_NAME] if methods else []


def _seeds(text: str, one: Override) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(map(int, one.values)))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0:
        raise UserError(f"-S {text}: seeds are whole numbers from 0; write {SEED}=1,2,3 or {SEED}=range(1,4)")
    return seeds


def grid(study: str, space: Space) -> list[Combination]:
    """Every combination, each with every seed. Raises UserError for an interval, and for more than 1000 trials."""
    if unbounded := [one.name for one in space.varied if one.interval]:
        raise UserError(f"-S {unbounded[0]}=interval(…): an interval needs --search N, the number of its points to try")
    count = max(1, len(space.seeds))
    for one in space.varied:
        count *= len(one.values)
    if count > MOST_TRIALS:
        raise UserError(f"{count} trials are more than {MOST_TRIALS}; name fewer values, or use --search N")
    rows = itertools.product(*(one.values for one in space.varied))
    return [trial for values in rows for trial in with_seeds(study, space, values)]


def with_seeds(study: str, space: Space, values: Sequence[str]) -> list[Combination]:
    """The trials of one setting: `values` are those of the varied parameters, in their order."""
    setting = tuple((one.name, value) for one, value in zip(space.varied, values, strict=True))
    parts = [f"{short}={value}" for short, value in zip(space.names(), values, strict=True)]
    return [
        Combination(
            as_name("-".join([study, *parts, *([] if seed is None else [f"{SEED}={seed}"])])),
            setting,
            seed,
            space.fixed,
        )
        for seed in space.seeds or (None,)
    ]


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of dotted names, as many as make each of them unique: [ppo.kl.coef, dpo.beta] → [coef, beta]."""
    shortened = []
    for name in names:
        parts = name.split(".")
        lengths = range(1, len(parts) + 1)
        tails = (".".join(parts[-length:]) for length in lengths)
        shortened.append(next((t for t in tails if sum(_ends(other, t) for other in names) == 1), name))
    return shortened


def _ends(name: str, tail: str) -> bool:
    return name == tail or name.endswith(f".{tail}")


def check(home: Path, commit: str, trials: Iterable[Combination]) -> dict[str, dict[str, Any]]:
    """The parameters of each trial by its name. Raises UserError, before anything runs, for a value that params.yaml of
    the commit refuses, and for two trials of one name."""
    from tasks.params.all import Params

    params: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory(prefix="leash-") as folder:
        place = Path(folder) / PARAMS_FILE
        text = workspace.git(home, "show", f"{commit}:{PARAMS_FILE}")
        for trial in trials:
            if trial.name in params:
                raise UserError(f"two trials would be named {trial.name}; name their values so that they differ")
            place.write_text(text, encoding="utf-8")
            apply_overrides(place.parent, trial.overrides)
            content = read_yaml(place)
            parse(Params, content, file=Path(trial.name, PARAMS_FILE))
            params[trial.name] = content
    return params


def default_name(space: Space, commit: str) -> str:
    """A name from the varied parameters and the commit, such as `coef-seed-e70966d`."""
    varied = [*space.names(), *([SEED] if space.seeds else [])] or ["run"]
    return as_name("-".join([*(re.sub(r"\W", "_", name) for name in varied), commit[:7]]))


def value_of(params: Mapping[str, Any], name: str) -> Any:
    """The value that params.yaml has under a dotted name; a list or a mapping as its JSON."""
    value: Any = params
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return json.dumps(value) if isinstance(value, list | Mapping) else value
