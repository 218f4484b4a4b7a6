"""The examples with SmolLM2 through all stages, with two steps of PPO, on a tiny random model of its architecture and a
tokenizer of its kind."""

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ruamel.yaml import YAML
from transformers import LlamaConfig, LlamaForCausalLM

from tests.architectures.kinds import KINDS
from tests.architectures.zoo import GROUPED

if TYPE_CHECKING:
    from tests.conftest import Project, Reproduce

pytestmark = pytest.mark.slow
SMALL: dict[str, Any] = {
    "threads": 1,
    "runtime": {"tracking": False},
    "ppo.steps": 2,
    "ppo.batch_size": 8,
    "ppo.minibatches": 2,
    "ppo.critic.warmup_steps": 1,
    "ppo.snapshot_every": 1,
    "evaluate.max_prompts": 6,
    "best_of_n.n": [1, 2, 4],
}


def use_example(project: "Project", name: str, rows: list[dict[str, Any]], changes: dict[str, Any]) -> None:
    """The example's parameters with small values, its data, and a model in the place of SmolLM2."""
    params = YAML(typ="safe", pure=True).load(project.root / "examples" / f"{name}.yaml")
    YAML().dump(params, project.root / "params.yaml")
    for key, value in (SMALL | changes).items():
        project.set(key, value)
    data = project.root / "data/raw" / params["ingest"]["files"]["path"]
    data = data if data.suffix else data / "train.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = KINDS["qwen2"]()
    tokenizer.bos_token = "<|im_start|>"  # as SmolLM2's
    torch.manual_seed(1)
    config = LlamaConfig(
        **GROUPED, vocab_size=len(tokenizer), tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    folder = project.root / "data/raw" / params["base"]["pretrained"]["model"]
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_sentiment(project: "Project", reproduce: "Reproduce") -> None:
    words = {"dull": -1.5, "plain": 0.2, "fine": 1.0, "wonderful": 2.5}
    rows = [
        {"text": f"The {second} {first} is {word} to me.", "score": value + len(first) / 100}
        for first, second, (word, value) in product(
            ("film", "story", "cast", "music", "end", "plot"),
            ("summer", "winter", "old", "new", "long", "short"),
            words.items(),
        )
    ]
    use_example(project, "smollm2-sentiment", rows, {"dpo": {"enabled": True, "lora": {"rank": 2}, "max_tokens": 72}})
    reproduce(project)
    reward = project.json("metrics/reward.json")
    assert reward["train_ratings"] + reward["heldout_ratings"] <= len(rows)
    assert -1 <= reward["reward_rating_spearman"] <= 1
    evaluate = project.json("metrics/evaluate.json")
    assert evaluate["judge"] == "rewards/sentiment.py"
    assert set(evaluate["models"]) >= {"sft", "policy", "best_of_4", "dpo"}
    assert evaluate["models"]["policy"]["win_rate_by_judging_model"] is not None
    assert evaluate["optimum"]


def test_chat(project: "Project", reproduce: "Reproduce") -> None:
    rows = [
        {
            "prompt": f"\n\nHuman: How do I {verb} {thing}?\n\nAssistant:",
            "chosen": f" You {verb} {thing} slowly, step by step.",
            "rejected": " No.",
        }
        for verb, thing in product(("cook", "clean", "paint", "repair"), ("rice", "a house", "a boat", "tea", "a shoe"))
    ]
    use_example(project, "smollm2-chat", rows, {"reward.batch_size": 4, "ppo.max_new_tokens": 8})
    project.set("evaluate.max_new_tokens", 8)
    reproduce(project)
    assert project.json("metrics/sft.json") == {"enabled": False}
    reward = project.json("metrics/reward.json")
    assert {"length_accuracy", "words_accuracy", "judge_accuracy"} <= set(reward)
    evaluate = project.json("metrics/evaluate.json")
    assert evaluate["models"]["sft"]["recipe"] == "base"
    assert evaluate["models"]["policy"]["win_rate_controlled"] is not None


def test_short(project: "Project", reproduce: "Reproduce") -> None:
    """Prompts alone, with a function as reward: PPO and GRPO."""
    rows = [json.loads(line) for line in (project.root / "examples/questions.jsonl").read_text().splitlines()]
    changes = {"grpo": {"enabled": True, "settings": {"samples_per_prompt": 4}}, "ppo.max_new_tokens": 8}
    use_example(project, "smollm2-short", rows, changes)
    project.set("evaluate.max_new_tokens", 8)
    reproduce(project)
    evaluate = project.json("metrics/evaluate.json")
    assert evaluate["judge"] is None  # the score decides the wins
    assert evaluate["models"]["policy"]["win_rate"] is not None
    assert evaluate["models"]["sft"]["recipe"] == "base"
    assert set(evaluate["models"]) >= {"sft", "policy", "best_of_4", "grpo"}
