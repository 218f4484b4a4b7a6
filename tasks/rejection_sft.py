"""Stage `rejection_sft`: fine-tunes the SFT model on the best of its own answers by the reward model's score (rejection
sampling; Touvron et al. 2023, section 3.2.3)."""

from collections.abc import Sequence

from rlhf_core.data.tokenizer import closed, load_tokenizer, stop_ids
from rlhf_core.determinism import permutation
from rlhf_core.errors import UserError
from rlhf_core.models.hf import context_length, default_device, load_causal_lm, save_checkpoint, trainable, write_ends
from rlhf_core.models.precision import body_precision
from rlhf_core.sft import Demonstration, SFTResult, fine_tune
from tasks.datasets.jsonl import Row
from tasks.params.rejection_sft import RejectionParams
from tasks.stage.long_rows import fitting, prompt_encoder
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.candidates import Candidate, Kept, draw_candidates, reward_figures
from tasks.training.trainer_setup import last_means, log_table, tokens_read, training_run

SFT = "models/sft"
PROMPTS = "data/ingest/ppo_prompts.jsonl"
SAMPLES = "data/rejection_sft/samples.jsonl"
PLOT = "plots/rejection_sft.csv"
LOGGED = {"loss": "train_loss", "validation_loss": "validation_loss"}
SHORT_OF_MEMORY = "rejection_sft.training.micro_batch_size or rejection_sft.training.max_tokens"
SALT = 2**33
"""First number of every key, see `best_of_n.SALT`: the reward model learns from other answers to the same prompts."""


def execute(stage: Stage[RejectionParams]) -> None:
    """Make data/rejection_sft/samples.jsonl, models/rejection_sft, plots/rejection_sft.csv and
    metrics/rejection_sft.json."""
    params = stage.params
    assert params.training is not None  # required by the parameters if enabled
    run_ = training_run(stage, shown=["loss"])
    tokenizer = load_tokenizer(stage.root / SFT, trust_remote_code=trusts(stage))
    frozen, device = body_precision(stage.precision, params.training.lora), default_device()
    model = load_causal_lm(
        stage.root / SFT, trust_remote_code=trusts(stage), frozen=frozen, device=device, log=stage.log
    )
    limit = min(params.training.max_tokens, context_length(model))
    kept, too_long = fitting(
        stage, PROMPTS, stage.read(PROMPTS), prompt_encoder(tokenizer), limit, reserve=params.max_new_tokens
    )
    splits = assign_splits(len(kept), params.validation, stage.seed)
    candidates = draw_candidates(
        *(stage, model, tokenizer, kept, params.samples_per_prompt, params),
        lambda prompt, k: (SALT, stage.seed, prompt, k),
    )
    best = [best_of(group) for group in candidates]
    answers = closed((b.response for b in best), (b.ended for b in best), int(tokenizer.eos_token_id))
    parts = {
        split: [Demonstration(ids, a) for (_, ids), a, s in zip(kept, answers, splits, strict=True) if s == split]
        for split in ("train", "validation")
    }

    result = fine_tune(
        trainable(model),
        parts["train"],
        parts["validation"],
        params.training,
        int(tokenizer.pad_token_id),
        run_,
        SHORT_OF_MEMORY,
    )

    if params.stop_tokens:
        write_ends(model, tokenizer, stop_ids(tokenizer, model, params.stop_tokens))
    save_checkpoint(stage.out("models/rejection_sft"), model.cpu(), tokenizer)
    stage.outputs.write_csv(PLOT, log_table(result.log, LOGGED))
    stage.outputs.write_jsonl(SAMPLES, sample_rows(kept, candidates, best, splits))
    stage.write_metrics(
        {
            "enabled": True,
            **reward_figures(candidates, best),
            "missing_eos_share": sum(not b.ended for b in best) / len(best),
            **losses(result),
            "tokens_trained": tokens_read(result.log, sum(len(d.response) for d in parts["train"])),
            "prompts_too_long": too_long,
        }
    )


def assign_splits(count: int, validation: float, seed: int) -> list[str]:
    """train or validation for each prompt; at least one of each. Raises UserError for fewer than two prompts."""
    if count < 2:
        raise UserError(f"{PROMPTS}: rejection sampling needs two prompts at least; enlarge ingest.split.ppo")
    wanted = min(count - 1, max(1, round(validation * count)))
    chosen = set(permutation(count, seed)[:wanted])
    return ["validation" if place in chosen else "train" for place in range(count)]


def best_of(group: Sequence[Candidate]) -> Candidate:
    """The answer with the highest score, the first of equal ones; answers that ended come before those cut off."""
    return max(group, key=lambda candidate: (candidate.ended, candidate.reward))


def sample_rows(
    kept: Kept, candidates: Sequence[Sequence[Candidate]], best: Sequence[Candidate], splits: Sequence[str]
) -> list[Row]:
    """The kept answer to each prompt, with the mean score of all its answers."""
    return [
        {
            "prompt_id": row["prompt_id"],
            "prompt": row["prompt"],
            "response": chosen.text,
            "response_ids": chosen.response,
            "reward": chosen.reward,
            "mean_reward": sum(candidate.reward for candidate in group) / len(group),
            "ended": chosen.ended,
            "split": split,
        }
        for (row, _), group, chosen, split in zip(kept, candidates, best, splits, strict=True)
    ]


def losses(result: SFTResult) -> dict[str, float | int]:
    """Nats per response token: mean of the last ten batches; of the SFT model on validation answers; after training."""
    return {
        **last_means(result.log),
        "sft_validation_loss": result.base_validation_loss,
        "validation_loss": result.validation_loss,
        "best_step": result.best_step,
        "steps": result.steps,
    }
