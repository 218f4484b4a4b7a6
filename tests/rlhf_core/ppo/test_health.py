"""`health.py`: each detector on both sides of its threshold, on rows made for it; what the monitor remembers; and that
on the history of the demo only `repetition` fires."""

import csv
import io
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo.health import DETECTORS, REMEDIES, SLOW_GENERATION, Alert, Monitor

Watch = Callable[..., Monitor]
HEALTHY: dict[str, float | None] = {
    "reward_raw": 1.0,
    "gold": 2.0,
    "kl": 2.0,
    "response_tokens_mean": 20.0,
    "update_kl": 0.001,
    "entropy": 1.0,
    "value_loss": 0.1,
    "explained_variance": 0.5,
    "clip_fraction": 0.05,
    "clip_fraction_last_epoch": 0.1,
    "repeated_ngram_share": 0.02,
    "repeating_answer_share": 0.1,
    "missing_eos_share": 0.01,
    "min_token_reward": -0.5,
    "engine_mismatch_k3": 1e-9,
    "grad_norm_policy": 0.2,
    "grad_norm_critic": 0.5,
}


def rows(steps: int, **columns: Callable[[int], float | None]) -> list[dict[str, float | None]]:
    """A healthy run in which these columns are functions of the step, from 1."""
    return [
        {**HEALTHY, "step": step, **{name: value(step) for name, value in columns.items()}}
        for step in range(1, steps + 1)
    ]


def noisy(level: Callable[[int], float], noise: float = 0.01) -> Callable[[int], float]:
    """`level` plus or minus `noise` in turn: one value is known to about `noise` √2."""
    return lambda step: level(step) + (noise if step % 2 else -noise)


@pytest.fixture
def watch(ppo_values: Callable[..., dict[str, Any]]) -> Watch:
    """watch(rows, batch_size=…) -> a Monitor that has seen them."""

    def build(
        history: list[dict[str, float | None]],
        batch_size: int = 128,
        ppo_epochs: int = 2,
    ) -> Monitor:
        config = ppo_values(batch_size=batch_size, ppo_epochs=ppo_epochs, kl={"horizon": 1000})
        monitor = Monitor(PPOConfig(**config))
        for row in history:
            monitor.observe(row)
        return monitor

    return build


def reported(monitor: Monitor) -> list[str]:
    return [f"{alert.name}@{alert.step}" for alert in monitor.alerts]


def test_a_healthy_run_gives_no_alert(watch: Watch) -> None:
    assert watch(rows(40)).alerts == []


# reward hacking

UP = {"reward_raw": noisy(lambda step: 0.1 * step)}


def test_proxy_up_and_gold_down_is_reward_hacking(watch: Watch) -> None:
    """Gold falls from step 11 on."""
    monitor = watch(rows(30, **UP, gold=noisy(lambda step: 2.0 - 0.1 * max(0, step - 10))))
    (alert,) = monitor.alerts
    assert alert.name == "reward_hacking"
    assert 12 <= alert.step <= 20
    assert "the judge's score from 2" in alert.message


@pytest.mark.parametrize(
    ("reward", "gold"),
    [
        (lambda step: 0.1 * step, lambda step: 0.1 * step),
        (lambda step: 0.1 * step, lambda step: 2.0),
        (lambda step: 1.0, lambda step: 2.0 - 0.1 * step),
        (lambda step: 3.0 - 0.1 * step, lambda step: 2.0 - 0.1 * step),
    ],
    ids=["both rise", "gold stays", "the proxy stays", "both fall"],
)
def test_nothing_else_is_reward_hacking(
    watch: Watch, reward: Callable[[int], float], gold: Callable[[int], float]
) -> None:
    assert watch(rows(40, reward_raw=noisy(reward), gold=noisy(gold))).alerts == []


def test_a_fall_of_gold_within_its_noise_is_not_reward_hacking(watch: Watch) -> None:
    """The same fall under noise of 1: no alert; and one under noise of 0.01."""
    for noise, seen in ((1.0, []), (0.01, ["reward_hacking"])):
        history = rows(30, **UP, gold=noisy(lambda step: 2.0 - 0.03 * step, noise))
        assert [alert.name for alert in watch(history).alerts] == seen


def test_reward_hacking_looks_at_a_hundred_prompts_or_more(watch: Watch) -> None:
    """With 10 prompts a step each side needs 10 steps: 20 in all, however clear the case is."""
    case = {"reward_raw": lambda step: float(step), "gold": lambda step: -float(step)}
    assert watch(rows(19, **case), batch_size=10).alerts == []
    assert reported(watch(rows(20, **case), batch_size=10)) == ["reward_hacking@20"]


