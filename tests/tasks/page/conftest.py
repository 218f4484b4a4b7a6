"""Small inputs of the report with right-to-left text, emoji, markup, very long words, empty answers, missing cells."""

import csv
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.evaluation.intervals import bounds
from tasks.page.canvas import Picture
from tasks.page.figures import draw
from tasks.page.inputs import Run, read_run

PARAMS = """\
threads: 2
seed: 1
runtime:
  tracking: true
  progress_seconds: 5.0
ingest: {source: demo, seed: 1, split: {demonstrations: 0.5, heldout: 0.1}}
base: {source: scratch, scratch: {vocabulary: 1024, context: 128, layers: 4}, pad_token: <|pad|>}
ppo: {steps: 60, learning_rate: 1e-4, kl: {coef: 0.05, controller: adaptive}, optimizer: {betas: [0.9, 0.95]}}
evaluate: {prompts: 40, bootstrap: 2000}
report: {samples: 20}
"""

ODD = [
    ("<script>alert('x')</script> & <b>bold</b>", "</p></article><script>document.title='owned'</script>"),
    ("ما هي بعض خيارات الإفطار الصحية لمرضى السكري؟", "جرّب الشوفان مع المكسرات، لأنها ترفع السكر ببطء."),
    ("מה כדאי לאכול לארוחת בוקר?", "יוגורט עם פירות יער, כי יש בו מעט סוכר (5%)."),
    ("Emoji only? 🥑🍳👩‍🍳", "🥗🥚 eggs with greens 👍🏽"),
    ("W" + "o" * 300 + "rd", "https://example.org/" + "a" * 400),
    ("Nothing to say?", ""),
    (
        "A form feed, a zero and half a surrogate?",
        "\x0c\x00\ud83d and {{ 7 * 7 }} and $x_1$ and “quotes” 'single' \"double\"",
    ),
    ("Lines?", "First:\n\n  1. oats\n  2. eggs\n\tand a tab"),
]
TOPICS = [
    "a healthy breakfast for someone with diabetes",
    "a quiet weekend in the city",
    "a first run after years",
    "learning to sleep earlier",
    "a packed lunch that keeps",
    "a small balcony garden",
]
GOOD = [
    "You could try steel-cut oats with nuts, because the fibre slows the sugar down.",
    "Start with ten minutes a day, since a habit that is small survives a bad week. Then add two minutes each Sunday.",
    "Choose herbs such as thyme and chives: they need little soil and forgive a missed watering.",
]
WEAK = [
    "I do not know, that is your own business.",
    "Eat something. Eat something. Eat something.",
    "There are many things and many people ask about many things and it always depends on many other things.",
]


