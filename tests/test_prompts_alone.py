"""What people begin with: an instruct model, prompts, and a function as reward; there are no answers to imitate and no
pairs."""

import json
import re
from typing import TYPE_CHECKING

import pytest

from tasks.params.stages import STAGES
from tests.architectures.zoo import download

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Ended, Project, Reproduce

SHORT = "def score(prompts, responses, rows):\n    return [-len(response) for response in responses]\n"


@pytest.fixture
def prompts_alone(project: "Project") -> "Project":
    """A hundred prompts, a pretrained model, and answers that are better the shorter they are."""
    download("qwen2", project.root / "data/raw/instruct")
    rows = [{"prompt": f"What is {a} + {b}?", "sum": a + b} for a in range(10) for b in range(10)]
    (project.root / "data/raw/set").mkdir()
    (project.root / "data/raw/set/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project.root / "rewards/short.py").write_text(SHORT)
    for name, value in {
        "ingest": {"source": "files", "files": {"path": "set"}},
        "base": {"source": "pretrained", "pretrained": {"model": "instruct"}},
        "sft.enabled": False,
        "preferences.source": "dataset",
        "scorer": [{"term": "short.py", "weight": 1.0}],
        "ppo.critic.init": "sft",
        "ppo.steps": 2,
        "rejection_sft": {"enabled": False},
        "dpo": {"enabled": False},
        "rloo": {"enabled": False},
        "grpo": {"enabled": True, "settings": {"samples_per_prompt": 4}},
        "evaluate.max_prompts": 8,
    }.items():
        project.set(name, value)
    return project


def test_many_prompts_are_shared_too_where_no_reward_model_is_trained(
    prompts_alone: "Project", stage_main: "Callable[[Project, str], Ended]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPO has all of them but the held-out and validation ones, as with few prompts."""
    monkeypatch.setattr("tasks.datasets.sources.splits.FEW_PROMPTS", 1)
    for stage in ("check", "check_data", "ingest"):
        ended = stage_main(prompts_alone, stage)
        assert ended.code == 0, ended.stderr
    ingest = prompts_alone.json("metrics/ingest.json")
    assert (ingest["shared_prompts"], ingest["ppo_prompts"], ingest["heldout"]) == (True, 81, 10)


@pytest.mark.slow
def test_the_whole_pipeline(prompts_alone: "Project", reproduce: "Reproduce") -> None:
    project = prompts_alone
    project.evaluate_little()
    assert set(reproduce(project)) == set(STAGES)

    ingest = project.json("metrics/ingest.json")
    assert (ingest["demonstrations"], ingest["ppo_prompts"], ingest["heldout"]) == (0, 81, 10)
    assert project.json("metrics/sft.json") == {"enabled": False}
    assert (project.root / "plots/sft.csv").read_text().count("\n") == 1
    for base in (project.root / "models/base").iterdir():
        assert (project.root / "models/sft" / base.name).read_bytes() == base.read_bytes()
    provenance = project.json("models/sft.provenance.json")
    assert (provenance["stage"], provenance["params"]["sft"]["enabled"]) == ("sft", False)
    assert project.json("metrics/select.json")["prompts"] == 9
    evaluate = project.json("metrics/evaluate.json")
    assert set(evaluate["models"]) >= {"sft", "policy", "grpo", "best_of_4"}
    assert evaluate["models"]["sft"]["recipe"] == "base"
    text = re.sub("<[^>]*>", " ", (project.root / "report/index.html").read_text(encoding="utf-8"))
    assert "SFT (the base model)" in text
    assert "sft.enabled is false: SFT is the base model as it is" in text
    assert "SFT (the base model)" in project.run("python", "-m", "flows.cli", "compare").stdout

    project.set("sft.learning_rate", 1e-3)
    assert set(reproduce(project)) == {"check", "sft", "report"}, "settings of a training that is off change no model"


def test_pairs_are_missed_before_anything_runs(
    prompts_alone: "Project", stage_main: "Callable[[Project, str], Ended]"
) -> None:
    prompts_alone.set("scorer", [{"term": "reward_model", "weight": 1.0}])
    assert stage_main(prompts_alone, "check").code == 0
    ended = stage_main(prompts_alone, "check_data")
    assert ended.code == 2
    line = ended.stderr.splitlines()[-1]
    assert "the data have no pairs for the reward model (train split)" in line
    assert "score by functions alone" in line
    prompts_alone.set("sft.enabled", True)
    assert stage_main(prompts_alone, "check").code == 0
    ended = stage_main(prompts_alone, "check_data")
    assert "SFT needs demonstrations" in ended.stderr
    assert "or set sft.enabled: false" in ended.stderr
