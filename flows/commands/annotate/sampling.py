"""Answers of a model to prompts of the project, for people to compare."""

import random
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch

from flows.commands.compare_models.judges import load_model
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import decode_response, encode_prompt, stop_ids
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from rlhf_core.models.sampling import sample
from rlhf_core.progress import listening
from tasks.datasets.jsonl import iter_jsonl, write_jsonl
from tasks.params.loader import parse, read_yaml
from tasks.stage.progress import Watch

FILES = ("preference_prompts", "ppo_prompts")
"""Files of data/ingest with prompts for training and validation; held-out prompts are in another file."""
KEY = 0xA220
"""Beginning of the keys of its random numbers, which differ from those of the stages."""
ROWS = 64
"""Answers that are sampled together, unless `ppo.sampler_rows` says otherwise."""


def sample_answers(root: Path, folder: Path, prompts: int, answers: int, seed: int, path: Path) -> None:
    """Write to `path` so many answers of the model in `folder` to each of `prompts` prompts, chosen by `seed` (all
    where there are fewer), with PPO's temperature, lengths and stop tokens. Progress on stderr. Labels of validation
    prompts are validation pairs. Raises UserError where there is no model, no prompt, or none that fits."""
    config = parse(PPOConfig, read_yaml(root / "params.yaml").get("ppo") or {}, "ppo", root / "params.yaml")
    found: dict[str, Conversation] = {}
    for file in (root / f"data/ingest/{name}.jsonl" for name in FILES):
        found |= {row["prompt_id"]: row["prompt"] for _, row in iter_jsonl(file)} if file.is_file() else {}
    if not found:
        raise UserError(f"{root / 'data/ingest'}: no prompts; call `leash run ingest` first")
    order = sorted(found)
    random.Random(seed).shuffle(order)
    make_deterministic(seed, torch.get_num_threads())
    watch = Watch("[annotate]", 5.0, lambda text: print(f"WARNING {text}"))
    with redirect_stdout(sys.stderr), listening(watch):
        model = load_model(folder)
        stops = stop_ids(model.tokenizer, model.model, config.stop_tokens)
        longest = min(model.context - config.max_new_tokens, config.max_prompt_tokens or model.context)
        ids: dict[int, list[int]] = {}
        for place, name in enumerate(order):
            tokens = encode_prompt(model.tokenizer, found[name])
            if len(tokens) <= longest:
                ids[place] = tokens
            if len(ids) == prompts:
                break
        if not ids:
            raise UserError(
                f"{folder}: no prompt has {longest} tokens or fewer, which leave room for ppo.max_new_tokens: "
                f"{config.max_new_tokens} in its context of {model.context}; lower it, or give shorter prompts"
            )
        drawn = sample(
            model.model, [tokens for tokens in ids.values() for _ in range(answers)],
            [(KEY, seed, place, number) for place in ids for number in range(answers)],
            max_new_tokens=config.max_new_tokens, temperature=config.temperature, stop_ids=stops,
            pad_id=int(model.tokenizer.pad_token_id), batch_size=config.sampler_rows or ROWS,
        )  # fmt: skip
        print("\r\033[K" if sys.stderr.isatty() else "", end="", flush=True)
    names = [order[place] for place in ids for _ in range(answers)]
    rows = [
        {"prompt": found[name], "response": text, "ended": ended}
        for name, response, ended in zip(names, drawn.responses, drawn.ended, strict=True)
        if (text := decode_response(model.tokenizer, response, stops)) and "\0" not in text  # ingest drops those
    ]
    if not rows:
        raise UserError(f"{folder}: all its answers are empty; choose another model")
    with atomic(path) as fresh:
        write_jsonl(fresh, rows)
