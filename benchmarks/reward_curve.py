"""How many pairs a reward model needs: its accuracy on the held-out pairs over the number of training pairs, beside two
baselines that cost nothing.

    python benchmarks/reward_curve.py --pairs 100,300,1000 --seeds 1,2,3

Needs data/preferences or the ratings of data/ingest, models/sft and params.yaml of a run in this clone; changes nothing
there. The pairs of whole prompts are drawn by seed, and the larger sets contain the smaller ones. `reward` of
params.yaml says how the model is trained. The table is Markdown: means over the seeds, with 95% intervals of the first
seed over the prompts.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flows.environment import find_root
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.determinism import make_deterministic, permutation
from rlhf_core.loading import load_config
from rlhf_core.models.hf import context_of, place, scalar_model_from
from rlhf_core.models.precision import autocast, body_precision
from rlhf_core.progress import listening
from rlhf_core.reward import Comparison, score_pairs, train_reward_model
from rlhf_core.training.run import Run
from tasks.datasets.jsonl import iter_jsonl
from tasks.params.loader import parse, read_yaml
from tasks.stage.progress import Watch
from tasks.stage.run import quiet_libraries
from tasks.training.pairs import PREFERENCES, comparisons
from tasks.training.ratings import RATINGS, rated_comparisons
from tasks.training.reward_figures import baseline_figures, figures_of


def main() -> None:
    """Train a reward model on each number of pairs with each seed, and print a row of the table for each number."""
    options = arguments().parse_args()
    quiet_libraries()
    root = find_root()
    content = read_yaml(root / "params.yaml")
    config, precision = parse(RewardConfig, content.get("reward", {}), "reward"), content.get("precision", "float32")
    tokenizer, pad_id = (found := load_tokenizer(root / "models/sft")), int(found.pad_token_id)
    limit = min(config.max_tokens, context_of(load_config(root / "models/sft")))
    rows = {path: [row for _, row in iter_jsonl(root / path)] for path in (PREFERENCES, RATINGS)}
    stage: Any = SimpleNamespace(
        name="reward", read=rows.get, common=SimpleNamespace(long_rows="drop"), log=print, warn=print
    )
    read = rated_comparisons if rows[RATINGS] else partial(comparisons, reading="complete")
    training, heldout = (read(stage, tokenizer, split, limit)[0] for split in ("train", "validation"))
    print("| training pairs | reward model | longer answer | bag of words |\n|---|---|---|---|", flush=True)
    for most in options.pairs:
        found = []
        for seed in options.seeds:
            own = some_pairs(training, most, seed)
            make_deterministic(seed, threads=content["threads"])
            frozen = body_precision(precision, config.lora)
            model = scalar_model_from(root / "models/sft", seed, trust_remote_code=False, frozen=frozen)
            watch = Watch(f"[{most} pairs, seed {seed}]", 10.0, print)
            with tempfile.TemporaryDirectory() as state, listening(watch):
                run = Run(Path(state), seed, lambda *_: None, checkpoint_every=10**9, precision=precision)
                train_reward_model(model, own, config, pad_id, run)
                with autocast(precision, place(model).device):
                    scores = score_pairs(model, heldout, pad_id, config.batch_size)
            found.append(
                figures_of(scores, [len(c.pairs) for c in heldout], None, seed)[0]
                | baseline_figures(tokenizer, own, heldout, scores, seed)
            )
        cells = (cell(found, name) for name in ("heldout_accuracy", "length_accuracy", "words_accuracy"))
        print(f"| {sum(len(c.pairs) for c in own):,} | {' | '.join(cells)} |", flush=True)


def some_pairs(training: Sequence[Comparison], most: int, seed: int) -> list[Comparison]:
    """Prompts in a random order of the seed, as long as they have at most `most` pairs; at least one."""
    chosen, pairs = list[Comparison](), 0
    for place_ in permutation(len(training), seed):
        pairs += len(training[place_].pairs)
        if chosen and pairs > most:
            break
        chosen.append(training[place_])
    return chosen


def cell(found: Sequence[dict[str, Any]], name: str) -> str:
    """The mean over the seeds, and the interval of the first."""
    first = found[0]
    return f"{fmean(one[name] for one in found):.3f} ({first[f'{name}_low']:.3f} – {first[f'{name}_high']:.3f})"


def arguments() -> argparse.ArgumentParser:
    """The options."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=numbers, default=[100, 300, 1000], help="numbers of training pairs")
    parser.add_argument("--seeds", type=numbers, default=[1], help="of the drawn pairs, head and data order")
    return parser


if __name__ == "__main__":
    main()
