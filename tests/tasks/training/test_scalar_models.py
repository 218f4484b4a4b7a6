"""`scalar_models.py`: reward models as models of their own, or as adapters on the SFT model."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.precision import Frozen
from rlhf_core.models.batch import pad_batch, sequence_scores
from rlhf_core.models.hf import load_causal_lm, save_checkpoint, scalar_model_from
from rlhf_core.models.lora import Adapter, add_lora
from rlhf_core.models.precision import autocast
from rlhf_core.models.shared_body import save_adapter, shares_body
from tasks.training.scalar_models import ScalarModels
from tests.tasks.conftest import TINY

BATCH = pad_batch([[3, 9, 4], [3, 4]], [[20, 21, 1], [30]], 0)
FROZEN: dict[str, Frozen] = {"nf4": "nf4", "none": "bfloat16"}


def stir(adapter: Adapter) -> Adapter:
    """As if trained."""
    generator = torch.Generator().manual_seed(7)
    adapter.load_state_dict(
        {name: p + 0.1 * torch.randn(p.shape, generator=generator) for name, p in adapter.state_dict().items()}
    )
    return adapter


@pytest.mark.quantize
@pytest.mark.parametrize("reward", FROZEN)
@pytest.mark.parametrize("ppo", FROZEN)
def test_a_reward_model_is_an_adapter_only_on_weights_like_those_below_which_it_was_trained(
    workshop: Path, reward: Literal["nf4", "none"], ppo: Literal["nf4", "none"]
) -> None:
    """On a policy's body in other bits it would be another reward model: there it has a body of its own."""
    settings, folder = LoraSettings(rank=4, alpha=8.0, quantize=reward), workshop / "models/reward"
    trained = stir(add_lora(scalar_model_from(workshop / "models/sft", 3, frozen=FROZEN[reward]), settings, seed=2))
    save_adapter(folder, trained, settings)
    with autocast("bfloat16", torch.device("cpu")), torch.no_grad():
        expected = sequence_scores(trained.model, BATCH)
    save_checkpoint(folder, trained.merge(), TINY.tiny_tokenizer())
    body = load_causal_lm(workshop / "models/sft", frozen=FROZEN[ppo])
    models = ScalarModels(precision="bfloat16", device=torch.device("cpu"), body=body)
    model = models.frozen(folder)
    assert shares_body(model) == (reward == ppo)
    with autocast("bfloat16", torch.device("cpu")), torch.no_grad():
        # bfloat16 rounds by up to 0.07, more or less with the CPU; this adapter on other weights is 0.6 away
        torch.testing.assert_close(sequence_scores(model, BATCH), expected, rtol=0, atol=0.1)
    lora = LoraSettings(rank=4, alpha=8.0, quantize=ppo)
    assert isinstance(models.critic_from_reward(folder, lora), Adapter) == (reward == ppo)
