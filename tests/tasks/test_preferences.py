"""The stage with pairs of the data: a few answers measure the reward model's scores, and the pairs are the data's."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf_core.data.chat import prompt_id
from tasks.preferences import SCORED

if TYPE_CHECKING:
    from tests.conftest import Ended, Project


def test_with_pairs_of_the_data_each_of_512_prompts_is_answered_once(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    prompts = [[{"role": "user", "content": f"What is a good breakfast {number}?"}] for number in range(SCORED + 40)]
    rows = [{"prompt_id": prompt_id(prompt), "prompt": prompt} for prompt in prompts]
    splits = ["validation" if number % 5 == 0 else "train" for number in range(len(rows))]
    finished.write_rows(
        "data/ingest/preference_prompts.jsonl",
        [{**row, "split": split} for row, split in zip(rows, splits, strict=True)],
    )
    finished.write_rows(
        "data/ingest/pairs.jsonl",
        [
            {**row, "chosen": "Oats.", "rejected": "None.", "split": split}
            for row, split in zip(rows, splits, strict=True)
        ],
    )
    finished.set("runtime.tracking", False)
    finished.set("preferences.source", "dataset")
    finished.set("preferences.max_new_tokens", 4)
    ended = stage_main(finished, "preferences")
    assert ended.code == 0, ended.stderr
    metrics = finished.json("metrics/preferences.json")
    assert (metrics["samples"], metrics["prompts"], metrics["pairs"]) == (SCORED, SCORED, len(rows))
    samples = finished.rows("data/preferences/samples.jsonl")
    assert [sample["prompt_id"] for sample in samples] == [row["prompt_id"] for row in rows[:SCORED]]
    assert {sample["sample"] for sample in samples} == {0}
