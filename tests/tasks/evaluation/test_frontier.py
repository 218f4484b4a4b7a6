"""The frontier: PPO's snapshots as a curve, and other models at equal KL."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from rlhf_core.evaluation.divergence import Divergence
from rlhf_core.evaluation.intervals import bounds
from rlhf_core.evaluation.wins import wins
from tasks.evaluation.evaluator import Evaluator, ScoredAnswers
from tasks.evaluation.frontier import Frontier, between, chosen_snapshots, kl_by_step
from tasks.evaluation.results import Bootstrap, Results
from tasks.page.inputs import interval

PROMPTS = 50


class Judged:
    """An evaluator that compares gold scores."""

    judged_by = "scores"

    def compare(self, scored: ScoredAnswers, other: ScoredAnswers, by: None = None) -> list[float]:
        assert other.gold is not None
        assert scored.gold is not None
        return wins(other.gold, scored.gold)


EVALUATOR = cast(Evaluator, Judged())
BOOTSTRAP = Bootstrap(200, 1)


def answers(kl: float, gold: float, reward: float) -> Results:
    """The same difference between prompts for every model."""
    noise = [0.1 * (i % 7) - 0.3 for i in range(PROMPTS)]
    mean = sum(noise) / PROMPTS
    scores = [[value + n - mean for n in noise] for value in (reward, gold)]
    kls = [kl] * PROMPTS
    scored = ScoredAnswers(
        [[5]] * PROMPTS,
        [True] * PROMPTS,
        ["a"] * PROMPTS,
        scores[0],
        scores[1],
        [1] * PROMPTS,
        Divergence(kls, [9.0] * PROMPTS),
    )
    return Results.of([scored])


def figures(results: Results, kl: float | None) -> dict[str, object]:
    gold, rewards = results.table("gold"), results.table("rewards")
    assert gold is not None
    assert rewards is not None
    return {"kl": kl, "gold": gold.mean(), "reward": rewards.mean()}


def test_the_gap_at_equal_kl_has_its_sign() -> None:
    """PPO rises straight to 1 at 1 nat and 2 at 4 nats; best-of-4 is above, DPO below, GRPO beyond its end."""
    sft = answers(0.0, 0.0, 0.0)
    snapshots = {step: answers(d * d, d, 2 * d) for step, d in ((10, 1.0), (20, 2.0))}
    others = {"best_of_4": answers(0.5, 0.8, 1.0), "dpo": answers(2.5, 1.1, 3.0), "grpo": answers(9.0, 5.0, 5.0)}
    results = {"sft": sft, "policy": snapshots[20], **others}
    models = {name: figures(each, None if each is sft else kl_of(each)) for name, each in results.items()}
    found = Frontier(EVALUATOR, results, snapshots, models, BOOTSTRAP).figures()["frontier"]
    assert set(found) == set(others)
    assert found["best_of_4"]["policy_gold"] == pytest.approx(0.5)
    assert found["best_of_4"]["gold_gap"] == pytest.approx(-0.3)
    assert found["dpo"]["gold_gap"] == pytest.approx(0.4)
    assert interval(found["dpo"], "gold_gap") == pytest.approx((0.4, 0.4)), "paired: differences between prompts cancel"
    assert found["best_of_4"]["reward_gap"] == pytest.approx(0.0)
    assert (found["grpo"]["policy_gold"], found["grpo"]["gold_gap"], found["grpo"]["between"]) == (None, None, None)
    assert found["best_of_4"]["between"] == ["sft", "step 10"]
    assert found["dpo"]["between"] == ["step 10", "policy"]
    assert found["best_of_4"]["win_rate_gap"] == pytest.approx(-0.25), "a win everywhere, less half of one"


def test_the_uncertainty_of_a_measured_kl_is_in_the_interval() -> None:
    """DPO's KL differs from prompt to prompt, best-of-n's is known; both lie at 2.5 nats."""
    snapshots = {step: answers(d * d, d, 2 * d) for step, d in ((10, 1.0), (20, 2.0))}
    scored = answers(2.5, 1.1, 3.0).columns[0]
    spread = [2.5 + (1.5 if i % 2 else -1.5) for i in range(PROMPTS)]
    dpo = Results.of([replace(scored, divergence=Divergence(spread, spread))])
    best = Results.of([replace(scored, divergence=None)])
    results = {"sft": answers(0.0, 0.0, 0.0), "policy": snapshots[20], "best_of_8": best, "dpo": dpo}
    models = {name: figures(each, 2.5) for name, each in results.items()}
    found = Frontier(EVALUATOR, results, snapshots, models, BOOTSTRAP).figures()["frontier"]
    assert found["dpo"]["gold_gap"] == pytest.approx(found["best_of_8"]["gold_gap"])
    low, high = found["dpo"]["gold_gap_low"], found["dpo"]["gold_gap_high"]
    assert high - low > 0.1
    assert interval(found["best_of_8"], "gold_gap") == pytest.approx((0.4, 0.4))


def kl_of(results: Results) -> float:
    table = results.table("kl")
    assert table is not None
    return float(table.mean())


def test_the_frontier_is_a_majorant_and_no_curve_over_training_time() -> None:
    """Step 1 has a lower score than step 2 at more KL. At 2.5 nats a curve through the snapshots would be below 1."""
    sft, snapshots = answers(0.0, 0.0, 0.0), {1: answers(3.0, 0.5, 0.5), 2: answers(2.0, 2.0, 2.0)}
    snapshots[3] = answers(4.0, 3.0, 3.0)
    dpo = answers(2.5, 1.0, 1.0)
    results = {"sft": sft, "policy": snapshots[3], "dpo": dpo}
    models = {name: figures(each, kl_of(each)) for name, each in results.items()}
    frontier = Frontier(EVALUATOR, results, snapshots, models, BOOTSTRAP)
    found = frontier.figures()["frontier"]["dpo"]
    assert (found["policy_gold"], found["between"]) == (pytest.approx(2.25), ["step 2", "policy"])
    assert [point.name for point in frontier.curve] == ["sft", "step 1", "step 2", "policy"]
    assert between(5.0, frontier.curve, "gold") is None


def test_interpolated_policies_are_points_of_the_frontier() -> None:
    sft, policy = answers(0.0, 0.0, 0.0), answers(4.0, 2.0, 2.0)
    mixed = {0.65: answers(1.0, 1.5, 1.5), 0.3: answers(0.5, 0.1, 0.1)}
    results = {"sft": sft, "policy": policy, "dpo": answers(2.5, 1.0, 1.0)}
    models = {
        name: figures(each, kl_of(each)) | bounds("gold", None) | bounds("reward", None) | bounds("win_rate", None)
        | {"win_rate": 0.5, "samples_per_answer": 1}
        for name, each in results.items()
    }  # fmt: skip
    frontier = Frontier(EVALUATOR, results, {8: answers(3.0, 1.0, 1.0)}, models, BOOTSTRAP, mixed)
    found = frontier.figures()["frontier"]["dpo"]
    assert (found["policy_gold"], found["between"]) == (pytest.approx(1.75), ["eta 0.65", "policy"])
    rows = [(row["family"], row["point"], row["kl"]) for row in frontier.rows()]
    assert rows == [
        ("sft", 0, 0.0), ("policy", 0, 4.0), ("dpo", 0, 2.5), ("ppo", 8, 3.0), ("interpolated", 0.3, 0.5),
        ("interpolated", 0.65, 1.0),
    ], "the policy has a row of its own, because it is no snapshot"  # fmt: skip
    own = Frontier(EVALUATOR, results, {8: policy}, models, BOOTSTRAP, mixed).rows()
    assert [row["family"] for row in own] == ["sft", "dpo", "ppo", "interpolated", "interpolated"]


def test_snapshots_are_read_from_selects_table_without_its_interpolations(tmp_path: Path) -> None:
    path = tmp_path / "select.csv"
    path.write_text("step,eta,kl\n0,0.0,0.0\n4,1.0,1.5\n8,0.5,1.0\n8,1.0,\n")
    assert kl_by_step(path) == {4: 1.5, 8: None}


def test_the_curve_starts_from_all_answers_of_the_sft_model() -> None:
    """Snapshots have one seed; the start of the curve has all seeds."""
    sft = Results.of([answers(0.0, gold, 0.0).columns[0] for gold in (1.0, 2.0, 3.0)])
    start = Frontier(EVALUATOR, {"sft": sft}, {5: answers(1.0, 3.0, 1.0)}, {}, BOOTSTRAP).curve[0]
    assert start.mean("gold") == pytest.approx(2.0)
    assert start.mean("win_rate") == 0.5


def test_a_model_of_other_tokens_has_no_place_on_the_curve() -> None:
    sft, policy = answers(0.0, 0.0, 0.0), answers(1.0, 1.0, 2.0)
    foreign = Results.of([replace(answers(0.0, 0.5, 1.0).columns[0], divergence=None)])
    results = {"sft": sft, "policy": policy, "theirs": foreign}
    models = {name: figures(each, None if name == "theirs" else 0.0) for name, each in results.items()}
    found = Frontier(EVALUATOR, results, {10: policy}, models, BOOTSTRAP).figures()["frontier"]["theirs"]
    assert (found["gold"], found["kl"], found["policy_gold"], found["gold_gap"], found["between"]) == (
        pytest.approx(0.5), None, None, None, None,
    )  # fmt: skip


def test_the_stopping_difference_is_paired_and_needs_a_judge() -> None:
    results = {"sft": answers(0.0, 1.0, 0.0)}
    snapshots = {5: answers(1.0, 3.0, 1.0), 10: answers(4.0, 2.0, 5.0)}
    frontier = Frontier(EVALUATOR, results, snapshots, {}, BOOTSTRAP)
    found = frontier.stopping({"best_judge_step": 5, "last_step": 10})
    assert found is not None
    assert (found["best_step"], found["last_step"], found["score"]) == (5, 10, "gold")
    assert found["difference"] == pytest.approx(1.0)
    assert interval(found, "difference") == pytest.approx((1.0, 1.0))
    sft_first = frontier.stopping({"best_judge_step": 0, "last_step": 10})
    assert sft_first is not None
    assert sft_first["difference"] == pytest.approx(-1.0)
    assert frontier.stopping({"best_judge_step": None, "last_step": 10}) is None


def test_the_snapshots_of_the_frontier_are_spread_over_the_root_of_kl() -> None:
    """First, last, the policy's and both best ones; then the widest gap in √KL."""
    kls: dict[int, float | None] = dict(zip(range(2, 18, 2), (0, 1, 4, 4.1, 4.2, 9, 9.1, 16), strict=True))
    selected = {"step": 16, "best_judge_step": 14, "best_proxy_step": 0}
    assert chosen_snapshots(kls, selected, 5) == [2, 4, 6, 14, 16]
    assert chosen_snapshots(kls, selected, 2) == [2, 14, 16], "named snapshots are always kept"
    assert chosen_snapshots(kls, selected, 100) == list(kls)
    assert chosen_snapshots(kls, {**selected, "eta": 1}, 0) == [selected["step"]], "the policy has been sampled"
    assert chosen_snapshots(kls, {**selected, "eta": 0.5}, 0) == []
    unknown = {"step": 16, "best_judge_step": None, "best_proxy_step": None}
    assert chosen_snapshots(dict.fromkeys(kls), unknown, 3) == [2, 8, 16], "without KLs, over the steps"
