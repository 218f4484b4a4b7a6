"""Renders the report page: its tables and the HTML document."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tasks.page.canvas import Picture, colour_of
from tasks.page.comparison_table import COST, Cell, Column, cells, columns_of, label
from tasks.page.inputs import Row, Run, finite, interval
from tasks.page.samples import all_samples, exploited, filters, fitting, orders
from tasks.page.verdicts import alternatives, doubts, findings
from tasks.page.wording import MISSING, count, number, percent, percent_interval, points
from tasks.params.secrets import HIDDEN, is_secret

HERE = Path(__file__).parent
NOT_PROMISED = "not promised, because of deterministic: false"
NAMED = 12
"""Annotators that are named at most."""
WORDS = {
    "SFT": "The model after supervised fine-tuning on demonstrations. PPO starts from it, and is compared with it.",
    "Nat": "The unit of KL, entropy and loss with natural logarithms: 1 nat is 1.44 bits.",
    "Best of n": "SFT answers n times, and the answer with the highest proxy score is given.",
    "At equal KL": "PPO’s frontier at the KL of the other model, less that model’s score. More KL buys more score, so "
    "only this compares two models that are as far from SFT.",
}
"""For the glossary, before the columns of the tables."""
MANY = 0.2
"""The share of answers that are cut off, or of rows that do not fit, above which a note says so."""


def render(run: Run, pictures: list[Picture], samples: int, inputs: Mapping[str, str]) -> str:
    """The page as one self-contained HTML document. `samples`: how many are shown at a time; `inputs`: path
    and content hash of the inputs."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (HERE / "samples.js").read_text(encoding="utf-8")
    shown, left_out = fitting(all_samples(run))
    columns, rows = comparison(run)
    return (
        environment.get_template("template.html.j2").render(
            run=run,
            findings=findings(run),
            alternatives=alternatives(run),
            doubts=doubts(run),
            columns=columns,
            comparison=rows,
            cost=COST,
            words=WORDS | {column.name: column.meaning for column in columns if column.meaning},
            exploited=exploited(run) if run.has_judge else [],
            disagreeing=sum("disagree" in sample.tags and "sft" in sample.tags for sample in all_samples(run)),
            notes=notes(run),
            pictures={picture.name: picture for picture in pictures},
            embed=embed,
            colour=colour_of,
            called=lambda model: label(model, run.models),
            sampling=run.params.get("evaluate") or {},
            judge=str(run.evaluation.get("judge") or run.judge),
            by_reward_model=percent(run.evaluation.get("win_rate_by_reward_model")),
            reward_facts=reward_facts(run),
            samples=shown,
            at_once=samples,
            filters=filters(run),
            orders=orders(run),
            left_out=left_out,
            script=Markup(script),
            script_hash=script_hash(script),
            prompts=count(run.evaluation["prompts"]),
            parameters=parameters(run.params),
            made_from=made_from(run, inputs),
        )
        + "\n"
    )


