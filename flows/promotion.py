"""The promotion gate: the policy of a nightly run is compared with the champion, and takes its place by the rules of
`promote:` in params.yaml."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from flows import isolated, workspace
from flows.text import table
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, parse
from tasks.params.promote import PromoteParams
from tasks.tracking.registry import BEFORE, CHALLENGER, CHAMPION, Registry, Version

if TYPE_CHECKING:
    from tasks.stage.dvc_adapter import Stored

EXTRA = Path("models") / "extra"
PROMOTED, KEPT = "promoted", "kept"
COMPARED = "Champion"
"""Trailer of an experiment's message: DVC's hash of the champion that its evaluation has compared."""
INDEPENDENT = {
    "pairs": "a judge of pairs",
    "scores": "a judge's scores",
    "judging reward model": "a reward model that PPO was not trained on",
}
"""Kinds of judges, in words; the last kind is the reward model of the run, which PPO has maximised."""


@dataclass(frozen=True)
class Rule:
    """One rule, what was measured, and whether it holds."""

    name: str
    measured: str
    bound: str
    holds: bool


@dataclass(frozen=True)
class Decision:
    """What became of a challenger. `rules` is empty where nothing was compared."""

    challenger: str
    champion: str | None
    """The version before."""
    rules: tuple[Rule, ...] = ()
    reason: str = ""
    """Why it was not compared."""
    unchanged: bool = False
    """The challenger is the champion itself."""

    @property
    def promoted(self) -> bool:
        """Whether the challenger is the champion now."""
        return bool(self.rules) and all(rule.holds for rule in self.rules)

    @property
    def title(self) -> str:
        """One line: the outcome, and the rules that do not hold."""
        if self.promoted:
            over = f", in the place of version {self.champion}" if self.champion else ", the first one"
            return f"{PROMOTED}: version {self.challenger} is the champion{over}"
        broken = "; ".join(f"{one.name}: {one.measured}, must be {one.bound}" for one in self.rules if not one.holds)
        stays = f"version {self.champion} stays the champion" if self.champion else "there is no champion"
        return f"{KEPT}: {stays} ({self.reason or broken})"

    @property
    def text(self) -> str:
        """The title and a table of the rules."""
        return "\n".join([self.title, *(["", table(self._rows())] if self.rules else [])])

    @property
    def markdown(self) -> str:
        """The same, for Prefect's page."""
        heading, *rows = [f"| {' | '.join(row)} |" for row in self._rows()]
        return "\n".join([self.title, "", *([heading, "|---|---|---|---|", *rows] if rows else [])])

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = [(rule.name, rule.measured, rule.bound, "yes" if rule.holds else "NO") for rule in self.rules]
        return [("rule", "measured", "must be", "holds"), *rows]


def with_champion(space: Workspace, champion: Version | None) -> Workspace:
    """The workspace whose evaluation answers with the champion, too."""
    if champion is None:
        return space
    params = _yaml(workspace.git(space.home, "show", f"{space.commit}:{PARAMS_FILE}"))
    others = (params.get("evaluate") or {}).get("extra_models") or []
    models = ",".join([*(name for name in others if name != CHAMPION), CHAMPION])
    return replace(space, overrides=(*space.overrides, f"++evaluate.extra_models=[{models}]"))


def files_of(home: Path, version: Version) -> "dict[str, Stored]":
    """The files of a version by their path. Raises UserError where neither DVC's cache nor its remote has them."""
    from tasks.stage.dvc_adapter import stored_files

    return stored_files(home, version.digest)


def place(space: Workspace, champion: Version) -> None:
    """Put the champion's files into the open workspace. Raises UserError as `files_of`."""
    folder = space.root / EXTRA / CHAMPION
    shutil.rmtree(folder, ignore_errors=True)
    for name, file in files_of(space.home, champion).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        file.copy(folder / name)


def decide(
    params: PromoteParams, figures: Mapping[str, Any], alerts: Sequence[str], compared: bool
) -> tuple[Rule, ...]:
    """Every rule. `figures` is metrics/evaluate.json; with `compared` the champion is among its models.

    The interval of the champion's win rate against the policy is turned round: a tie counts half in both."""
    return tuple(_rules(params, figures, alerts, compared))


def _rules(params: PromoteParams, figures: Mapping[str, Any], alerts: Sequence[str], compared: bool) -> Iterator[Rule]:
    if compared:
        judge = figures.get("judged_by") or "none"
        independent = judge in INDEPENDENT or (params.allow_reward_model and judge != "none")
        yield Rule("judge", INDEPENDENT.get(judge, judge), "independent of the policy's training", independent)
        other = figures["models"][CHAMPION]
        low, high = (1.0 - other[f"win_rate_vs_policy_{end}"] for end in ("high", "low"))
        measured = f"{1.0 - other['win_rate_vs_policy']:.3f} ({low:.3f} to {high:.3f})"
        bound = f"above {params.win_rate_above:g} with its interval"
        yield Rule("win rate against the champion", measured, bound, low > params.win_rate_above)
    kl, missing = figures.get("kl_per_sequence"), figures.get("missing_eos_share")
    if params.kl_below is not None:
        yield _below("KL, nats", kl, params.kl_below)
    yield _below("answers without an end", missing, params.missing_eos_below)
    standing = sorted({name for name in alerts if name not in params.allowed_alerts})
    yield Rule("health alerts", ", ".join(standing) or "none", "none, or allowed ones", not standing)


