"""The page: the numbers of its tables, and the HTML. Every text of a user or model is escaped by jinja, or by
samples.py for the samples' JSON."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tasks.evaluation.comparison_table import Cell, Column, cells, columns_of, label, models_of
from tasks.page import samples as reading
from tasks.page.answer import findings, prompts
from tasks.page.canvas import colour_of
from tasks.page.inputs import Row, Run, finite, interval
from tasks.page.picture import Picture
from tasks.page.wording import MISSING, count, number, percent, percent_interval, points
from tasks.params.secrets import HIDDEN, is_secret

HERE = Path(__file__).parent
SECTIONS = ("answer", "comparison", "ppo", "reward", "sft")


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


def render(run: Run, pictures: list[Picture], samples: int, inputs: Mapping[str, str]) -> str:
    """The page as one HTML document with everything in it. `samples`: how many can be read without JavaScript;
    `inputs`: path and content hash of what the page is made from."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (HERE / "samples.js").read_text(encoding="utf-8")
    every = reading.all_samples(run)
    data, left_out = reading.embedded(run, every)
    sections = {name: [picture for picture in pictures if picture.section == name] for name in SECTIONS}
    columns, rows = comparison(run)
    return (
        environment.get_template("template.html.j2").render(
            run=run,
            findings=findings(run),
            columns=columns,
            comparison=rows,
            notes=notes(run),
            headline=headline(run),
            pictures=sections,
            embed=embed,
            colour=colour_of,
            called=label,
            judge=str(run.evaluation.get("judge") or run.judge),
            reward_facts=reward_facts(run),
            sft_facts=sft_facts(run),
            samples=reading.pick(every, samples),
            filters=reading.filters(run),
            orders=reading.orders(run),
            samples_data=data,
            left_out=left_out,
            script=Markup(script),
            script_hash=script_hash(script),
            prompts=prompts(run),
            rows=count(len(run.samples)),
            parameters=parameters(run.params),
            data=data_counts(run),
            made_from=made_from(run, inputs),
        )
        + "\n"
    )


def script_hash(script: str) -> str:
    """What the page's Content-Security-Policy allows to run: this text and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def write_page(page: str, path: Path) -> None:
    """Write the page as UTF-8. Half a surrogate pair, which JSON allows and UTF-8 does not, becomes a question mark."""
    path.write_bytes(page.encode("utf-8", errors="replace"))


def embed(picture: Picture) -> str:
    """The picture as a data URI."""
    return "data:image/png;base64," + base64.b64encode(picture.png).decode("ascii")


def comparison(run: Run) -> tuple[list[Column], list[tuple[str, str, list[Cell]]]]:
    """The columns, and a row a model: its name in the files, what it is called, and a cell a column."""
    models = models_of(run.evaluation)
    columns = columns_of(models)
    by_column = [cells(models, column) for column in columns]
    return columns, [(name, label(name), [column[name] for column in by_column]) for name in models]


def notes(run: Run) -> list[str]:
    """What one must know to read the comparison, a line each."""
    e = run.evaluation
    seeds = list(e.get("seeds") or [])
    told = [f"Judge: {e['win_rate_judge']}."]
    if "simulated" in str(e["win_rate_judge"]):
        told.append("The judge is simulated: no person has judged an answer.")
    told.append(
        f"Small figures are 95% bootstrap intervals over the prompts ({count(e.get('bootstrap'))} resamples), paired "
        "by prompt where two models are compared. How much another training seed would change is not in them."
    )
    if any(one and finite(one.get("kl")) for one in (e.get("frontier") or {}).values()):
        told.append("In the intervals at equal KL both scores and both KLs vary with the prompts.")
    told += reading_of(e, run.is_judged)
    if len(seeds) > 1:
        told.append(
            f"Each model answered each prompt with {len(seeds)} sampling seeds ({_listed(seeds)}){_varies(run)}."
        )
    return told


def _varies(run: Run) -> str:
    """By how much the policy's figure differs between sampling seeds."""
    spread = finite(models_of(run.evaluation).get("policy", {}).get(f"{run.score}_spread"))
    if not spread:
        return ""
    if run.score == "win_rate":
        return f"; over them the policy’s win rate varies by {number(100 * spread, 1)} points (sd)"
    return f"; over them the policy’s mean score varies by {number(spread)} (sd)"


