"""Inputs as the stages before `report` write them, small but with everything that breaks pages: right-to-left text,
emoji, markup, very long words, empty answers, missing cells."""

import csv
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.page.figures import draw
from tasks.page.inputs import Run, read_run
from tasks.page.picture import Picture

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


def _metrics(judge: bool) -> dict[str, dict[str, Any]]:
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
            "heldout_accuracy_ci95": [0.8211, 0.8705],
            "heldout_loss": 0.3456,
            "heldout_pairs": 678,
            "train_accuracy": 0.8811,
            "expected_calibration_error": 0.0213,
            "length_correlation": 0.31,
            "score_mean": 0.11,
            "score_std": 1.52,
            "gold_correlation": 0.842 if judge else None,
        },
        "ppo": {
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
        "evaluate": {
            "judge": "simulated annotators (demo rubric)" if judge else None,
            "win_rate_judge": "gold rubric (simulated)" if judge else "reward model",
            "prompts": 400,
            "gold_sft": 1.7123 if judge else None,
            "gold_policy": 4.0456 if judge else None,
            "reward_sft": -0.2013,
            "reward_policy": 2.1377,
            "win_rate": 0.8825,
            "win_rate_ci95": [0.85, 0.9125],
            "ties": 3,
            "kl_per_sequence": 4.2177,
            "kl_k3_per_sequence": 4.3021,
            "response_tokens_sft": 21.37,
            "response_tokens_policy": 33.91,
            "missing_eos_share": 0.0025,
            "missing_eos_share_sft": 0.0175,
            "distinct_1_sft": 0.1234,
            "distinct_2_sft": 0.4567,
            "distinct_1_policy": 0.1011,
            "distinct_2_policy": 0.3999,
            "heldout_loss_sft": 1.2341,
            "heldout_loss_policy": 1.4562,
            "alignment_tax": 0.2221,
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
                "kl": kl,
                "kl_k3": kl * 1.03 + draw.gauss(0, 0.05),
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
    return {"sft": sft, "reward": reward, "reward_calibration": bins, "ppo": _ppo_rows(judge)}


def write_inputs(root: Path, judge: bool = True) -> list[dict[str, Any]]:
    """Write metrics/, plots/ and params.yaml under `root`; return the rows of the samples."""
    for folder in ("metrics", "plots"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for stage, content in _metrics(judge).items():
        (root / "metrics" / f"{stage}.json").write_text(json.dumps(content), encoding="utf-8")
    for name, rows in _curves(judge).items():
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
        drawn[judge] = draw(read_run(write_inputs(root, judge), root))
    return drawn


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """`make_run(judge=True)`: the inputs, written and read again. They stay under `tmp_path`."""
    return lambda judge=True: read_run(write_inputs(tmp_path, judge), tmp_path)