def _samples(judge: bool, rows: int = 40) -> list[dict[str, Any]]:
    draw = random.Random(1)
    made = []
    for index in range(rows):
        prompt, policy = (
            ODD[index // 2]
            if index % 2 == 0 and index // 2 < len(ODD)
            else (f"What are good options for {TOPICS[index % 6]}?", GOOD[index % 3])
        )
        messages = [{"role": "user", "content": prompt}]
        if index == 7:
            messages = [{"role": "system", "content": "Be brief."}, *messages]
        gold = [round(draw.gauss(mean, 0.8), 4) for mean in (1.7, 4.0)]
        made.append(
            {
                "prompt_id": f"{index:016x}",
                "prompt": messages,
                "sft": WEAK[index % 3],
                "policy": policy,
                "sft_ended": index % 9 != 4,
                "policy_ended": True,
                "gold_sft": gold[0] if judge else None,
                "gold_policy": gold[1] if judge else None,
                "reward_sft": round(draw.gauss(-0.2, 1), 4),
                "reward_policy": round(draw.gauss(2.1, 0.7), 4),
                "kl": round(abs(draw.gauss(4, 2)), 4),
                "sft_tokens": draw.randrange(8, 40),
                "policy_tokens": draw.randrange(20, 50),
            }
        )
    return made


LEVELS = {
    # name: gold, proxy, KL, length, samples generated, tokens trained
    "sft": (1.7123, -0.2013, 0.0, 21.37, 0, 0),
    "policy": (4.0456, 2.1377, 4.2177, 33.91, 7680, 521472),
    "best_of_1": (1.7011, -0.2100, 0.0, 21.30, 1, 0),
    "best_of_4": (3.1009, 1.2071, 0.6363, 27.20, 4, 0),
    "best_of_16": (3.9876, 2.0102, 1.8351, 31.02, 16, 0),
    "rejection_sft": (2.8004, 0.9130, 0.9514, 26.44, 6400, 44800),
    "dpo": (3.6021, 1.7345, 3.3303, 35.80, 0, 155200),
    "rloo": (4.1102, 2.0718, 4.0159, 32.71, 7680, 501760),
}
GAPS = {"best_of_1": 0.0, "best_of_4": -0.4, "best_of_16": -0.03, "rejection_sft": 0.5, "dpo": 0.3, "rloo": -0.05}
BETWEEN = {
    "best_of_1": ["sft", "sft"],
    "best_of_4": ["step 20", "step 25"],
    "best_of_16": ["step 35", "eta 0.65"],
    "rejection_sft": ["step 25", "step 35"],
    "dpo": ["eta 0.65", "policy"],
    "rloo": ["policy", "policy"],
}
"""The vertices on both sides of each model's KL."""
ALTERNATIVES = [name for name in LEVELS if name not in ("sft", "policy")]


def _ends(value: float, half: float) -> list[float]:
    return [round(value - half, 4), round(value + half, 4)]


WITH_ENDS = (*("response_tokens", "missing_eos_share", "ties", "heldout_loss", "alignment_tax"),)


def _figures(name: str, judge: bool, several: bool) -> dict[str, Any]:
    row = _means(name, judge, several)
    for key in WITH_ENDS:
        row |= bounds(key, None if row[key] is None else _ends(row[key], 0.002))
    return row


def _means(name: str, judge: bool, several: bool) -> dict[str, Any]:
    gold, reward, kl, tokens, samples, trained = LEVELS[name]
    rate = _rate(name)
    against = round(0.5 + 0.16 * (gold - 4.0456), 4)
    sft, policy, best = name == "sft", name == "policy", name.startswith("best_of")
    return {
        "answers": 1200 if several else 400,
        "gold": gold if judge else None,
        **bounds("gold", _ends(gold, 0.11) if judge else None),
        "gold_spread": 0.0312 if judge and several else None,
        "reward": reward,
        **bounds("reward", _ends(reward, 0.07)),
        "reward_spread": 0.0214 if several else None,
        "win_rate": None if sft else 0.8825 if policy else rate,
        **bounds("win_rate", None if sft else [0.85, 0.9125] if policy else _ends(rate, 0.03)),
        "win_rate_spread": None if sft or not several else 0.011,
        "ties": None if sft else 0.0075,
        "win_rate_controlled": None if sft else round(rate - 0.03, 4),
        **bounds("win_rate_controlled", None if sft else _ends(rate - 0.03, 0.04)),
        "win_rate_vs_policy": None if policy else against,
        **bounds("win_rate_vs_policy", None if policy else _ends(against, 0.028)),
        "gold_minus_policy": None if policy or not judge else round(gold - 4.0456, 4),
        **bounds("gold_minus_policy", None if policy or not judge else _ends(gold - 4.0456, 0.09)),
        "kl": kl,
        **bounds("kl", None if sft or best else _ends(kl, 0.2)),
        "optimum_share": None if kl == 0 else round((reward + 0.2013) / (1.9 * kl**0.5), 4),
        "response_tokens": tokens,
        "missing_eos_share": 0.0025,
        "distinct_2": 0.4567 if sft else round(0.45 - 0.012 * kl, 4),
        "heldout_loss": None if best else 1.2341 + 0.05 * kl,
        "alignment_tax": None if best else round(0.05 * kl, 4),
        "samples_generated": 0 if best else samples,
        "samples_per_answer": samples if best else 1,
        "tokens_trained": trained,
    }


def _rate(name: str) -> float:
    return round(0.5 + 0.16 * (LEVELS[name][0] - 1.7123), 4)


def _comparison(judge: bool, alternatives: bool, several: bool, pairs: bool) -> dict[str, Any]:
    names = [name for name in LEVELS if alternatives or name in ("sft", "policy")]
    gaps = {
        name: {
            "kl": LEVELS[name][2],
            "gold": LEVELS[name][0] if judge else None,
            "reward": LEVELS[name][1],
            "policy_gold": LEVELS[name][0] - 0.4 if judge else None,
            "policy_reward": LEVELS[name][1] + 0.2,
            "gold_gap": GAPS[name] if judge else None,
            **bounds("gold_gap", _ends(GAPS[name], 0.1) if judge else None),
            "reward_gap": GAPS[name],
            **bounds("reward_gap", _ends(GAPS[name], 0.1)),
            "win_rate": _rate(name),
            "policy_win_rate": _rate(name) + GAPS[name] / 4,
            "win_rate_gap": GAPS[name] / 4,
            **bounds("win_rate_gap", _ends(GAPS[name] / 4, 0.03)),
            "between": BETWEEN[name],
        }
        for name in names
        if name not in ("sft", "policy")
    }
    return {
        "seeds": [1, 2, 3] if several else [1],
        "bootstrap": 2000,
        "models": {name: _figures(name, judge, several) for name in names},
        "frontier": gaps,
        "optimum": [
            {
                "beta": 1 / root,
                "kl": root * root,
                "reward": -0.2013 + 1.9 * root,
                "gold": 1.7 + root if judge else None,
                "effective_samples": 12.0 - root,
            }
            for root in (0.5, 1.0, 1.5, 2.0)
        ],
        "stopping": _stopping(judge, pairs),
        "judge_checks": {
            "judge": "simulated annotators (gold rubric)",
            "position_bias": 0.0,
            "self_agreement": 0.985,
            "win_rate": 0.88,
            "pairs": 1200,
        }
        if judge
        else None,
        "reward_model": {
            "sft": {
                "agreement": 0.851,
                **bounds("agreement", [0.832, 0.869]),
                "correlation": 0.84,
                "agreement_at_policy_margins": 0.79,
            },
            "policy": {"agreement": 0.702, **bounds("agreement", [0.673, 0.731]), "correlation": 0.55},
        }
        if judge
        else {"sft": None, "policy": None},
    }


def _stopping(judge: bool, pairs: bool) -> dict[str, Any] | None:
    if not judge and not pairs:
        return None
    difference = 0.012 if pairs else 0.05
    return {
        "best_step": 50,
        "last_step": 60,
        "score": "win_rate" if pairs else "gold",
        "difference": difference,
        **bounds("difference", _ends(difference, 0.02 if pairs else 0.06)),
    }


def _frontier(judge: bool, alternatives: bool) -> list[dict[str, Any]]:
    """Snapshots whose gold score falls at the end, best-of-n, and the other models."""
    points: list[tuple[str, float, float, float, float]] = [("sft", 0, 0.0, 1.7123, -0.2013)]
    for step in range(5, 65, 5):
        root = 2.05 * step / 60
        gold = 1.7123 + root * (1.5 - 0.35 * math.log(root)) - 0.004 * max(0, step - 45) ** 1.5
        points.append(("ppo", step, root * root, gold, -0.2 + root * (1.3 - 0.22 * math.log(root))))
    points.append(("interpolated", 0.65, 2.5, 3.9, 1.9))
    for name in ALTERNATIVES if alternatives else []:
        gold, reward, kl = LEVELS[name][:3]
        best = name.startswith("best_of")
        points.append(("best_of_n" if best else name, int(name.split("_")[-1]) if best else 0, kl, gold, reward))
    return [
        {
            "family": family,
            "point": point,
            "kl": kl,
            "sqrt_kl": math.sqrt(kl),
            "gold": gold if judge else "",
            "gold_low": gold - 0.1 if judge else "",
            "gold_high": gold + 0.1 if judge else "",
            "reward": reward,
            "reward_low": reward - 0.07,
            "reward_high": reward + 0.07,
            "win_rate": "" if family == "sft" else 0.5 + 0.16 * (gold - 1.7123),
            "win_rate_low": "" if family == "sft" else 0.47 + 0.16 * (gold - 1.7123),
            "win_rate_high": "" if family == "sft" else 0.53 + 0.16 * (gold - 1.7123),
        }
        for family, point, kl, gold, reward in points
    ]


def write_answers(judge: bool, alternatives: bool = True, several: bool = True) -> list[dict[str, Any]]:
    """Rows of data/evaluate/answers.jsonl: the other models' answers to the prompts of the samples."""
    rows = []
    for seed in (1, 2, 3) if several else (1,):
        names = LEVELS if alternatives else ("sft", "policy")
        for name in [name for name in names if seed == 1 or not name.startswith("best_of")]:
            for index, sample in enumerate(_samples(judge)):
                odd = index % 7 == 0
                rows.append(
                    {
                        "model": name,
                        "seed": None if name.startswith("best_of") else seed,
                        "prompt_id": sample["prompt_id"],
                        "prompt": sample["prompt"],
                        "response": ODD[index % len(ODD)][1] if odd else f"{GOOD[index % 3]} ({name}, {seed})",
                        "ended": index % 11 != 3,
                        "tokens": 20 + index % 9,
                        "reward": 1.25,
                        "gold": 3.5 if judge else None,
                        "kl": None if name.startswith("best_of") else 2.5,
                    }
                )
    return rows


def _metrics(judge: bool, pairs: bool) -> dict[str, dict[str, Any]]:
    return {
        "ingest": {
            "source": "demo" if judge else "files",
            "rows_read": 4321,
            "rows_used": 4298,
            "dropped": {"duplicate": 17, "empty": 4, "same_chosen_rejected": 0, "too_long": 2, "leaked": 0},
            "demonstrations": 1800,
            "pairs": 0 if judge else 900,
            "preference_prompts": 1200,
            "ppo_prompts": 800,
            "heldout": 400,
        },
        "base": {"parameters": 1049600, "vocabulary": 1024, "context": 128, "train_loss": None, "steps": 0},
        "sft": {
            "train_loss": 1.1,
            "validation_loss": 1.234,
            "validation_perplexity": 3.43,
            "base_validation_loss": 6.9,
            "best_step": 250,
            "steps": 300,
            "tokens": 700000,
        },
        "preferences": {
            "prompts": 1200,
            "samples": 4800,
            "pairs": 6789,
            "ties_dropped": 411,
            "missing_eos_share": 0.004,
            "mean_response_tokens": 22.4,
            "annotator_agreement": 0.913 if judge else None,
            "judge": "simulated annotators (demo rubric)" if judge else None,
        },
        "reward": {
            "heldout_accuracy": 0.8472,
            **bounds("heldout_accuracy", [0.8211, 0.8705]),
            "heldout_loss": 0.3456,
            "heldout_pairs": 678,
            "train_accuracy": 0.8811,
            "expected_calibration_error": 0.0213,
            "margin_by": "gold" if judge else "reward",
        },
        "ppo": {
            "length_correlation": 0.31,
            "score_mean": 0.11,
            "score_std": 1.52,
            "gold_correlation": 0.842 if judge else None,
            "steps": 60,
            "reward_first": 0.1,
            "reward_last": 2.2,
            "gold_first": 1.7 if judge else None,
            "gold_last": 4.1 if judge else None,
            "kl_last": 4.2,
            "entropy_last": 0.8,
            "kl_coef_last": 0.06,
            "missing_eos_share_last": 0.0,
            "explained_variance_last": 0.62,
            "optimizer_steps": 360,
        },
        "select": {
            "rule": "last",
            "step": 60,
            "last_step": 60,
            "best_judge_step": 50 if judge or pairs else None,
            "best_proxy_step": 60,
            "prompts": 120,
        },
        "evaluate": {
            "judge": "simulated annotators (demo rubric)" if judge else None,
            "win_rate_judge": "judge model critic" if pairs else "gold rubric (simulated)" if judge else "reward model",
            "judged_by": "pairs" if pairs else "scores" if judge else "reward model",
            "prompts": 400,
            "gold_sft": 1.7123 if judge else None,
            "gold_policy": 4.0456 if judge else None,
            "win_rate": 0.8825,
            **bounds("win_rate", [0.85, 0.9125]),
            "response_tokens_sft": 21.37,
        },
    }


def _ppo_rows(judge: bool) -> list[dict[str, Any]]:
    draw = random.Random(2)
    rows = []
    for step in range(1, 61):
        done = 1 - math.exp(-step / 18)
        kl = 4.4 * done + draw.gauss(0, 0.12)
        score = 1.6 * done + draw.gauss(0, 0.07)
        rows.append(
            {
                "step": step,
                "reward_raw": 0.1 + 2.2 * done + draw.gauss(0, 0.1),
                "reward": score,
                "score": score,
                "reward_shaped": score - 0.05 * kl,
                "gold": 1.7 + 2.4 * done + draw.gauss(0, 0.1) if judge else "",
                "kl_k1": kl,
                "kl": kl + draw.gauss(0, 0.05),
                "entropy": 1.9 - 1.1 * done + draw.gauss(0, 0.02),
                "clip_fraction": 0.05 + 0.1 * done + draw.gauss(0, 0.01),
                "value_clip_fraction": 0.2 * (1 - done) + draw.random() * 0.02,
                "explained_variance": "nan" if step == 1 else -0.3 + done + draw.gauss(0, 0.03),
                "response_tokens_mean": 21 + 12 * done + draw.gauss(0, 0.4),
                "response_tokens_max": 64 if step < 9 else 50 + draw.randrange(9),
                "missing_eos_share": max(0, 0.02 - 0.0005 * step),
                "kl_coef": 0.05 * (1 + step / 300),
            }
        )
    return rows


def _curves(judge: bool) -> dict[str, list[dict[str, Any]]]:
    draw = random.Random(3)
    sft = [
        {
            "step": step,
            "train_loss": 1.1 + 4 * math.exp(-step / 40) + draw.gauss(0, 0.03),
            "validation_loss": 1.23 + 4 * math.exp(-step / 40) if step % 50 == 0 else "",
        }
        for step in range(1, 301)
    ]
    reward = [
        {
            "step": step,
            "loss": 0.35 + 0.35 * math.exp(-step / 30) + draw.gauss(0, 0.03),
            "accuracy": 0.88 - 0.36 * math.exp(-step / 30) + draw.gauss(0, 0.03),
        }
        for step in range(1, 151)
    ]
    bins = [
        {
            "bin_low": low,
            "bin_high": low + 0.05,
            "predicted": low + 0.025 if low < 0.95 else "",
            "observed": low + 0.025 + draw.gauss(0, 0.02) if low < 0.95 else "",
            "pairs": round(200 * low - 60) if low < 0.95 else 0,
        }
        for low in (0.5 + 0.05 * place for place in range(10))
    ]
    margins = [
        {
            "low": low,
            "high": low + 1.5,
            "accuracy": 0.6 + 0.09 * low,
            "accuracy_low": 0.57 + 0.09 * low,
            "accuracy_high": 0.63 + 0.09 * low,
            "pairs": 200 - 20 * int(low),
        }
        for low in (0.0, 1.5, 3.0)
    ]
    curves = {"sft": sft, "reward": reward, "reward_calibration": bins, "reward_margins": margins}
    return curves | {"ppo": _ppo_rows(judge)}


def write_inputs(
    root: Path, judge: bool = True, alternatives: bool = True, several: bool = True, pairs: bool = False
) -> list[dict[str, Any]]:
    """Write metrics/, plots/ and params.yaml under `root`; return the rows of the samples."""
    for folder in ("metrics", "plots"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    metrics = _metrics(judge, pairs)
    metrics["evaluate"] |= _comparison(judge, alternatives, several, pairs)
    for stage, content in metrics.items():
        (root / "metrics" / f"{stage}.json").write_text(json.dumps(content), encoding="utf-8")
    for name, rows in (_curves(judge) | {"frontier": _frontier(judge, alternatives)}).items():
        with (root / "plots" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
    (root / "params.yaml").write_text(PARAMS, encoding="utf-8")
    return _samples(judge)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Picture]]:
    """The pictures of `make_run(judge)`, by judge: drawn once, as drawing takes seconds."""
    drawn = {}
    for judge in (True, False):
        root = tmp_path_factory.mktemp("run")
        drawn[judge] = draw(read_run(write_inputs(root, judge), write_answers(judge), root))
    return drawn


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """`make_run(judge=True, alternatives=True, several=True, pairs=False)`: the inputs, written and read again. They
    stay under `tmp_path`. Without `alternatives` there are only SFT and policy; without `several` one sampling seed;
    with `pairs` (and without `judge`) a judge compares pairs and gives no scores."""

    def make(judge: bool = True, alternatives: bool = True, several: bool = True, pairs: bool = False) -> Run:
        samples = write_inputs(tmp_path, judge, alternatives, several, pairs)
        return read_run(samples, write_answers(judge, alternatives, several), tmp_path)

    return make
