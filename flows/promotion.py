"""The promotion gate: the policy of a nightly run is compared with the champion, and takes its place by the rules of
`promote:` in params.yaml."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows import isolated, workspace
from flows.text import table
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from rlhf_core.locks import held
from tasks.params.loader import PARAMS_FILE, parse, parse_yaml
from tasks.params.promote import PromoteParams
from tasks.records.recorded import outs_of, read_results
from tasks.tracking.registry import BEFORE, CHALLENGER, CHAMPION, Registry, Version
from tasks.tracking.settings import main_checkout

EXTRA = Path("models") / "extra"
DECISION = "leash.promotion"
"""Tag of a version: what was decided about it."""
COMPARED = "Champion"
"""Trailer of an experiment's message: DVC's hash of the champion that its evaluation has compared."""
WAIT_SECONDS = 60.0
INDEPENDENT = {"pairs": "a judge of pairs", "scores": "a judge's scores",
               "judging reward model": "a reward model that PPO was not trained on"}  # fmt: skip
"""Kinds of judges, in words; the other kind is the reward model of the run, which PPO has maximised."""


@dataclass(frozen=True)
class Rule:
    """One rule, what was measured, whether it holds, and what is wrong where it does not."""

    name: str
    measured: str
    bound: str
    holds: bool
    broken: str


@dataclass(frozen=True)
class Decision:
    """What became of a challenger, and the champion before. `rules` is empty where nothing was compared, for a
    `reason`; `unchanged` where the challenger is the champion itself."""

    challenger: str
    champion: str | None
    rules: tuple[Rule, ...] = ()
    reason: str = ""
    unchanged: bool = False

    @property
    def promoted(self) -> bool:
        """Whether the challenger is the champion now."""
        return bool(self.rules) and all(rule.holds for rule in self.rules)

    @property
    def title(self) -> str:
        """One line: the outcome, and the rules that do not hold."""
        if self.promoted:
            over = f", in the place of version {self.champion}" if self.champion else ", the first one"
            return f"promoted: version {self.challenger} is the champion{over}"
        why = self.reason or "; ".join(rule.broken for rule in self.rules if not rule.holds)
        stays = f"version {self.champion} stays the champion" if self.champion else "there is no champion"
        return f"not promoted: {why}; {stays}"

    @property
    def text(self) -> str:
        """The title and a table of the rules."""
        return f"{self.title}\n\n{table(self._rows())}" if self.rules else self.title

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
    params = parse_yaml(workspace.git(space.home, "show", f"{space.commit}:{PARAMS_FILE}"), PARAMS_FILE)
    others = (params.get("evaluate") or {}).get("extra_models") or []
    models = ",".join([*(name for name in others if name != CHAMPION), CHAMPION])
    return replace(space, overrides=(*space.overrides, f"++evaluate.extra_models=[{models}]"))


def place(space: Workspace, champion: Version) -> None:
    """Put the champion's files into the open workspace. Raises UserError where neither DVC's cache nor its remote has
    them."""
    from tasks.stage.dvc_adapter import stored_files

    folder = space.root / EXTRA / CHAMPION
    shutil.rmtree(folder, ignore_errors=True)
    for name, file in stored_files(space.home, champion.digest).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        file.copy(folder / name)


def decide(
    params: PromoteParams, figures: Mapping[str, Any], alerts: Sequence[str], compared: bool
) -> tuple[Rule, ...]:
    """Every rule. `figures` is metrics/evaluate.json; with `compared` the champion is among its models.

    The interval of the champion's win rate against the policy is turned round: a tie counts half in both."""
    rules = []
    if compared:
        judge = figures.get("judged_by") or "none"
        words = INDEPENDENT.get(judge, judge)
        independent = judge in INDEPENDENT or (params.allow_reward_model and judge != "none")
        broken = "no judge has compared it with the champion" if judge == "none" else f"the judge is the {words} of PPO"
        rules.append(Rule("judge", words, "independent of the policy's training", independent, broken))
        other = figures["models"][CHAMPION]
        low, high = (1.0 - other[f"win_rate_vs_policy_{end}"] for end in ("high", "low"))
        rate, bound = f"{1.0 - other['win_rate_vs_policy']:.3f} ({low:.3f} to {high:.3f})", params.win_rate_above
        broken = f"its win rate against the champion is {rate}, and its interval must be above {bound:g}"
        must = f"above {bound:g} with its interval"
        rules.append(Rule("win rate against the champion", rate, must, low > bound, broken))
    if (limit := params.kl_below) is not None:
        kl = figures.get("kl_per_sequence")
        measured = "not measured" if kl is None else f"{kl:.3g}"
        broken = f"KL to the SFT model: {measured} nats (limit {limit:g})"
        rules.append(Rule("KL, nats", measured, f"below {limit:g}", kl is not None and kl < limit, broken))
    share, limit = figures.get("missing_eos_share"), params.missing_eos_below
    measured = "not measured" if share is None else f"{share:.1%}"
    few = "no answer has an end" if share == 1 else f"{measured} of its answers have no end"
    broken = f"{few} (limit {100 * limit:g}%)"
    ended = share is not None and share < limit
    rules.append(Rule("answers without an end", measured, f"below {100 * limit:g}%", ended, broken))
    standing = ", ".join(sorted({name for name in alerts if name not in params.allowed_alerts}))
    must, broken = "none, or allowed ones", f"health alerts of ppo: {standing}"
    return (*rules, Rule("health alerts", standing or "none", must, not standing, broken))


