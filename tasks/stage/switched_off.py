"""The empty outputs of a stage that is switched off: the graph is the same whether an alternative runs or not."""

from pathlib import Path

from tasks.params.methods import METHODS
from tasks.stage import provenance
from tasks.stage.outputs import Outputs

NOTE = "README.md"
OF_PAIRS = ("step", "loss", "accuracy", "margin")
OF_PPO = (
    *("step", "reward_raw", "gold", "kl", "response_tokens_mean", "update_kl", "entropy", "value_loss"),
    *("explained_variance", "clip_fraction", "clip_fraction_last_epoch", "repeated_ngram_share"),
    *("repeating_answer_share", "missing_eos_share", "min_token_reward", "engine_mismatch_k3"),
    *("grad_norm_policy", "grad_norm_critic"),
)
COLUMNS = {
    **{f"plots/{method.name}.csv": OF_PPO if method.variant_of_ppo else OF_PAIRS for method in METHODS},
    "plots/rejection_sft.csv": ("step", "train_loss", "validation_loss"),
    "plots/reward.csv": ("step", "loss", "accuracy"),
    "plots/reward_calibration.csv": ("bin_low", "bin_high", "predicted", "observed", "pairs"),
    "plots/reward_margins.csv": ("low", "high", "accuracy", "accuracy_low", "accuracy_high", "pairs"),
    "plots/reward_scores.csv": ("low", "high", "chosen", "rejected"),
}
"""The header of each table of a stage that can be switched off."""


def write_switched_off(outputs: Outputs, stage: str, why: str) -> None:
    """Write all declared outs.

    A folder gets a README.md of one line, metrics `{"enabled": false}`, a JSONL file no row, a CSV file its header.
    Raises ValueError for a table that `COLUMNS` lacks, and for an out of another kind.
    """
    for out in outputs.declared:
        name = Path(out).name
        if out == f"metrics/{stage}.json":
            outputs.write_json(out, {"enabled": False})
        elif name.endswith(provenance.SUFFIX):
            continue  # written as that of any model
        elif name.endswith(".jsonl"):
            outputs.write_jsonl(out, [])
        elif out in COLUMNS:
            outputs.path(out).write_text(",".join(COLUMNS[out]) + "\n", encoding="utf-8")
        elif "." not in name:
            outputs.path(out).mkdir(parents=True)
            note = f"There is no model here: {stage} is switched off ({why}).\n"
            (outputs.path(out) / NOTE).write_text(note, encoding="utf-8")
        else:
            raise ValueError(f"{out}: no rule for what it holds where {stage} is switched off")
