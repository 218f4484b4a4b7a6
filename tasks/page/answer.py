"""The answer to the page's question, in sentences drawn from the figures and their intervals: better than SFT? than the
best alternative? when should one have stopped? Nothing is called better or worse whose interval holds no difference."""

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.evaluation.comparison_table import Figures, label, models_of
from tasks.page.inputs import Run, finite, interval
from tasks.page.wording import count, number, percent, percent_interval, points

YES, NO, OPEN = "Yes.", "No.", "Not shown."
KINDS = {"gold": "gold score", "win_rate": "win rate against SFT", "reward": "proxy score"}


@dataclass(frozen=True)
class Finding:
    """A question with its answer: the first words, and the sentences that carry them."""

    question: str
    word: str
    sentence: str


@dataclass(frozen=True)
class Lead:
    """By how much another model is ahead of the policy, and the 95% interval, paired by prompt."""

    model: str
    value: float
    ends: tuple[float, float]
    gold: bool
    """Whether it is a difference of gold scores; else the win rate against the policy, less a half."""

    @property
    def text(self) -> str:
        """Signed, as printed."""
        return self._written(self.value)

    @property
    def interval(self) -> str:
        """Both ends, as printed."""
        return f"95% interval {self._written(self.ends[0])} to {self._written(self.ends[1])}"

    def _written(self, value: float) -> str:
        return number(value, sign=True) if self.gold else points(value)


def findings(run: Run) -> list[Finding]:
    """The three answers; those that the run has no figures for are left out."""
    word, sentence = verdict(run)
    found = [Finding("Better than SFT?", word, sentence), against_alternatives(run), when_to_stop(run)]
    return [finding for finding in found if finding is not None]


def verdict(run: Run) -> tuple[str, str]:
    """Whether the policy is better than SFT: the first words, and the sentence that carries them."""
    evaluation = run.evaluation
    ends = interval(evaluation.get("win_rate_ci95"))
    spread = "no interval" if ends is None else f"95% interval {percent_interval(list(ends))}"
    sentence = (
        f"The policy’s win rate against SFT is {percent(evaluation['win_rate'])} on {prompts(run)} held-out prompts "
        f"({spread}), judged by {run.judge}."
    )
    if ends is None:
        return OPEN, sentence
    if ends[0] > 0.5:
        return YES, sentence
    if ends[1] < 0.5:
        return NO, sentence
    return OPEN, sentence + " The interval includes 50%, which is no difference."


def prompts(run: Run) -> str:
    """How many held-out prompts were answered, as printed."""
    return count(run.evaluation.get("prompts", len(run.samples)))


def leads(run: Run) -> list[Lead]:
    """Every model but SFT and policy against the policy, the one furthest ahead first."""
    found = [_lead(name, one, run.has_judge) for name, one in models_of(run.evaluation).items()]
    return sorted((lead for lead in found if lead is not None), key=lambda lead: -lead.value)


def against_alternatives(run: Run) -> Finding | None:
    """Whether the policy is better than every cheap alternative; which ones are better where it is not."""
    ahead = leads(run)
    if not ahead:
        return None
    best = ahead[0]
    winners = [lead for lead in ahead if lead.ends[0] > 0]
    beaten = [lead for lead in ahead if lead.ends[1] < 0]
    level = [lead for lead in ahead if lead not in winners and lead not in beaten]
    word = NO if winners else YES if len(beaten) == len(ahead) else OPEN
    sentence = _best_alternative(run, best)
    if best in level:
        sentence += " The interval includes no difference."
    if others := [f"{label(lead.model)} ({lead.text})" for lead in winners if lead is not best]:
        sentence += f" Better than the policy{', too' if best in winners else ''}: {_listed(others)}."
    if beaten and word != YES:
        sentence += f" The policy is better than {_listed([label(lead.model) for lead in beaten])}."
    if others := [label(lead.model) for lead in level if lead is not best]:
        sentence += f" No difference is shown from {_listed(others)}."
    return Finding("Better than the best alternative?", word, f"{sentence} {_at_equal_kl(run)}".strip())