@pytest.mark.parametrize(("fall", "seen"), [(0.0, 0), (0.02, 20)])
def test_chance_is_not_reward_hacking(watch: Watch, fall: float, seen: int) -> None:
    """Twenty runs under independent noise, the proxy rising: a gold score that stands still is left alone, one that
    falls is always found."""
    draw = random.Random(1)
    histories = [
        rows(
            40,
            reward_raw=lambda step: 0.03 * step + draw.gauss(0, 0.1),
            gold=lambda step: 2.0 - fall * step + draw.gauss(0, 0.1),
        )
        for _ in range(20)
    ]
    assert sum(bool(watch(history).alerts) for history in histories) == seen


LENGTHS = (20, 60, 120, 400)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("kl", "seen"), [(4.8, []), (5.2, ["reward_hacking"])])
def test_without_a_judge_the_kl_per_answer_decides(watch: Watch, tokens: int, kl: float, seen: list[str]) -> None:
    """On both sides of HACKING_KL, reached slowly (no spike), at every length of the answers."""
    history = rows(
        60,
        **UP,
        gold=lambda _: None,
        kl=lambda step: kl * min(1.0, step / 30),
        response_tokens_mean=lambda _: float(tokens),
        update_kl=lambda _: 1 / tokens,
        engine_mismatch_k3=lambda _: 0.1 / tokens,
    )
    assert [alert.name for alert in watch(history).alerts] == seen


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(
    ("name", "column", "inside", "outside"),
    [
        ("kl_spike", "kl", lambda _: 2.0 + 3.9, lambda _: 2.0 + 4.1),
        ("kl_spike", "update_kl", lambda tokens: 2.9 / tokens, lambda tokens: 3.1 / tokens),
        ("engine_mismatch", "engine_mismatch_k3", lambda tokens: 0.19 / tokens, lambda tokens: 0.21 / tokens),
    ],
    ids=["kl", "update_kl", "engine_mismatch"],
)
def test_rule_29_limits_of_a_kl_are_per_answer(
    watch: Watch,
    tokens: int,
    name: str,
    column: str,
    inside: Callable[[int], float],
    outside: Callable[[int], float],
) -> None:
    for level, expected in ((inside(tokens), []), (outside(tokens), [name])):
        changed = {column: lambda step, level=level: level if step > 10 else {"kl": 2.0}.get(column, 1e-4)}
        history = rows(30, response_tokens_mean=lambda _: float(tokens), **changed)
        calm = {"update_kl": 1e-4, "engine_mismatch_k3": 1e-9}
        history = [row | {key: calm[key] for key in calm if key != column} for row in history]
        assert [alert.name for alert in watch(history).alerts] == expected


# the others: a column, a value just inside and one just outside, from step 11 on

CASES = [
    ("entropy_collapse", "entropy", 0.21, 0.19),
    ("stale_data", "clip_fraction_last_epoch", 0.39, 0.41),
    ("repetition", "repeated_ngram_share", 0.21, 0.23),
    ("repetition", "repeating_answer_share", 0.29, 0.31),
    ("length_drift", "response_tokens_mean", 39.0, 41.0),
    ("length_drift", "response_tokens_mean", 11.0, 9.0),
    ("missing_ends", "missing_eos_share", 0.20, 0.22),
    ("exploding_gradient", "grad_norm_policy", 3.9, 4.1),
    ("exploding_gradient", "grad_norm_critic", 9.9, 10.1),
    ("huge_penalty", "min_token_reward", -9.9, -10.1),
    ("frozen_reward", "clip_fraction", 0.29, 0.31),
]


