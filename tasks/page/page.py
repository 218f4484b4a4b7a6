"""The page: which numbers stand in which table, the sentence that answers the question, and the HTML. Pictures are
drawn in figures.py; looks stand in the templates. Every text of a user or model passes through jinja's escaping, none
around it."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.page.canvas import DPI, HEIGHT, WIDTH
from tasks.page.inputs import Row, Run, finite, interval
from tasks.page.picture import Picture
from tasks.page.wording import MISSING, count, number, percent, percent_interval, points
from tasks.params.secrets import HIDDEN, is_secret

TIE = 1e-9
"""Scores this close count as equal, as they do in the win rate."""
SECTIONS = ("answer", "ppo", "health", "reward", "sft")


@dataclass(frozen=True)
class Line:
    """A row of the headline table, as it is shown."""

    name: str
    unit: str
    sft: str
    policy: str
    change: str = ""
    wide: bool = False
    """True where the figure compares both models, and so belongs to neither column."""


@dataclass(frozen=True)
class Answer:
    """One model's answer to a held-out prompt."""

    model: str
    """`sft` or `policy`."""
    text: str
    ended: bool
    facts: list[tuple[str, str]]
    preferred: bool


@dataclass(frozen=True)
class Sample:
    """A prompt with both answers. `row` is its 1-based line in data/evaluate/samples.jsonl."""

    row: int
    prompt: list[Row]
    answers: list[Answer]


def render(run: Run, pictures: list[Picture], samples: int) -> str:
    """The page as one HTML document with everything in it. `samples`: pairs to read, at most."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = {name: [picture for picture in pictures if picture.section == name] for name in SECTIONS}
    return (
        environment.get_template("template.html.j2").render(
            run=run,
            verdict=verdict(run),
            headline=headline(run),
            pictures=sections,
            embed=embed,
            image=(round(WIDTH * DPI), round(HEIGHT * DPI)),
            judge=str(run.evaluation.get("judge") or run.judge),
            reward_facts=reward_facts(run),
            sft_facts=sft_facts(run),
            samples=pick(run, samples),
            prompts=_prompts(run),
            rows=count(len(run.samples)),
            parameters=parameters(run.params),
            data=data_counts(run),
        )
        + "\n"
    )


def write_page(page: str, path: Path) -> None:
    """Write the page as UTF-8. Half a surrogate pair, which JSON allows and UTF-8 does not, becomes a question mark."""
    path.write_bytes(page.encode("utf-8", errors="replace"))


def embed(picture: Picture) -> str:
    """The picture as a data URI."""
    return "data:image/png;base64," + base64.b64encode(picture.png).decode("ascii")


def verdict(run: Run) -> tuple[str, str]:
    """The answer to the page's question: its first words, and the sentence that carries it."""
    evaluation = run.evaluation
    ends = interval(evaluation.get("win_rate_ci95"))
    spread = "no interval" if ends is None else f"95% interval {percent_interval(list(ends))}"
    sentence = (
        f"The policy’s win rate against SFT is {percent(evaluation['win_rate'])} on {_prompts(run)} held-out prompts "
        f"({spread}), judged by {run.judge}."
    )
    if ends is None:
        return "Not shown.", sentence
    if ends[0] > 0.5:
        return "Yes.", sentence
    if ends[1] < 0.5:
        return "No.", sentence
    return "Not shown.", sentence + " The interval holds 50%, which is no difference."


def headline(run: Run) -> list[Line]:
    """SFT against policy, a row a figure; a row without any number is left out."""
    e = run.evaluation
    ends = interval(e.get("win_rate_ci95"))
    rate = percent(e["win_rate"]) + ("" if ends is None else f" ({percent_interval(list(ends))})")
    lines = [Line("Win rate against SFT", f"judged by {run.judge}; 95% interval", "", rate, wide=True)]
    if e.get("ties") is not None:
        ties = count(e["ties"]) if isinstance(e["ties"], int) else percent(e["ties"])
        lines.append(Line("Ties", "prompts on which both answers score the same; half a win each", "", ties, wide=True))
    if run.has_judge:
        lines.append(_line(e, "Gold score", "mean; no model sees it", "gold_sft", "gold_policy"))
    lines += [
        _line(e, "Reward-model score", "mean, raw", "reward_sft", "reward_policy"),
        Line("KL to SFT, k1", "nats per answer", "", number(e.get("kl_per_sequence"))),
        Line("KL to SFT, k3", "nats per answer", "", number(e.get("kl_k3_per_sequence"))),
        _line(e, "Response length", "tokens, mean", "response_tokens_sft", "response_tokens_policy", 1),
        _shares(e, "Share without eos", "answers cut off at the limit", "missing_eos_share_sft", "missing_eos_share"),
        _line(e, "Distinct-1", "different words per word", "distinct_1_sft", "distinct_1_policy", 3),
        _line(e, "Distinct-2", "different word pairs per word pair", "distinct_2_sft", "distinct_2_policy", 3),
        _line(e, "Held-out loss", "nats per token of the demonstrations", "heldout_loss_sft", "heldout_loss_policy", 3),
    ]
    return [line for line in lines if not {line.sft, line.policy} <= {"", MISSING}]