def reading_of(evaluation: Row, judge: bool) -> list[str]:
    """How single columns are made, where they are there."""
    models = models_of(evaluation)
    shown = {column.key for column in columns_of(models)}
    told = []
    if "win_rate_controlled" in shown:
        told.append(
            "At equal length: the win rate for answers of equal length, by a logistic regression of the wins on the "
            "difference in length."
        )
    if "kl" in shown and any(name.startswith("best_of_") for name in models):
        told.append("The KL of best-of-n is its bound log n − (n−1)/n; the others’ is measured on their answers.")
    if judge:
        told.append("The proxy is the reward model’s score, which the models were trained or picked by.")
    checks = evaluation.get("judge_checks") or {}
    if finite(checks.get("self_agreement")) is not None:
        told.append(
            f"In both orders {checks.get('judge')} gave the same verdict for {percent(checks['self_agreement'])} of "
            f"{count(checks.get('pairs'))} pairs; position bias {points(checks.get('position_bias'))}."
        )
    return told


def headline(run: Run) -> list[Line]:
    """SFT against policy, a row a figure; a row without any number is left out."""
    e = run.evaluation
    ends = interval(e.get("win_rate_ci95"))
    rate = percent(e["win_rate"]) + ("" if ends is None else f" ({percent_interval(list(ends))})")
    lines = [Line("Win rate against SFT", f"judged by {run.judge}; 95% interval", "", rate, wide=True)]
    if e.get("ties") is not None:
        ties = (
            count(e["ties"]) if isinstance(e["ties"], int) else percent(e["ties"])
        )  # a count, before there were seeds
        why = "neither preferred over both orders" if run.judged_by == "pairs" else "both answers score the same"
        lines.append(Line("Ties", f"{why}; half a win each", "", ties, wide=True))
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
        facts += [
            ("Correlation with the gold score", number(r.get("gold_correlation"))),
            ("Pairs ordered as the gold score does", percent(r.get("gold_agreement"))),
            ("Labels that agree with the gold score", percent(r.get("gold_label_agreement"))),
            *agreement_facts(run.evaluation.get("reward_model") or {}),
        ]
    return _shown(facts)


def agreement_facts(checks: Row) -> list[tuple[str, str]]:
    """How often reward model and judge order two answers to a prompt alike, before and after PPO."""
    found = []
    for key, name in (("sft", "SFT’s answers"), ("policy", "the policy’s answers")):
        one = checks.get(key) or {}
        share = f"{percent(one.get('agreement'))} ({percent_interval(one.get('agreement_ci95'))})"
        found.append((f"Agreement with the judge on {name}", share if finite(one.get("agreement")) else MISSING))
    matched = percent((checks.get("sft") or {}).get("agreement_at_policy_margins"))
    return [*found, ("SFT’s, at the margins of the policy’s answers", matched)]


def made_from(run: Run, inputs: Mapping[str, str]) -> list[tuple[str, str]]:
    """The hash of the parameters that can change a result, and those of the files behind the figures, as dvc.lock has
    them: equal hashes are equal runs."""
    text = json.dumps(run.params, sort_keys=True, ensure_ascii=False, default=str)
    parameters = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    files = [(path, digest) for path, digest in sorted(inputs.items()) if path.startswith(("data/", "metrics/"))]
    return [("params.yaml without runtime, SHA-256", parameters[:16]), *files]


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


def _line(e: Row, name: str, unit: str, sft: str, policy: str, digits: int = 2) -> Line:
    before, after = finite(e.get(sft)), finite(e.get(policy))
    moved = "" if before is None or after is None else number(after - before, digits, sign=True)
    return Line(name, unit, number(before, digits), number(after, digits), moved)


def _shares(e: Row, name: str, unit: str, sft: str, policy: str) -> Line:
    before, after = finite(e.get(sft)), finite(e.get(policy))
    moved = "" if before is None or after is None else points(after - before)
    return Line(name, unit, percent(before), percent(after), moved)


def _listed(values: list[Any]) -> str:
    return ", ".join(map(str, values))


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
