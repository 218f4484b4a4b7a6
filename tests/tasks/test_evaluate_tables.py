"""The tables that `evaluate` gives to MLflow."""

from tasks.evaluation.outputs import side_by_side


def test_answers_of_one_seed_stand_side_by_side_by_prompt() -> None:
    answers = [
        {"model": model, "seed": seed, "prompt_id": prompt, "prompt": f"{prompt}?",
         "response": f"{model} {seed} {prompt}"}
        for model, seeds in (("sft", (1, 2)), ("policy", (1, 2)), ("best_of_4", (None,)))
        for seed in seeds
        for prompt in ("a", "b")
    ]  # fmt: skip
    assert side_by_side(answers, 1) == [
        {"prompt": "a?", "sft": "sft 1 a", "policy": "policy 1 a", "best_of_4": "best_of_4 None a"},
        {"prompt": "b?", "sft": "sft 1 b", "policy": "policy 1 b", "best_of_4": "best_of_4 None b"},
    ]
