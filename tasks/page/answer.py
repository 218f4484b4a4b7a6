"""The answer to the page's question, in sentences drawn from the figures and their intervals: better than SFT? than the
best alternative? when should one have stopped? Nothing is called better or worse whose interval holds no difference."""

from dataclasses import dataclass

from tasks.page.comparison import Figures, label, models_of
from tasks.page.inputs import Row, Run, finite, interval
from tasks.page.wording import count, number, percent, percent_interval, points

YES, NO, OPEN = "Yes.", "No.", "Not shown."
KINDS = {"gold": "gold score", "reward": "proxy score"}


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
    word = NO if winners else YES if len(beaten) == len(ahead) else OPEN
    sentence = _best_alternative(run, best)
    if winners:
        others = [f"{label(lead.model)} ({lead.text})" for lead in winners if lead is not best]
        sentence += f" {label(best.model)} wins; better than the policy, too: {_listed(others)}." if others else ""
    elif word == OPEN:
        sentence += " The interval includes no difference."
    if beaten and word != YES:
        sentence += f" The policy is better than {_listed([label(lead.model) for lead in beaten])}."
    return Finding("Better than the best alternative?", word, f"{sentence} {_at_equal_kl(run)}".strip())


def when_to_stop(run: Run) -> Finding | None:
    """The best snapshot on the validation prompts against the last one; their scores on the test prompts."""
    selected = run.metrics["select"]
    last, best, by = selected.get("last_step"), selected.get("best_judge_step"), "gold score"
    if not run.has_judge:
        by = f"win rate, judged by {run.judge},"
    if best is None:
        best, by = selected.get("best_proxy_step"), "reward-model score, which is what PPO climbs,"
    if not isinstance(last, int) or not isinstance(best, int) or not selected.get("prompts"):
        return None
    seen = f"the best {by} on {count(selected['prompts'])} validation prompts"
    chosen = f"The policy is the snapshot of step {selected.get('step')} (rule {selected.get('rule')})."
    if best == last:
        return Finding("When to stop?", "Not before the end.", f"The last snapshot, step {last}, has {seen}. {chosen}")
    where = "before PPO began" if best == 0 else f"at step {best} of {last}"
    tested, sure = _on_test(run, best, last)
    word = f"{where[0].upper()}{where[1:]}." if sure else f"Perhaps {where}."
    return Finding("When to stop?", word, f"That snapshot has {seen}. {tested}{chosen}")


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
    kind = "gold" if run.has_judge else "reward"
    above: list[str] = []
    below: list[str] = []
    level: list[str] = []
    for name, figures in (run.evaluation.get("frontier") or {}).items():
        gap, ends = finite(figures.get(f"{kind}_gap")), interval(figures.get(f"{kind}_gap_ci95"))
        if gap is not None and finite(figures.get("kl")):
            shown = ends is not None and (ends[0] > 0 or ends[1] < 0)
            side = level if not shown else below if gap > 0 else above
            side.append(f"{label(name)} ({number(-gap, sign=True)})")
    told = [f"above PPO’s snapshots in {KINDS[kind]}: {_listed(above)}"] if above else []
    told += [f"{'below' if above else 'below PPO’s snapshots in ' + KINDS[kind]}: {_listed(below)}"] if below else []
    told += [f"no difference shown: {_listed(level)}"] if level else []
    return f"At equal KL, {'; '.join(told)}." if told else ""


def _on_test(run: Run, best: int, last: int) -> tuple[str, bool]:
    """Both snapshots' scores on the test prompts, in words; whether the last one's is shown to be lower."""
    kind = "gold" if run.has_judge else "reward"
    rows = [row for step in (best, last) for row in run.snapshots if row["point"] == step]
    if len(rows) != 2:
        return "", False
    first, second = (interval([row.get(f"{kind}_low"), row.get(f"{kind}_high")]) for row in rows)
    sure = first is not None and second is not None and first[0] > second[1]
    said = f"On the test prompts it scores {_scored(rows[0], kind)}, the last one {_scored(rows[1], kind)}"
    return said + (". " if sure else ": no difference shown. "), sure


def _scored(row: Row, kind: str) -> str:
    ends = interval([row.get(f"{kind}_low"), row.get(f"{kind}_high")])
    spread = "" if ends is None else f" (95% interval {number(ends[0])} to {number(ends[1])})"
    return number(row.get(kind)) + spread


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