def sft_facts(run: Run) -> list[tuple[str, str]]:
    """What is known of the supervised stage beside its picture."""
    s = run.metrics["sft"]
    return _shown(
        [
            ("Held-out loss, nats per token", number(s.get("validation_loss"), 3)),
            ("Held-out perplexity", number(s.get("validation_perplexity"))),
            ("Held-out loss before SFT", number(s.get("base_validation_loss"), 3)),
            ("Training loss", number(s.get("train_loss"), 3)),
            ("Best step", count(s.get("best_step"))),
            ("Steps", count(s.get("steps"))),
            ("Tokens trained on", count(s.get("tokens"))),
        ]
    )


def reward_facts(run: Run) -> list[tuple[str, str]]:
    """What is known of the reward model beside its pictures."""
    r = run.metrics["reward"]
    accuracy = f"{percent(r.get('heldout_accuracy'))} ({percent_interval(r.get('heldout_accuracy_ci95'))})"
    facts = [
        ("Held-out accuracy (95% interval)", accuracy if finite(r.get("heldout_accuracy")) is not None else MISSING),
        ("Held-out pairs", count(r.get("heldout_pairs"))),
        ("Training accuracy", percent(r.get("train_accuracy"))),
        ("Held-out loss, nats per pair", number(r.get("heldout_loss"), 3)),
        ("Expected calibration error", number(r.get("expected_calibration_error"), 3)),
        ("Correlation with length", number(r.get("length_correlation"))),
    ]
    if run.has_judge:
        facts.append(("Correlation with the gold score", number(r.get("gold_correlation"))))
    return _shown(facts)


def pick(run: Run, samples: int) -> list[Sample]:
    """`samples` rows spread evenly over the file, so that nobody chose them; all rows where there are no more."""
    total = len(run.samples)
    wanted = min(samples, total)
    return [_sample(run, index * total // wanted) for index in range(wanted)]


def parameters(params: Row) -> list[tuple[str, list[tuple[str, str]]]]:
    """Dotted keys and values, grouped by block; what belongs to no block comes first, as `common`."""
    common = [(key, _value(key, value)) for key, value in params.items() if not isinstance(value, dict)]
    blocks = [(key, list(_flat(value))) for key, value in params.items() if isinstance(value, dict)]
    return [("common", common), *blocks] if common else blocks


def data_counts(run: Run) -> list[tuple[str, str]]:
    """Where the data came from and how much of it was used for what."""
    ingest, preferences, base = (run.metrics[stage] for stage in ("ingest", "preferences", "base"))
    dropped = [
        f"{name.replace('_', ' ')} {count(n)}" for name, n in sorted(dict(ingest.get("dropped") or {}).items()) if n
    ]
    facts = [
        ("Source", str(ingest.get("source", MISSING))),
        ("Rows read", count(ingest.get("rows_read"))),
        ("Rows used", count(ingest.get("rows_used"))),
        ("Rows dropped", ", ".join(dropped) or "none"),
        ("Demonstrations", count(ingest.get("demonstrations"))),
        ("Human pairs", count(ingest.get("pairs"))),
        ("Preference prompts", count(ingest.get("preference_prompts"))),
        ("PPO prompts", count(ingest.get("ppo_prompts"))),
        ("Held-out prompts", count(ingest.get("heldout"))),
        ("Preference pairs for the reward model", count(preferences.get("pairs"))),
        ("Ties dropped", count(preferences.get("ties_dropped"))),
        ("Preferences judged by", str(preferences.get("judge") or "the data set’s own pairs")),
        ("Model parameters", count(base.get("parameters"))),
        ("Vocabulary, tokens", count(base.get("vocabulary"))),
        ("Context, tokens", count(base.get("context"))),
    ]
    if run.has_judge:
        facts.insert(12, ("Annotators agree with the gold score", percent(preferences.get("annotator_agreement"))))
    return _shown(facts)


def _prompts(run: Run) -> str:
    return count(run.evaluation.get("prompts", len(run.samples)))


def _line(e: Row, name: str, unit: str, sft: str, policy: str, digits: int = 2) -> Line:
    before, after = finite(e.get(sft)), finite(e.get(policy))
    moved = "" if before is None or after is None else number(after - before, digits, sign=True)
    return Line(name, unit, number(before, digits), number(after, digits), moved)


def _shares(e: Row, name: str, unit: str, sft: str, policy: str) -> Line:
    before, after = finite(e.get(sft)), finite(e.get(policy))
    moved = "" if before is None or after is None else points(after - before)
    return Line(name, unit, percent(before), percent(after), moved)


def _sample(run: Run, index: int) -> Sample:
    row = run.samples[index]
    kind = "gold" if run.has_judge else "reward"
    scored = {model: finite(row.get(f"{kind}_{model}")) for model in ("sft", "policy")}
    return Sample(index + 1, row["prompt"], [_answer(run, row, model, scored) for model in ("sft", "policy")])


def _answer(run: Run, row: Row, model: str, scored: dict[str, float | None]) -> Answer:
    facts = [("gold", number(row.get(f"gold_{model}")))] if run.has_judge else []
    facts += [("reward model", number(row.get(f"reward_{model}"))), ("tokens", count(row.get(f"{model}_tokens")))]
    if model == "policy":
        facts.append(("KL, nats", number(row.get("kl"))))
    mine, other = scored[model], scored["policy" if model == "sft" else "sft"]
    preferred = mine is not None and other is not None and mine - other > TIE
    return Answer(model, row[model], bool(row.get(f"{model}_ended", True)), facts, preferred)


def _shown(facts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in facts if value != MISSING]


def _flat(block: Row, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _value(f"{prefix}{key}", value)


def _value(name: str, value: Any) -> str:
    if is_secret(name):
        return HIDDEN
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
