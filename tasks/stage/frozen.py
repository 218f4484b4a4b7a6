"""Models that a stage uses and does not train."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlhf_core.models.hf import default_device, load_causal_lm, place
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts


def load_frozen(stage: Stage[Any], folder: Path) -> PreTrainedModel:
    """The language model in a folder, for inference: in the run's precision, loaded straight to the default device.
    Raises UserError, see `load_causal_lm`."""
    trusted, device, frozen = trusts(stage), default_device(), stage.precision
    model = load_causal_lm(folder, trust_remote_code=trusted, frozen=frozen, device=device, log=stage.log)
    return place(model, device)
