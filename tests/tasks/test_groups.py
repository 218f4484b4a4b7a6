"""What group methods add to PPO, through whole stages: the settings reach the loop, and its figures the outputs."""

import csv
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

Main = Callable[["Project", str], "Ended"]
SHORT = "def score(prompts, responses, rows):\n    return [-float(len(response)) for response in responses]\n"
FEW = "def score(prompts, responses, rows):\n    return [float(len(response) % 2) for response in responses]\n"
SAME = "def score(prompts, responses, rows):\n    return [1.0] * len(responses)\n"


def rows_of(project: "Project", name: str) -> list[dict[str, str]]:
    with (project.root / f"plots/{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def with_functions(project: "Project", **functions: tuple[float, str]) -> None:
    for name, (_, text) in functions.items():
        (project.root / f"rewards/{name}.py").write_text(text, encoding="utf-8")
    project.set("scorer", [{"term": f"{name}.py", "weight": weight} for name, (weight, _) in functions.items()])
    for key, value in {
        "runtime.tracking": False,
        "ppo.critic.init": "sft",
        "ppo.steps": 2,
        "dpo.enabled": False,
    }.items():
        project.set(key, value)


def test_terms_are_compared_apart_by_the_recipe_gdpo(finished: "Project", stage_main: Main) -> None:
    with_functions(finished, few=(1.0, FEW), short=(0.5, SHORT), same=(1.0, SAME))
    finished.set("grpo", {"enabled": True, "recipe": "gdpo", "settings": {"samples_per_prompt": 4}})
    for stage in ("check", "grpo"):
        ended = stage_main(finished, stage)
        assert ended.code == 0, ended.stderr
    assert finished.json("metrics/grpo.json")["recipe"] == "gdpo"
    first = rows_of(finished, "grpo")[0]
    assert float(first["equal_groups_share/same.py"]) == 1.0
    assert float(first["equal_groups_share"]) <= float(first["equal_groups_share/few.py"]) < 1.0
    assert math.isfinite(float(first["policy_loss"]))
    assert "step 1: the term same.py does not vary in any group: it adds nothing to the advantages" in ended.stdout


def test_gdpo_needs_two_terms(finished: "Project", stage_main: Main) -> None:
    finished.set("grpo", {"enabled": True, "recipe": "gdpo", "settings": {"samples_per_prompt": 4}})
    ended = stage_main(finished, "check")
    assert ended.code == 2
    assert "grpo.advantage is gdpo, which compares the terms of scorer apart, and scorer has one" in ended.stderr


def test_filters_and_one_ratio_for_an_answer_in_a_stage(finished: "Project", stage_main: Main) -> None:
    with_functions(finished, few=(1.0, FEW))
    settings = {
        **{
            "samples_per_prompt": 4,
            "skip_equal_groups": True,
            "kl": {"coef": 0.0},
            "truncated": "mask",
            "score": {"missing_eos_penalty": 0.0},
        },
        **{"ratio": "sequence", "loss_average": "answer_means", "clip_ratio": 3e-4, "clip_ratio_high": 4e-4},
    }
    finished.set("rloo", {"enabled": True, "recipe": "ppo_style", "settings": settings})
    for stage in ("check", "rloo"):
        ended = stage_main(finished, stage)
        assert ended.code == 0, ended.stderr
    rows = rows_of(finished, "rloo")
    assert all(0 <= float(row["equal_groups_share"]) <= 1 for row in rows)
    updates = [row for row in rows if float(row["optimizer_steps"])]
    assert updates, rows
    assert all(float(row["clip_fraction_last_epoch"]) > 0 for row in updates), rows
    finished.set("rloo.recipe", "published")
    ended = stage_main(finished, "check")
    assert ended.code == 2
    assert "is fixed by recipe: published; remove it, or set recipe: ppo_style" in ended.stderr


def test_a_step_without_an_update_is_said(finished: "Project", stage_main: Main) -> None:
    with_functions(finished, same=(1.0, SAME))
    settings = {
        "samples_per_prompt": 4,
        "skip_equal_groups": True,
        "kl": {"coef": 0.0},
        "score": {"missing_eos_penalty": 0.0},
    }
    finished.set("rloo", {"enabled": True, "recipe": "ppo_style", "settings": settings})
    for stage in ("check", "rloo"):
        ended = stage_main(finished, stage)
        assert ended.code == 0, ended.stderr
    assert "step 2: no update: every answer is of a group with equal scores, or was cut off" in ended.stdout
    assert [row["policy_loss"] for row in rows_of(finished, "rloo")] == ["", ""]
    assert finished.json("metrics/rloo.json")["optimizer_steps"] == 0
