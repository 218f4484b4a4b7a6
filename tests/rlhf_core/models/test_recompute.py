"""Activation checkpointing of every layer, or of every n-th."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf_core.config.precision import Recomputed
from rlhf_core.errors import UserError
from rlhf_core.models.recompute import recomputing

IDS = torch.arange(3, 33).view(2, 15)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Four layers."""
    torch.manual_seed(1)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, num_key_value_heads=2, **size)).eval()


def saved_and_gradient(model: PreTrainedModel, layers: Recomputed) -> tuple[int, Tensor]:
    """Bytes of activations that the graph keeps, and the gradient."""
    weights, kept = {parameter.data_ptr() for parameter in model.parameters()}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    model.zero_grad()
    with recomputing([model], layers):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=IDS, use_cache=False).logits.logsumexp(dim=-1).sum()
        total = sum(kept.values())
        loss.backward()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_fewer_activations_are_kept_and_gradients_are_the_same(model: PreTrainedModel) -> None:
    everything, gradient = saved_and_gradient(model, False)
    found = {layers: saved_and_gradient(model, layers) for layers in (True, 1, 2, 4)}
    assert found[True][0] == found[1][0] < found[2][0] < found[4][0] < everything
    for _, other in found.values():
        assert torch.allclose(other, gradient, rtol=1e-5, atol=1e-7)


def test_the_mode_of_the_model_is_as_before(model: PreTrainedModel) -> None:
    for mode in (True, False):
        model.train(mode)
        with recomputing([model], 2):
            assert model.training
            assert model.is_activation_checkpointing
        assert (model.training, model.is_activation_checkpointing) == (mode, False)


def test_an_architecture_without_it_is_refused_in_one_line(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with (
        pytest.raises(UserError, match="gradient_checkpointing: LlamaForCausalLM does not support"),
        recomputing([model], True),
    ):
        pass


@pytest.mark.parametrize("layers", [True, 2])
def test_ppo_takes_every_nth(layers: Recomputed, make_trainer: Callable[..., object]) -> None:
    trainer = make_trainer(gradient_checkpointing=layers)
    with trainer.models.training():  # type: ignore[attr-defined]
        flags = [m.gradient_checkpointing for m in trainer.models.policy.modules() if hasattr(m, "mlp")]  # type: ignore[attr-defined]
    assert flags == [place % int(layers) == 0 for place in range(len(flags))]
