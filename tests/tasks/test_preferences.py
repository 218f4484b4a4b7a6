"""The stage with pairs of the data: nothing is sampled, and the pairs are the data's."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf_core.data.chat import prompt_id

if TYPE_CHECKING:
    from tests.conftest import Ended, Project


def test_with_pairs_of_the_data_no_answer_is_sampled(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    prompts = [[{"role": "user", "content": f"What is a good breakfast {number}?"}] for number in range(40)]
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
    ended = stage_main(finished, "preferences")
    assert ended.code == 0, ended.stderr
    metrics = finished.json("metrics/preferences.json")
    assert (metrics["samples"], metrics["missing_eos_share"], metrics["pairs"]) == (0, None, len(rows))
    assert finished.rows("data/preferences/samples.jsonl") == []
    assert stage_main(finished, "reward").code == 0
