"""The pairs of data/preferences/preferences.jsonl as token ids, for reward model and DPO."""

from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.tokenizer import closed, complete_answer, encode_response
from rlhf_core.errors import UserError
from rlhf_core.reward import Comparison
from tasks.datasets.jsonl import Row
from tasks.stage.long_rows import fitting, prompts_once
from tasks.stage.stage import Stage

PREFERENCES = "data/preferences/preferences.jsonl"
SIDES = ("chosen", "rejected")
Reading = Literal["sampled", "complete", "text"]
"""How a model reads sampled answers: DPO as they were sampled; a reward model each with its end, as PPO's scorer reads
them: their tokens, or their text, with another tokenizer than the policy's."""


def comparisons(
    stage: Stage[Any], tokenizer: PreTrainedTokenizerBase, split: str, limit: int, reading: Reading = "sampled"
) -> tuple[list[Comparison], int]:
    """The pairs of a split, all of a prompt together, each distinct response once; and how many pairs did not fit."""
    Sides = tuple[list[int], list[int], list[int]]
    prompt_ids = prompts_once(tokenizer)

    def encode(row: Row) -> tuple[Sides, int]:
        prompt = prompt_ids(row)
        chosen, rejected = (response_tokens(tokenizer, row, side, reading, limit - len(prompt)) for side in SIDES)
        return (prompt, chosen, rejected), len(prompt) + max(len(chosen), len(rejected))

    rows = [row for row in stage.read(PREFERENCES) if row["split"] == split]
    kept, too_long = fitting(
        stage, f"{PREFERENCES}, split {split}", rows, encode, limit, key=f"{stage.name}.max_tokens"
    )
    if not kept:
        raise UserError(f"{PREFERENCES}: no {split} pair is left; training and validation pairs are needed")
    grouped: dict[str, Comparison] = {}
    for row, (prompt, chosen, rejected) in kept:
        comparison = grouped.setdefault(row["prompt_id"], Comparison(prompt, [], [], row.get("round", 1)))
        for response in (chosen, rejected):
            if response not in comparison.responses:
                comparison.responses.append(response)
        comparison.pairs.append((comparison.responses.index(chosen), comparison.responses.index(rejected)))
    return list(grouped.values()), too_long


def response_tokens(tokenizer: PreTrainedTokenizerBase, row: Row, side: str, reading: Reading, room: int) -> list[int]:
    """The tokens of a pair's side: the sampled ones, `closed`, or those of its text where the data contain the pair.
    `room`: for an answer to the prompt, in tokens; see `complete_answer`."""
    sampled: list[int] | None = row[f"{side}_ids"]
    if reading == "text" or sampled is None:
        return encode_response(tokenizer, row[side], row[f"{side}_ended"] or reading != "sampled")
    [sampled] = closed([sampled], [row[f"{side}_ended"]], tokenizer.eos_token_id)
    return sampled if reading == "sampled" else complete_answer(sampled, tokenizer.eos_token_id, room)