def _below(name: str, value: float | None, bound: float) -> Rule:
    if value is None:
        return Rule(name, "not measured", f"below {bound:g}", False)
    return Rule(name, f"{value:.3g}", f"below {bound:g}", value < bound)


def judge(home: Path, name: str, commit: str, registry: Registry) -> Decision:
    """Compare the policy of an experiment with the champion, by the rules of the experiment's params.yaml, and move the
    aliases and tags in MLflow. Raises UserError where MLflow does not answer or has no version of this policy."""
    experiment = isolated.find(home, commit, name)
    if experiment is None:
        raise UserError(f"no experiment {name} of commit {commit[:12]}; `dvc exp show` lists those that there are")
    challenger = registry.by_digest(policy_digest(home, experiment))
    if challenger is None:
        raise UserError(f"MLflow has no version of the policy of {name}; `leash sync`, then `leash promote {name}`")
    registry.set_alias(CHALLENGER, challenger)
    champion = registry.by_alias(CHAMPION)
    decision = _decision(home, experiment, challenger, champion)
    if decision.unchanged:
        return decision
    tags = {"leash.promotion": decision.title, "leash.experiment": name, "leash.commit": commit}
    if decision.promoted:
        tags[BEFORE] = champion.number if champion else "none"
    registry.tag(challenger, tags)  # before the alias: a champion without BEFORE could not be undone
    if decision.promoted:
        registry.set_alias(CHAMPION, challenger)
    return decision


def judge_experiment(home: Path, name: str, registry: Registry) -> Decision:
    """`judge` for the newest experiment of this name. Raises UserError where there is none."""
    return judge(home, name, isolated.baseline(home, name), registry)


def judge_challenger(home: Path, registry: Registry) -> Decision:
    """`judge` for the challenger. Raises UserError where there is none."""
    challenger = registry.by_alias(CHALLENGER)
    name, commit = (
        (challenger.tags.get(tag) for tag in ("leash.experiment", "leash.commit")) if challenger else ("", "")
    )
    if not name or not commit:
        raise UserError("there is no challenger; a nightly run makes one (docs/how-to/nightly.md)")
    return judge(home, name, commit, registry)


def _decision(home: Path, experiment: str, challenger: Version, champion: Version | None) -> Decision:
    files, _ = isolated.read(home, experiment)
    params = parse(PromoteParams, _yaml(files[str(PARAMS_FILE)].decode("utf-8")).get("promote") or {}, "promote")
    figures = json.loads(files["metrics/evaluate.json"])
    alerts = [alert["name"] for alert in json.loads(files.get("metrics/ppo.json", b"{}")).get("alerts") or []]
    before = champion.number if champion else None
    if champion is not None and champion.digest == challenger.digest:
        return Decision(challenger.number, before, reason="the policy is the champion itself", unchanged=True)
    if not params.enabled:
        return Decision(challenger.number, before, reason="promote.enabled is false")
    compared = isolated.trailer(home, experiment, COMPARED)
    if champion is not None and (compared is None or CHAMPION not in (figures.get("models") or {})):
        return Decision(challenger.number, before, reason="the champion was not evaluated in this run")
    if champion is not None and compared != champion.digest:
        return Decision(challenger.number, before, reason="the champion has changed since this run; run again")
    return Decision(challenger.number, before, decide(params, figures, alerts, champion is not None))


def _yaml(text: str) -> dict[str, Any]:
    return dict(YAML(typ="safe", pure=True).load(text) or {})


def policy_digest(home: Path, experiment: str) -> str:
    """DVC's hash of models/policy in the dvc.lock of an experiment. Raises UserError where it has none."""
    lock = _yaml(workspace.git(home, "show", f"{experiment}:dvc.lock"))
    for stage in (lock.get("stages") or {}).values():
        for out in stage.get("outs") or []:
            if out["path"] == "models/policy":
                return str(out["md5"])
    raise UserError(f"dvc.lock of {experiment[:12]} has no models/policy; the run did not make one")


def by_hand(registry: Registry, number: str) -> str:
    """Make a version the champion. Raises UserError for an unknown one."""
    version, champion = registry.by_number(number), registry.by_alias(CHAMPION)
    if version is None:
        raise UserError(f"the registered policy has no version {number}")
    if champion is not None and champion.number == version.number:
        raise UserError(f"version {number} is the champion already")
    registry.tag(version, {BEFORE: champion.number if champion else "none", "leash.promotion": f"{PROMOTED}: by hand"})
    registry.set_alias(CHAMPION, version)
    return f"version {number} is the champion" + (f", in the place of version {champion.number}" if champion else "")


def undo(registry: Registry) -> str:
    """Make the version the champion that was it before. Raises UserError where there is none."""
    champion = registry.by_alias(CHAMPION)
    if champion is None:
        raise UserError("there is no champion")
    before = champion.tags.get(BEFORE, "none")
    version = None if before == "none" else registry.by_number(before)
    registry.tag(champion, {"leash.promotion": "undone by hand"})
    if version is None:
        registry.remove_alias(CHAMPION)
        return f"version {champion.number} is no longer the champion; there was none before it"
    registry.set_alias(CHAMPION, version)
    return f"version {version.number} is the champion again, in the place of version {champion.number}"