@pytest.mark.parametrize(("name", "column", "inside", "outside"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_both_sides_of_each_threshold(watch: Watch, name: str, column: str, inside: float, outside: float) -> None:
    for value, expected in ((inside, []), (outside, [name])):
        history = rows(30, **{column: lambda step, value=value: HEALTHY[column] if step <= 10 else value})
        assert [alert.name for alert in watch(history).alerts] == expected


def test_a_reward_that_rises_is_not_frozen_however_much_is_clipped(watch: Watch) -> None:
    assert watch(rows(40, **UP, gold=UP["reward_raw"], clip_fraction=lambda _: 0.9)).alerts == []


@pytest.mark.parametrize(("noise", "seen"), [(0.001, []), (0.1, ["frozen_reward"])])
def test_a_reward_that_rises_within_its_noise_is_frozen(watch: Watch, noise: float, seen: list[str]) -> None:
    """0.02 from one window to the next."""
    history = rows(40, reward_raw=noisy(lambda step: 0.004 * step, noise), clip_fraction=lambda _: 0.9)
    assert [alert.name for alert in watch(history).alerts] == seen


def test_one_epoch_cannot_be_late(watch: Watch) -> None:
    history = rows(20, clip_fraction_last_epoch=lambda _: 0.9)
    assert watch(history, ppo_epochs=1).alerts == []
    assert reported(watch(history, ppo_epochs=2)) == ["stale_data@5"]


@pytest.mark.parametrize(
    ("loss", "explained", "seen"),
    [
        (0.5, -0.1, ["diverging_critic"]),
        (0.39, -0.1, []),  # not yet four times
        (0.5, 0.1, []),  # the targets have grown, the critic follows
    ],
)
def test_a_diverging_critic_has_a_growing_loss_and_predicts_worse_than_a_constant(
    watch: Watch, loss: float, explained: float, seen: list[str]
) -> None:
    history = rows(
        30,
        value_loss=lambda step: 0.1 if step <= 10 else loss,
        explained_variance=lambda step: 0.5 if step <= 10 else explained,
    )
    assert [alert.name for alert in watch(history).alerts] == seen


def seconds(share: float) -> Mapping[str, float]:
    return {"rollout": share, "scoring": 0.1, "update": 0.9 - share}


@pytest.mark.parametrize(("share", "seen"), [(0.69, []), (0.71, [SLOW_GENERATION])])
def test_generation_dominates_above_its_share(watch: Watch, share: float, seen: list[str]) -> None:
    monitor = watch([])
    alerts = [alert for step in range(1, 9) for alert in monitor.observe_seconds(seconds(share), step)]
    assert [alert.name for alert in alerts] == seen
    assert [alert.step for alert in alerts] == [5] * len(seen)
    assert monitor.active == seen


def test_seconds_stay_out_of_what_is_kept(watch: Watch) -> None:
    """Else two machines would write different outs and checkpoints."""
    fast, slow = watch(rows(8)), watch(rows(8))
    for step in range(1, 9):
        fast.observe_seconds(seconds(0.1), step)
        slow.observe_seconds(seconds(0.8), step)
    assert slow.active == [SLOW_GENERATION]
    assert slow.alerts == []
    assert slow.state_dict() == fast.state_dict()


def test_windows_grow_where_steps_are_small(watch: Watch) -> None:
    """One step of ten prompts says little: its spike of KL is noise, ten such steps are none."""
    jump = {"kl": lambda step: 7.0 if step in (20, 35) else 2.0}
    assert reported(watch(rows(40, **jump), batch_size=100)) == ["kl_spike@20", "kl_spike@35"]
    assert watch(rows(40, **jump), batch_size=10).alerts == []
    stays = {"kl": lambda step: 7.0 if step > 20 else 2.0}
    assert [name.split("@")[0] for name in reported(watch(rows(40, **stays), batch_size=10))] == ["kl_spike"]


# the monitor


def test_a_failure_mode_is_reported_once_until_a_window_without_it(watch: Watch) -> None:
    """Spikes at 10, 12 and 16 are one failure mode; the one at 30 is a new one."""
    spikes = (10, 12, 16, 30)
    monitor = watch(rows(40, update_kl=lambda step: 0.5 if step in spikes else 0.001))
    assert reported(monitor) == ["kl_spike@10", "kl_spike@30"]
    assert watch(rows(34, update_kl=lambda step: 0.5 if step in spikes else 0.001)).active == ["kl_spike"]
    assert watch(rows(35, update_kl=lambda step: 0.5 if step in spikes else 0.001)).active == []


def test_every_alert_has_a_remedy(watch: Watch) -> None:
    assert REMEDIES.keys() == {*DETECTORS, SLOW_GENERATION}
    (alert,) = watch(rows(10, update_kl=lambda step: 0.5 if step == 10 else 0.001)).alerts
    assert alert == Alert(
        "kl_spike", 10, "one update moved the policy by 10 nats per answer", remedy=REMEDIES["kl_spike"]
    )
    assert "drop learning_rate by an order of magnitude" in str(alert)


def test_a_missing_column_is_named(watch: Watch) -> None:
    (row,) = rows(1)
    del row["entropy"]
    with pytest.raises(KeyError, match="entropy"):
        watch([row])


@pytest.mark.parametrize("cut", range(1, 30))
def test_rule_19_detector_windows_belong_to_the_checkpoint(watch: Watch, cut: int) -> None:
    """Cut anywhere, stored as a checkpoint is (no pickle), loaded into a new monitor: the same alerts at the same
    steps."""
    history = rows(
        30,
        **UP,
        gold=noisy(lambda step: 2.0 - 0.1 * max(0, step - 10)),
        entropy=lambda step: max(0.05, 1.0 - 0.06 * step),
        update_kl=lambda step: 0.5 if step in (6, 9, 25) else 0.001,
    )
    whole, first, second = watch(history), watch(history[:cut]), watch([])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for row in history[cut:]:
        second.observe(row)
    assert len(whole.alerts) == 4
    assert second.alerts == whole.alerts
    assert second.state_dict() == whole.state_dict()


def test_on_the_demo_only_repetition_fires(watch: Watch) -> None:
    """demo.csv is plots/ppo.csv of `make run`: its reward model hardly penalises an option that is named twice, and PPO
    finds that."""
    with Path(__file__).with_name("demo.csv").open(encoding="utf-8", newline="") as file:
        found = [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]
    assert len(found) >= 20
    assert [alert.name for alert in watch(found).alerts] == ["repetition"]


def test_a_run_without_a_critic_has_none_that_diverges(watch: Watch) -> None:
    assert watch(rows(30, value_loss=lambda _: None, explained_variance=lambda _: None)).alerts == []