def judge_named(home: Path, name: str | None, registry: Registry) -> Decision:
    """`judge` for the newest experiment of this name; None: of the challenger. Raises UserError where there is none."""
    if name:
        return judge(home, name, isolated.baseline(home, name), registry)
    tags = version.tags if (version := registry.by_alias(CHALLENGER)) else {}
    if not tags.get("leash.experiment") or not tags.get("leash.commit"):
        raise UserError("there is no challenger; a nightly run makes one (docs/how-to/nightly.md)")
    return judge(home, tags["leash.experiment"], tags["leash.commit"], registry)


def judge(home: Path, name: str, commit: str, registry: Registry) -> Decision:
    """Compare the policy of an experiment with the champion, by the rules of the experiment's params.yaml, and move the
    aliases and tags in MLflow. Raises UserError where MLflow does not answer or has no version of this policy."""
    experiment = isolated.find(home, commit, name)
    if experiment is None:
        raise UserError(f"no experiment {name} of commit {commit[:12]}; `dvc exp show` lists those that there are")
    files = read_results(home, experiment, str(PARAMS_FILE), "metrics/evaluate.json", "metrics/ppo.json")
    content = parse_yaml(files[str(PARAMS_FILE)].decode("utf-8"), PARAMS_FILE)
    params = parse(PromoteParams, content.get("promote") or {}, "promote")
    figures = json.loads(files["metrics/evaluate.json"])
    alerts = [alert["name"] for alert in json.loads(files.get("metrics/ppo.json", b"{}")).get("alerts") or []]
    compared = isolated.trailer(home, experiment, COMPARED)
    with _one_at_a_time(home):
        challenger = registry.by_digest(policy_digest(home, experiment))
        if challenger is None:
            raise UserError(
                f"MLflow has no version of the policy of {name}; `leash run --sync`, then `leash promote {name}`"
            )
        registry.set_alias(CHALLENGER, challenger)
        champion = registry.by_alias(CHAMPION)
        before, reason = champion.number if champion else None, ""
        if champion is not None and champion.digest == challenger.digest:
            return Decision(challenger.number, before, reason="the policy is the champion itself", unchanged=True)
        if not params.enabled:
            reason = "promote.enabled is false"
        elif champion is not None and (compared is None or CHAMPION not in (figures.get("models") or {})):
            reason = "the champion was not evaluated in this run"
        elif champion is not None and compared != champion.digest:
            reason = "the champion has changed since this run, so run again"
        rules = () if reason else decide(params, figures, alerts, champion is not None)
        decision = Decision(challenger.number, before, rules, reason)
        tags = {DECISION: decision.title, "leash.experiment": name, "leash.commit": commit}
        registry.tag(challenger, tags | ({BEFORE: before or "none"} if decision.promoted else {}))
        if decision.promoted:  # after the tag: a champion without BEFORE could not be undone
            registry.set_alias(CHAMPION, challenger)
        return decision


def _one_at_a_time(home: Path) -> AbstractContextManager[object]:
    """No other process of this machine moves the champion between what is read here and what is written."""
    return held(main_checkout(home) / "work" / "promotion.lock", WAIT_SECONDS, "promotes a policy")


def policy_digest(home: Path, experiment: str) -> str:
    """DVC's hash of models/policy in the dvc.lock of an experiment. Raises UserError where it has none."""
    if found := outs_of(home, experiment).get("models/policy"):
        return found
    raise UserError(f"dvc.lock of {experiment[:12]} has no models/policy; the run did not make one")


def by_hand(home: Path, registry: Registry, number: str) -> str:
    """Make a version the champion. Raises UserError for an unknown one."""
    with _one_at_a_time(home):
        version, champion = registry.by_number(number), registry.by_alias(CHAMPION)
        if version is None:
            raise UserError(f"the registered policy has no version {number}")
        if champion is not None and champion.number == number:
            raise UserError(f"version {number} is the champion already")
        registry.tag(version, {BEFORE: champion.number if champion else "none", DECISION: "promoted: by hand"})
        registry.set_alias(CHAMPION, version)
    return f"version {number} is the champion" + (f", in the place of version {champion.number}" if champion else "")


def undo(home: Path, registry: Registry) -> str:
    """Make the version the champion that was it before. Raises UserError where there is none."""
    with _one_at_a_time(home):
        champion = registry.by_alias(CHAMPION)
        if champion is None:
            raise UserError("there is no champion")
        before = champion.tags.get(BEFORE, "none")
        version = None if before == "none" else registry.by_number(before)
        registry.tag(champion, {DECISION: "undone by hand"})
        if version is None:
            registry.remove_alias(CHAMPION)
            return f"version {champion.number} is no longer the champion; there was none before it"
        registry.set_alias(CHAMPION, version)
    return f"version {version.number} is the champion again, in the place of version {champion.number}"


def versions(registry: Registry) -> str:
    """A table of the registered policies, the newest first: version, aliases, date (UTC), experiment, decision."""
    rows = [("version", "is", "registered", "experiment", "decision")]
    for one, aliases in registry.all():
        date = datetime.fromtimestamp(one.created, UTC).strftime("%Y-%m-%d %H:%M")
        experiment, decision = (one.tags.get(tag, "") for tag in ("leash.experiment", DECISION))
        rows.append((one.number, ", ".join(aliases), date, experiment, decision))
    return table(rows) if len(rows) > 1 else "no policy is registered; a run registers one at its end"
