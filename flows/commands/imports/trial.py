"""The quick try: params.yaml for a run of a few minutes on imported data, with a tiny model that learns to end its
answers."""

from collections.abc import Sequence
from io import StringIO
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from ruamel.yaml import YAML

from flows.params_file import MARK, digest_of, require_room
from rlhf_core.errors import UserError
from tasks.datasets.problems import Log
from tasks.datasets.sources.example import Example
from tasks.datasets.sources.splits import FEW_PROMPTS
from tasks.params.loader import PARAMS_FILE

FULL = Path("examples/own-data.yaml")
"""The file whose values are replaced."""
SMALL: dict[str, Any] = {
    "base.scratch.vocabulary": 1024,
    "base.scratch.layers": 2,
    "base.scratch.hidden": 64,
    "base.scratch.intermediate": 128,
    "base.scratch.heads": 2,
    "base.pretrain.steps": 20,
    "base.pretrain.learning_rate": 4e-3,
    "sft.learning_rate": 4e-3,
    "sft.warmup_steps": 5,
    "ppo.steps": 6,
    "evaluate.max_prompts": 40,
}
"""Values that fit all data."""
CONTEXTS = (384, 768, 1536)
"""Contexts of the tiny model, in tokens. Batches become smaller as the context grows, so that a step takes as long."""
BYTES_PER_TOKEN = 2.5
"""Of a text in UTF-8, with a vocabulary of 1,024 that was trained on it; HH-RLHF has 2.8."""
SFT_STEPS, REWARD_STEPS = 100, 30
FEWEST_PAIRS = 20
"""With fewer, a share of `ingest.split` or one of the two reward models has no pairs."""


def write_trial(root: Path, names: Sequence[str], examples: Sequence[Example], log: Log = print) -> None:
    """Write `root`/params.yaml: examples/own-data.yaml for the imported `names` with small values, which depend on the
    lengths and the number of the clean `examples` (the rows of these names). `log` prints what to do next.

    Raises UserError as `require_room`, and as `small_values`. Then nothing is written.
    """
    require_room(root, "--try")
    values = small_values(examples) | {"ingest.files.path": names[0] if len(names) == 1 else list(names)}
    yaml, written = YAML(), StringIO()
    yaml.width, yaml.preserve_quotes = 120, True
    content = yaml.load((root / FULL).read_text(encoding="utf-8"))
    for name, value in values.items():
        *above, last = name.split(".")
        block = content
        for part in above:
            block = block.setdefault(part, {})
        block[last] = value
    yaml.dump(content, written)
    text = written.getvalue()
    (root / PARAMS_FILE).write_text(f"{text}{MARK}{digest_of(text)}\n", encoding="utf-8")
    log(f"params.yaml: written for a quick try, {FULL} with small values; its models and figures mean nothing")
    log("now: leash run")
    log(f"for the real run: cp {FULL} params.yaml (the file before the try: git checkout params.yaml)")


def small_values(examples: Sequence[Example]) -> dict[str, Any]:
    """Dotted names of parameters and their values for the data: a context in which a third of the rows of each kind
    fits, answers of up to 1.25 times the median of those that fit (from a quarter to half of the context), and epochs
    for `SFT_STEPS` and `REWARD_STEPS` optimizer steps.

    Raises UserError for data without pairs or with too few, and for rows that fit no context.
    """
    sizes: dict[str, list[float]] = {}
    answers: list[tuple[float, float]] = []
    for example in examples:
        if example.answers and not example.tie:
            answer = max(len(text.encode()) for text in example.answers) / BYTES_PER_TOKEN
            tokens = answer + sum(len(turn["content"].encode()) for turn in example.prompt) / BYTES_PER_TOKEN
            sizes.setdefault(example.kind, []).append(tokens)
            answers.append((tokens, answer))
    if "pair" not in sizes:
        raise UserError(
            "the data have no pairs (prompt, chosen, rejected), and the reward model of --try needs them; start from "
            f"{FULL}, or from examples/reviews.yaml for texts with ratings"
        )
    for context in CONTEXTS:
        fit = {kind: sum(size <= context for size in found) for kind, found in sizes.items()}
        if all(3 * fit[kind] >= len(found) for kind, found in sizes.items()):
            break
    else:
        raise UserError(
            f"more than two thirds of the rows have more than about {CONTEXTS[-1]:,} tokens, too many for the model of "
            f"--try; start from {FULL} with a larger base.scratch.context"
        )
    if fit["pair"] < FEWEST_PAIRS:
        raise UserError(
            f"{fit['pair']} pairs are too few for --try: {FEWEST_PAIRS} that fit into {context:,} tokens are needed; "
            "add pairs"
        )

    def epochs(steps: int, rows: float, batch: int) -> float:
        return float(f"{steps / max(rows / batch, 1.0):.2g}")

    sft_batch, reward_batch = 16 * CONTEXTS[0] // context, 8 * CONTEXTS[0] // context
    shared = sum(not example.heldout for example in examples) < FEW_PROMPTS
    of_sft, of_reward = (0.9, 0.63) if shared else (0.45, 0.2)  # of the rows, by ingest.split, without validation
    sft_rows = of_sft * fit.get("demonstration", fit["pair"])
    typical = median(answer for tokens, answer in answers if tokens <= context)
    new_tokens = min(max(ceil(1.25 * typical / 32) * 32, context // 4), context // 2)
    sampled = {f"{stage}.max_new_tokens": new_tokens for stage in ("ppo", "evaluate")}
    longest = {f"{stage}.max_tokens": context for stage in ("sft", "reward")}
    return {
        **SMALL,
        **sampled,
        **longest,
        "base.scratch.context": context,
        "sft.batch_size": sft_batch,
        "sft.micro_batch_size": sft_batch,
        "sft.epochs": epochs(SFT_STEPS, sft_rows, sft_batch),
        "reward.batch_size": reward_batch,
        "reward.epochs": epochs(REWARD_STEPS, of_reward * fit["pair"], reward_batch),
    }