def script_hash(script: str) -> str:
    """The source expression that lets the page's Content-Security-Policy run this script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def write_page(page: str, path: Path) -> None:
    """Write the page as UTF-8. Lone surrogates, which JSON allows and UTF-8 does not, become question marks."""
    path.write_bytes(page.encode("utf-8", errors="replace"))


def embed(picture: Picture) -> str:
    """The picture as a data URI."""
    return "data:image/png;base64," + base64.b64encode(picture.png).decode("ascii")


def comparison(run: Run) -> tuple[list[Column], list[tuple[str, str, list[Cell]]]]:
    """The columns, and for each model its name in the files, its label, and its cells."""
    columns = columns_of(run.models)
    by_column = [cells(run.models, column) for column in columns]
    return columns, [(name, label(name, run.models), [column[name] for column in by_column]) for name in run.models]


def notes(run: Run) -> list[str]:
    """Notes below the tables of models: what varies in the intervals, and what the reader should not overlook."""
    e = run.evaluation
    plain = (run.params.get("base") or {}).get("format") == "text"  # its answers need no end
    texts = []
    if (run.params.get("sft") or {}).get("enabled") is False:
        texts.append("sft.enabled is false: SFT is the base model as it is, and PPO starts from it.")
    texts.append(
        f"Small figures are 95% bootstrap intervals over the prompts ({count(e.get('bootstrap'))} resamples), paired "
        "by prompt where two models are compared. How much another training seed would change is not in them."
    )
    if any(one and finite(one.get("kl")) for one in (e.get("frontier") or {}).values()):
        texts.append("In the intervals at equal KL both scores and both KLs vary with the prompts.")
    if run.scorer:
        texts.append(f"The models were trained or picked by the score of the {run.scorer}.")
    checks = e.get("judge_checks") or {}
    if finite(checks.get("self_agreement")) is not None:
        unread = f"; {count(checks['unread'])} pairs without a verdict that can be read" if checks.get("unread") else ""
        texts.append(
            f"In both orders {checks.get('judge')} gave the same verdict for {percent(checks['self_agreement'])} of "
            f"{count(checks.get('pairs'))} pairs; position bias {points(checks.get('position_bias'))}{unread}."
        )
    cut = finite(e.get("missing_eos_share_sft"))
    if cut is not None and cut > MANY and not plain:
        texts.append(f"{percent(cut)} of SFT’s answers are cut off at the limit (evaluate.max_new_tokens).")
    dropped, pairs = run.metrics["reward"].get("pairs_too_long"), run.metrics["preferences"].get("pairs")
    if dropped and pairs and dropped > MANY * pairs:
        texts.append(f"{count(dropped)} of {count(pairs)} pairs were too long for reward.max_tokens and were dropped.")
    if len(e["seeds"]) > 1:
        spread, varies = finite(run.models["policy"].get(f"{run.score}_spread")), ""
        if spread:
            rates = run.score == "win_rate"
            size = f"{number(100 * spread, 1)} points" if rates else number(spread)
            varies = f"; over them the policy’s {'win rate' if rates else 'mean score'} varies by {size} (sd)"
        listed = ", ".join(map(str, e["seeds"]))
        texts.append(f"Each model answered each prompt with {len(e['seeds'])} sampling seeds ({listed}){varies}.")
    return texts


def reward_facts(run: Run) -> list[tuple[str, str]]:
    """The table beside the pictures of the reward model; empty without one."""
    if not run.has_reward_model:
        return []
    r, preferences, settings = run.metrics["reward"], run.metrics["preferences"], run.params.get("reward") or {}

    def share(figures: Row, key: str) -> str:
        known = finite(figures.get(key)) is not None
        return f"{percent(figures[key])} ({percent_interval(interval(figures, key))})" if known else MISSING

    def correlated(key: str) -> str:
        value, ends = finite(r.get(key)), interval(r, key)
        return MISSING if value is None or ends is None else f"{number(value)} ({number(ends[0])} to {number(ends[1])})"

    facts = [("Labels", whose_labels(run))]
    if labelled := preferences.get("judge_model"):
        known = labelled.get("agreement") or {"with": "people"}
        agreement = share(known, "share")
        facts += [
            (
                f"The labelling model’s agreement with {known['with']} (95% interval)",
                "unknown" if agreement == MISSING else agreement,
            ),
            ("Its verdicts that change with the order (ties)", percent(labelled.get("tie_share"))),
            ("Its replies that cannot be read", count(labelled.get("unread"))),
        ]
    facts += [
        ("Held-out accuracy (95% interval)", share(r, "heldout_accuracy")),
        ("The longer answer wins, on the same pairs", share(r, "length_accuracy")),
        ("A bag of words, on the same pairs", share(r, "words_accuracy")),
        ("Held-out pairs", count(r.get("heldout_pairs"))),
        ("Expected calibration error", number(r.get("expected_calibration_error"), 3)),
    ]
    members = [r.get(f"member_{number}_accuracy") for number in range(1, 1 + int(settings.get("members", 1)))]
    if accuracies := [value for value in members if value is not None]:
        rule = str(settings.get("combine", "mean"))
        if rule == "mean_minus_std":
            rule = f"mean less {number(settings.get('std_coef', 1.0))} standard deviations"
        facts += [
            ("Members, and how they are combined", f"{len(accuracies)}, {rule}"),
            ("Members’ held-out accuracy", ", ".join(percent(value) for value in accuracies)),
            ("Members’ disagreement on held-out answers", number(r.get("disagreement"))),
        ]
    facts += [
        ("Judging reward model, held-out accuracy", share(r, "judge_accuracy")),
        *(
            (f"Rank correlation of ratings with {whose} (95% interval)", correlated(f"{name}_rating_spearman"))
            for name, whose in {
                "reward": "the reward model’s scores",
                "length": "length",
                "words": "a bag of words",
            }.items()
        ),
        ("Correlation with length", number(run.metrics["ppo"].get("length_correlation"))),
    ]
    if run.has_judge:
        checks = run.evaluation.get("reward_model") or {}
        sft, policy = checks.get("sft") or {}, checks.get("policy") or {}
        facts += [
            ("Correlation with the gold score", number(run.metrics["ppo"].get("gold_correlation"))),
            ("Pairs ordered as the gold score does", percent(r.get("gold_agreement"))),
            ("Labels that agree with the gold score", percent(r.get("gold_label_agreement"))),
            ("Agreement with the judge on SFT’s answers", share(sft, "agreement")),
            ("Agreement with the judge on the policy’s answers", share(policy, "agreement")),
            ("SFT’s, at the margins of the policy’s answers", percent(sft.get("agreement_at_policy_margins"))),
        ]
    return [(name, value) for name, value in facts if value != MISSING]


def whose_labels(run: Run) -> str:
    """Who judged the reward model's pairs: people with their pairs and Krippendorff's alpha, a judge, the data set; or
    that it rated answers."""
    preferences = run.metrics["preferences"]
    if rated := run.metrics["reward"].get("train_ratings"):
        return f"the data set’s own ratings of {count(rated)} answers"
    judge, found = preferences.get("judge"), dict(preferences.get("labels_by") or {})
    rest = int(preferences.get("pairs") or 0) - sum(found.values())
    own = found.pop("", 0)
    if not found and not (own and judge):
        return str(judge or "the data set’s own pairs")
    named = [(str(judge), rest), *found.items(), ("the data set’s own pairs", own)]
    shown = [f"{name} {count(n)}" for name, n in named if n > 0]
    more = f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    alpha = finite((run.metrics["ingest"].get("labels") or {}).get("alpha"))
    agreement = "" if alpha is None else f"; Krippendorff’s α {number(alpha)}"
    return f"{', '.join(shown[:NAMED])}{more}{agreement}"


def made_from(run: Run, inputs: Mapping[str, str]) -> list[tuple[str, str]]:
    """Hashes of the parameters and of the data and metrics behind the page; runs with equal hashes are equal."""
    text = json.dumps(run.params, sort_keys=True, ensure_ascii=False, default=str)
    parameters = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    files = [(path, digest) for path, digest in sorted(inputs.items()) if path.startswith(("data/", "metrics/"))]
    exempt = [("Equal bytes", NOT_PROMISED)] if run.params.get("deterministic") is False else []
    return [("params.yaml without runtime, SHA-256", parameters[:16]), *files, *exempt]


def parameters(params: Row) -> list[tuple[str, list[tuple[str, str]]]]:
    """Dotted keys and values by block; first `common`, the keys outside blocks."""
    common = [(key, _value(key, value)) for key, value in params.items() if not isinstance(value, dict)]
    blocks = [(key, list(_flat(value))) for key, value in params.items() if isinstance(value, dict)]
    return [("common", common), *blocks] if common else blocks


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
