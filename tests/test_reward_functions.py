"""The tiny pipeline with rewards from functions: alone, where no pairs are made and no reward model is trained, and
beside the reward model."""

import csv
import json
import re
import runpy
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_core.data.tokenizer import encode_response, load_tokenizer
from tasks.params.methods import BY_NAME
from tests.conftest import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Ended, Project, Reproduce

pytestmark = pytest.mark.slow
SHORT = "def score(prompts, responses, rows):\n    return [-len(response) for response in responses]\n"


def use_sums(project: "Project") -> None:
    """Data with the column `answer` in place of the demo's, and a critic that starts from the SFT model."""
    rows = [
        {"prompt": f"What is {a} + {b}?", "response": str(a + b), "answer": a + b} for a in range(20) for b in range(20)
    ]
    (project.root / "data/raw/sums").mkdir(parents=True)
    (project.root / "data/raw/sums/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project.root / "rewards/short.py").write_text(SHORT)
    for name, value in {
        "ingest.source": "files",
        "ingest.files": {"path": "sums"},
        "preferences.source": "dataset",
        "ppo.critic.init": "sft",
        "runtime.tracking": False,
        "dpo.enabled": False,
    }.items():
        project.set(name, value)


def page(project: "Project") -> str:
    return re.sub("<[^>]*>", " ", (project.root / "report/index.html").read_text(encoding="utf-8"))


def terms_of(figures: dict[str, Any]) -> dict[str, float]:
    return {name: figures[f"reward/{name}"] for name in ("exact.py", "short.py")}


def test_functions_alone(project: "Project", reproduce: "Reproduce") -> None:
    use_sums(project)
    project.evaluate_little()
    project.set("scorer", [{"term": "exact.py", "weight": 1.0}, {"term": "short.py", "weight": 0.1}])
    reproduce(project)
    assert project.json("metrics/preferences.json") == project.json("metrics/reward.json") == {"enabled": False}
    assert {path.name for path in (project.root / "models/reward").iterdir()} == {"README.md"}
    assert project.rows("data/preferences/preferences.jsonl") == []

    with (project.root / "plots/ppo.csv").open(newline="") as file:
        steps = list(csv.DictReader(file))
    for row in steps:
        total = float(row["reward/exact.py"]) + 0.1 * float(row["reward/short.py"])
        assert float(row["reward_raw"]) == pytest.approx(total, rel=1e-5)
    for sample in project.rows("data/best_of_n/samples.jsonl"):
        assert sample["terms"]["short.py"] == -len(sample["response"])
        assert sample["reward"] == pytest.approx(sample["terms"]["exact.py"] + 0.1 * sample["terms"]["short.py"])

    evaluate = project.json("metrics/evaluate.json")
    assert evaluate["win_rate_judge"] == evaluate["scorer"] == "scorer (1 × exact.py + 0.1 × short.py)"
    assert evaluate["judged_by"] == "scorer"
    for name, figures in evaluate["models"].items():
        found = terms_of(figures)
        assert figures["reward"] == pytest.approx(found["exact.py"] + 0.1 * found["short.py"]), name
        low, high = figures["reward/short.py_low"], figures["reward/short.py_high"]
        assert low <= found["short.py"] <= high
    text = page(project)
    assert "The reward model" not in text
    assert "scorer (1 × exact.py + 0.1 × short.py)" in text
    assert all(name in text for name in ("exact.py", "short.py"))

    with (project.root / "rewards/short.py").open("a") as file:
        file.write("\n# a remark\n")
    assert project.stale() == {"check", "ppo", "select", *BY_NAME, "evaluate"} - {"dpo", "ipo"}


def test_a_function_that_fails_in_a_stage_is_one_line_and_exit_code_2(
    project: "Project", reproduce: "Reproduce", stage_main: "Callable[[Project, str], Ended]"
) -> None:
    use_sums(project)
    project.set("scorer", [{"term": "exact.py", "weight": 1.0}])
    reproduce(project, "reward")
    text = "def score(prompts, responses, rows):\n    return [row['anser'] for row in rows]\n"
    (project.root / "rewards/exact.py").write_text(text)
    before = project.outputs()
    ended = stage_main(project, "ppo")
    assert ended.code == 2
    line = ended.stderr.splitlines()[-1]
    place = r"answer 1 of \d+, to prompt \w{16} \('What is .*\?'\)"
    assert re.search(rf"^ppo: scorer: exact.py: {place}: KeyError: 'anser' ", line)
    assert line.endswith("(line 2); the columns of its row: answer; correct rewards/exact.py")
    assert project.outputs() == before


def test_a_function_beside_the_reward_model(finished: "Project", reproduce: "Reproduce") -> None:
    """On the demo, whose judge decides the wins."""
    project = finished
    project.evaluate_little()
    (project.root / "rewards/short.py").write_text(SHORT)
    project.set("scorer", [{"term": "reward_model", "weight": 1.0}, {"term": "short.py", "weight": 0.02}])
    project.set("ppo.critic.init", "sft")
    project.set("runtime.tracking", False)
    reproduce(project)
    assert project.json("metrics/reward.json")["heldout_pairs"] > 0
    evaluate = project.json("metrics/evaluate.json")
    assert evaluate["judged_by"] == "scores"
    policy = evaluate["models"]["policy"]
    total = policy["reward/reward_model"] + 0.02 * policy["reward/short.py"]
    assert policy["reward"] == pytest.approx(total, rel=1e-5)
    assert "reward/short.py" in evaluate["models"]["dpo"], "a model that was not trained by the scorer is scored, too"
    assert "The reward model" in page(project)


def use_arithmetic(project: "Project", **small: Any) -> None:
    """The data and the parameters of the arithmetic example, as its guide says, with smaller values."""
    made = project.run(sys.executable, "examples/make_arithmetic.py", "data/raw/sums")
    assert made.returncode == 0, made.stderr
    shutil.copy2(project.root / "examples/arithmetic.yaml", project.root / "params.yaml")
    for name, value in {"threads": 1, "runtime.tracking": False, **small}.items():
        project.set(name, value)


@pytest.mark.timeout(900)
def test_the_arithmetic_example_in_a_small_version(project: "Project", reproduce: "Reproduce") -> None:
    """Every model has a rate of right answers with its interval, and each digit is one token."""
    small = {
        "sft.epochs": 1,
        "ppo.steps": 5,
        "ppo.batch_size": 64,
        "ppo.micro_batch_size": 64,
        "grpo.settings.steps": 2,
        "evaluate.max_prompts": 100,
        "evaluate.bootstrap": 100,
    }
    use_arithmetic(project, **small)
    reproduce(project)
    evaluate = project.json("metrics/evaluate.json")
    assert evaluate["judged_by"] == "scorer"
    for name in ("sft", "policy", "grpo"):
        one = evaluate["models"][name]
        assert 0 <= one["reward_low"] <= one["reward"] <= one["reward_high"] <= 1
    assert "exact.py" in page(project)
    rows = project.rows("data/ingest/demonstrations.jsonl")
    tokenizer = load_tokenizer(project.root / "models/sft")
    for row in rows[:50]:
        tokens = tokenizer.convert_ids_to_tokens(encode_response(tokenizer, row["response"]))
        assert [token.lstrip("Ġ") for token in tokens[:-1]] == row["response"].split(" ")


def test_half_of_the_demonstrations_of_sums_are_wrong() -> None:
    rows = runpy.run_path(str(ROOT / "examples/make_arithmetic.py"))["rows"]()
    numbers = [re.findall(r"\d", row["prompt"]) for row in rows]
    sums = [int("".join(digits[:2])) + int("".join(digits[2:])) for digits in numbers]
    assert [int(row["answer"].replace(" ", "")) for row in rows] == sums
    assert len({row["prompt"] for row in rows}) == 10_000
    right = sum(row["response"] == row["answer"] for row in rows) / len(rows)
    assert right == pytest.approx(0.5, abs=0.02)