def when_to_stop(run: Run) -> Finding | None:
    """Which snapshot is best on the validation prompts, and how far it is ahead of the last on the test prompts: an
    answer only where the interval of that difference, paired by prompt, excludes 0, and a guess where there is none."""
    selected = run.metrics["select"]
    best, last = selected.get("best_judge_step"), selected.get("last_step")
    by = f"win rate, judged by {run.judge}," if run.judged_by == "pairs" else "gold score"
    if best is None:
        best, by = selected.get("best_proxy_step"), "reward-model score, which is what PPO climbs,"
    if not isinstance(last, int) or not isinstance(best, int) or not selected.get("prompts"):
        return None
    seen = f"the best {by} on {count(selected['prompts'])} validation prompts"
    chosen = f"The policy is the snapshot of step {selected.get('step')} (rule {selected.get('rule')})."
    if best == last:
        return Finding("When to stop?", "Not before the end.", f"The last snapshot, step {last}, has {seen}. {chosen}")
    difference, ends = _stopping(run)
    where = "before PPO began" if best == 0 else f"at step {best} of {last}"
    word = f"Perhaps {where}."
    if ends is not None and ends[0] > 0:
        word = f"{where[0].upper()}{where[1:]}."
    elif ends is not None:
        word = "Not before the end." if ends[1] < 0 else OPEN
    who = "The SFT model" if best == 0 else f"The snapshot of step {best}"
    return Finding("When to stop?", word, f"{who} has {seen}. {difference}{chosen}")


def _lead(name: str, figures: Figures, judge: bool) -> Lead | None:
    if name in ("sft", "policy"):
        return None
    key = "gold_minus_policy" if judge else "win_rate_vs_policy"
    value, ends = finite(figures.get(key)), interval(figures.get(f"{key}_ci95"))
    if value is None or ends is None:
        return None
    even = 0.0 if judge else 0.5
    return Lead(name, value - even, (ends[0] - even, ends[1] - even), judge)


def _best_alternative(run: Run, best: Lead) -> str:
    models = models_of(run.evaluation)
    name = label(best.model)
    if best.gold:
        scores = f"{number(models[best.model].get('gold'))} against the policy’s {number(models['policy'].get('gold'))}"
        return f"The best alternative is {name}, gold score {scores}: {best.text} ({best.interval})."
    rate = f"{percent(best.value + 0.5)} ({percent_interval([best.ends[0] + 0.5, best.ends[1] + 0.5])})"
    return f"The best alternative is {name}, win rate against the policy {rate}, judged by {run.judge}."


def _at_equal_kl(run: Run) -> str:
    """Who is shown to be ahead where PPO's snapshots had moved as far from SFT as the other model."""
    above: list[str] = []
    below: list[str] = []
    level: list[str] = []
    read: dict[str, Figures] = {}
    for name, figures in (run.evaluation.get("frontier") or {}).items():
        gap, ends = finite(figures.get(f"{run.score}_gap")), interval(figures.get(f"{run.score}_gap_ci95"))
        if gap is not None and finite(figures.get("kl")):
            shown = ends is not None and (ends[0] > 0 or ends[1] < 0)
            side = level if not shown else below if gap > 0 else above
            side.append(f"{label(name)} ({_signed(run.score, -gap)})")
            read[name] = figures
    kind = KINDS[run.score]
    told = [f"above PPO’s snapshots in {kind}: {_listed(above)}"] if above else []
    told += [f"{'below' if above else f'below PPO’s snapshots in {kind}'}: {_listed(below)}"] if below else []
    told += [f"no difference shown: {_listed(level)}"] if level else []
    return f"At equal KL, {'; '.join(told)}.{_without_snapshot(read)}" if told else ""


def _without_snapshot(read: Mapping[str, Figures]) -> str:
    """Which models are compared with what is interpolated between SFT and a snapshot."""
    found: dict[int, list[str]] = {}
    for name, figures in read.items():
        between = figures.get("between") or []
        if 0 in between and any(between):
            found.setdefault(max(between), []).append(label(name))
    told = [
        f" PPO has no snapshot between SFT and step {step}: interpolated there, for {_listed(names)}."
        for step, names in sorted(found.items())
    ]
    return "".join(told)


def _stopping(run: Run) -> tuple[str, tuple[float, float] | None]:
    """By how much the best snapshot is ahead of the last on the test prompts: in words, and the interval."""
    stopping = run.evaluation.get("stopping") or {}
    kind, value, ends = (
        stopping.get("score"),
        finite(stopping.get("difference")),
        interval(stopping.get("difference_ci95")),
    )
    if kind not in KINDS or value is None or ends is None:
        return "", None
    low, high = (_signed(kind, end) for end in ends)
    told = (
        f"On the test prompts its {KINDS[kind]} less that of the last snapshot is {_signed(kind, value)} (95% interval "
        f"{low} to {high}, paired by prompt)"
    )
    return told + (". " if ends[0] > 0 or ends[1] < 0 else ": no difference shown. "), ends


def _signed(kind: str, value: float) -> str:
    """A difference of scores, or of win rates."""
    return points(value) if kind == "win_rate" else number(value, sign=True)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
