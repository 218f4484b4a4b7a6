"""Answers of a model to training prompts of the project, for people to compare."""

import random
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch

from flows.commands.chat import project_settings
from flows.commands.compare_models.judges import load_model
from rlhf_core.data.tokenizer import decode_response, encode_prompt
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from rlhf_core.inspect.dialogue import require_language_model
from rlhf_core.models.sampling import sample
from rlhf_core.progress import listening
from tasks.datasets.jsonl import Row, iter_jsonl, write_jsonl
from tasks.params.loader import read_yaml
from tasks.stage.progress import Watch

FILES = ("preference_prompts", "ppo_prompts")
"""Of data/ingest, with training prompts; no held-out prompt is among them."""
BATCH = 64


def sample_answers(root: Path, folder: Path, prompts: int, answers: int, seed: int, path: Path) -> None:
    """Write to `path` so many answers of the model in `folder` to each of `prompts` training prompts, chosen by `seed`
    (all where there are fewer), sampled as PPO samples: `ppo.temperature`, `ppo.max_new_tokens`. Progress on stderr.
    Raises UserError where there is no model or no prompt that fits its context."""
    require_language_model(folder, project_settings(folder)[0])
    params = read_yaml(root / "params.yaml").get("ppo") or {}
    temperature, longest = float(params.get("temperature", 1.0)), int(params.get("max_new_tokens", 256))
    found = {row["prompt_id"]: row["prompt"] for row in _rows(root) if row.get("split") != "validation"}
    if not found:
        raise UserError(f"{root / 'data/ingest'}: no training prompts; call `leash run ingest` first")
    make_deterministic(seed, torch.get_num_threads())
    with redirect_stdout(sys.stderr), listening(Watch(f"[{folder}]", 5.0, print)):
        model = load_model(folder)
        ids = {name: encode_prompt(model.tokenizer, prompt) for name, prompt in sorted(found.items())}
        fitting = [name for name in ids if len(ids[name]) + longest <= model.context]
        if not fitting:
            raise UserError(
                f"{folder}: its context holds {model.context} tokens, too few for any prompt and {longest} new tokens; "
                "lower ppo.max_new_tokens"
            )
        chosen = random.Random(seed).sample(fitting, min(prompts, len(fitting)))
        drawn = sample(
            model.model, [ids[name] for name in chosen for _ in range(answers)],
            [(seed, place, number) for place in range(len(chosen)) for number in range(answers)],
            max_new_tokens=longest, temperature=temperature, stop_ids=model.stop_ids,
            pad_id=int(model.tokenizer.pad_token_id), batch_size=BATCH,
        )  # fmt: skip
    texts = [decode_response(model.tokenizer, response, model.stop_ids) for response in drawn.responses]
    rows = [
        {"prompt": found[chosen[i // answers]], "response": text, "ended": ended}
        for i, (text, ended) in enumerate(zip(texts, drawn.ended, strict=True))
        if text
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as fresh:
        write_jsonl(fresh, rows)


def _rows(root: Path) -> list[Row]:
    places = [root / f"data/ingest/{name}.jsonl" for name in FILES]
    return [row for place in places if place.is_file() for _, row in iter_jsonl(place)]
