"""Work of the planned stages, counted by hand."""

from pathlib import Path

from tasks.evaluation.ceiling import POLICY_SAMPLES, SFT_SAMPLES
from tasks.params.all import Params
from tasks.params.loader import parse, read_yaml
from tasks.params.variant import merged
from tasks.planning.stages import FOR_OPTIMUM, Work, stages_of

ROOT = Path(__file__).resolve().parents[3]


def test_samples_of_evaluate(tmp_path: Path) -> None:
    """SFT model, policy, rejection_sft and rloo answer twice; one interpolated policy and two snapshots once; SFT
    model and policy answer six more times for the optimum."""
    change = {
        "ppo": {"steps": 4, "snapshot_every": 2},
        "evaluate": {"seeds": [1, 2], "interpolation": [0.5], "snapshots": 5, "max_prompts": 10},
        "rejection_sft": {"enabled": True}, "rloo": {"enabled": True},
        **{name: {"enabled": False} for name in ("dpo", "ipo", "best_of_n", "hybrid", "reinforce", "grpo")},
    }  # fmt: skip
    params = parse(Params, merged(read_yaml(ROOT / "examples/tiny.yaml"), change))
    *_, last = stages_of(params, tmp_path, 8)
    new, samples = params.evaluate.max_new_tokens, 10 * (4 * 2 + 1 + 2 + 2 * 6)
    scorers = params.reward.members + (params.reward.judge_share > 0)
    assert last.name == "evaluate"
    assert last.work == Work(samples, samples * new, samples * (8 + new) * (2 + scorers))


def test_answers_for_the_optimum_are_those_of_evaluate() -> None:
    assert FOR_OPTIMUM == SFT_SAMPLES == POLICY_SAMPLES
