"""What a reward model's score of a cut answer is worth: held-out texts that people rated, cut off after some tokens.

    python benchmarks/cut_answers.py --tokens 24,12,6

Needs data/ingest/ratings.jsonl and models/reward of a run in this clone; changes nothing there. The table is Markdown:
Spearman's correlation of the score with the rating of the whole text, where the score is read at the last token of the
cut text, and at the end token behind it, as Leash does.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flows.environment import find_root
from rlhf_core.config.precision import Precision
from rlhf_core.data.scorer import correlation
from rlhf_core.data.tokenizer import encode_prompt, encode_response, load_tokenizer
from rlhf_core.evaluation.baselines import ranks
from rlhf_core.models.batch import TokenBatch, map_batches, sequence_scores
from rlhf_core.models.hf import load_scalar_model, place
from rlhf_core.models.precision import autocast
from tasks.datasets.jsonl import iter_jsonl
from tasks.params.loader import read_yaml
from tasks.stage.run import quiet_libraries


def main() -> None:
    """Print a row of the table for each reward model and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="24,12,6")
    limits = [int(number) for number in parser.parse_args().tokens.split(",")]
    quiet_libraries()
    root = find_root()
    precision = read_yaml(root / "params.yaml").get("precision", "float32")
    rows = [row for _, row in iter_jsonl(root / "data/ingest/ratings.jsonl") if row["split"] == "validation"]
    print("| model | cut after | texts | last token | end token | whole |\n|---|---|---|---|---|---|", flush=True)
    for name in ("reward", "reward/judge"):
        if not (folder := root / "models" / name).is_dir():
            continue
        tokenizer = load_tokenizer(folder)
        model, end = place(load_scalar_model(folder, frozen=precision)), int(tokenizer.eos_token_id)
        for limit in limits:
            some = [row for row in rows if len(encode_response(tokenizer, row["response"], ended=False)) > limit]
            prompts = [encode_prompt(tokenizer, row["prompt"]) for row in some]
            whole = [encode_response(tokenizer, row["response"]) for row in some]
            ratings, cells = ranks([float(row["rating"]) for row in some]).tolist(), []
            for answers in ([ids[:limit] for ids in whole], [[*ids[:limit], end] for ids in whole], whole):
                scores = scores_of(model, precision, prompts, answers, int(tokenizer.pad_token_id))
                cells.append(f"{correlation(ranks(scores).tolist(), ratings):.2f}")
            print(f"| {name} | {limit} | {len(some)} | {' | '.join(cells)} |", flush=True)


@torch.no_grad()
def scores_of(
    model: PreTrainedModel, precision: Precision, prompts: list[list[int]], answers: list[list[int]], pad_id: int
) -> list[float]:
    """The scalar at the last token of each answer."""

    def read(batch: TokenBatch) -> list[float]:
        return sequence_scores(model, batch).tolist()

    with autocast(precision, model.device):
        return map_batches(read, prompts, answers, pad_id=pad_id, batch_size=32, device=model.device)


if __name__ == "__main__":
    main()
