"""The tiny pipeline with models from elsewhere, each with another tokenizer than the policy: one scores beside the
run's reward model, which has a base of its own, and another judges."""

import csv
import json
from typing import TYPE_CHECKING

import pytest

from rlhf_core.data.tokenizer import load_tokenizer, same_tokens
from tests.elsewhere import save_classifier, save_language_model, save_reward_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Ended, Project, Reproduce

pytestmark = pytest.mark.slow


def test_a_scorer_a_judge_and_a_base_with_three_tokenizers(project: "Project", reproduce: "Reproduce") -> None:
    judges = project.root / "models/judges"
    save_reward_model(judges / "rm", "gemma")
    save_classifier(judges / "mood")
    save_language_model(project.root / "data/raw/other", "qwen2")
    for name, value in {
        "scorer": [{"model": "rm", "weight": 0.5, "precision": "bfloat16"}, {"term": "reward_model", "weight": 1.0}],
        "judge": {"kind": "reward_model", "model": "mood", "label": "POSITIVE", "reads": "pair"},
        "reward.base": "other",
        "reward.max_tokens": 400,
        "select.rule": "best_judge",
        "ppo.critic.init": "sft",
        "dpo.enabled": False,
        "runtime.tracking": False,
    }.items():
        project.set(name, value)
    project.evaluate_little()
    reproduce(project)

    policy, reward = (load_tokenizer(project.root / folder) for folder in ("models/sft", "models/reward"))
    assert not same_tokens(policy, reward)
    assert next(iter(project.json("data/ingest/reward_base.json"))) == "chat_template.jinja"
    inputs = json.loads((project.root / "models/reward.provenance.json").read_text())["inputs"]
    assert "data/ingest/reward_base.json" in inputs
    with (project.root / "plots/ppo.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            total = 0.5 * float(row["reward/rm"]) + float(row["reward/reward_model"])
            assert float(row["reward_raw"]) == pytest.approx(total, rel=1e-5)
    evaluate = project.json("metrics/evaluate.json")
    assert (evaluate["judged_by"], evaluate["win_rate_judge"]) == ("scores", "mood")
    assert evaluate["scorer"] == "scorer (0.5 × rm + 1 × reward_model)"
    assert evaluate["models"]["policy"]["gold"] is not None
    assert project.json("metrics/select.json")["rule"] == "best_judge"

    (project.root / "data/raw/other/README.md").write_text("a page")
    (judges / "mood/README.md").write_text("a page")
    stale = project.stale()
    assert {"ingest", "ppo", "best_of_n", "select", "evaluate"} <= stale
    assert "sft" not in stale


def test_a_model_alone_is_the_scorer_and_no_reward_model_is_trained(
    project: "Project", reproduce: "Reproduce", stage_main: "Callable[[Project, str], Ended]"
) -> None:
    save_reward_model(project.root / "models/judges/rm", "qwen2")
    for name, value in {
        "scorer": [{"model": "rm", "weight": 1.0}],
        "ppo.critic.init": "sft",
        "dpo.enabled": False,
        "runtime.tracking": False,
    }.items():
        project.set(name, value)
    reproduce(project, "ppo")
    assert project.json("metrics/reward.json") == {"enabled": False}
    before = project.outputs()
    save_reward_model(project.root / "models/judges/rm", "qwen2", context=50)
    ended = stage_main(project, "ppo")
    assert ended.code == 2
    assert "rm: a prompt with its answer has" in ended.stderr.splitlines()[-1]
    assert "its context holds 50" in ended.stderr.splitlines()[-1]
    assert project.outputs() == before
    project.set("scorer", [{"model": "gone", "weight": 1.0}])
    ended = project.stage("check")
    assert ended.returncode == 2
    assert "scorer: models/judges/gone is no Hugging Face folder (no config.json); put one there" in ended.stderr
