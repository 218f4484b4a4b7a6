"""`shared_body.py`: scalar models as adapters on the body of a policy compute what models of their own do."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlhf_core.config.lora import LoraSettings
from rlhf_core.errors import UserError
from rlhf_core.models.batch import pad_batch, response_logits, sequence_scores, state_values
from rlhf_core.models.hf import draw_head, fresh_head, load_scalar_model, save_checkpoint, scalar_model_of
from rlhf_core.models.lora import Adapter, active, active_adapters, add_lora
from rlhf_core.models.shared_body import (
    add_scalar_adapter,
    has_adapter,
    merged_scalar_model,
    read_adapter,
    recompute_with,
    save_adapter,
    shares_body,
)

Build = Callable[..., PreTrainedModel]
SETTINGS = LoraSettings(rank=4, alpha=8.0)
OTHER = LoraSettings(rank=2, alpha=2.0)
BATCH = pad_batch([[3, 9, 4], [3, 4]], [[20, 21, 1], [30]], 0)


def stir(adapter: Adapter, seed: int = 7) -> Adapter:
    """As if trained: every parameter of the adapter away from its start."""
    generator = torch.Generator().manual_seed(seed)
    moved = {name: p + 0.1 * torch.randn(p.shape, generator=generator) for name, p in adapter.state_dict().items()}
    adapter.load_state_dict(moved)
    return adapter


def head_for(model: PreTrainedModel) -> torch.nn.Linear:
    head = fresh_head(model)
    draw_head(head, 3)
    return head


def beside_a_policy(policy: PreTrainedModel) -> tuple[Adapter, Adapter]:
    """A stirred adapter of the policy, and one of a critic on the same body."""
    critic = add_scalar_adapter(policy, head_for(policy), OTHER, seed=2, name="critic")
    return stir(add_lora(policy, SETTINGS, seed=1)), stir(critic, 8)


def alone(base: PreTrainedModel, critic: Adapter) -> Adapter:
    """The same critic with a body of its own."""
    model = scalar_model_of(copy.deepcopy(base), head_for(base))
    adapter = add_lora(model, OTHER, seed=2)
    adapter.load_state_dict(critic.state_dict())
    return adapter


def gradients(loss: torch.Tensor, *adapters: Adapter) -> list[torch.Tensor]:
    loss.backward()
    return [p.grad.clone() for adapter in adapters for p in adapter.parameters() if p.grad is not None]


def loss_of(policy: PreTrainedModel, critic: PreTrainedModel) -> torch.Tensor:
    return response_logits(policy, BATCH).square().mean() + state_values(critic, BATCH).square().mean()


def test_policy_critic_and_reference_share_a_body_and_nothing_else(kind: str, build_lm: Build) -> None:
    """Each computes the very numbers that it computes with a body of its own, in any order."""
    base, own, policy = (build_lm(kind).requires_grad_(False) for _ in range(3))
    own_adapter = stir(add_lora(own, SETTINGS, seed=1))
    adapter, critic = beside_a_policy(policy)
    expected = response_logits(own, BATCH), state_values(alone(base, critic).model, BATCH)
    for _ in range(2):
        assert torch.equal(state_values(critic.model, BATCH), expected[1])
        assert torch.equal(response_logits(policy, BATCH), expected[0])
        with adapter.off():
            assert torch.equal(response_logits(policy, BATCH), response_logits(base, BATCH))
            assert torch.equal(state_values(critic.model, BATCH), expected[1])
        assert active_adapters(policy) == ["default"]
    assert adapter.state_dict().keys() == own_adapter.state_dict().keys()
    weights = set(policy.parameters()) | set(critic.model.parameters())
    added = len(adapter.parameters()) + len(critic.parameters())
    assert len(weights) == len(list(base.parameters())) + added


def test_the_gradients_are_those_of_two_bodies(kind: str, build_lm: Build) -> None:
    base, own, policy = (build_lm(kind).requires_grad_(False) for _ in range(3))
    own_adapter = stir(add_lora(own, SETTINGS, seed=1))
    adapter, critic = beside_a_policy(policy)
    lone = alone(base, critic)
    expected = gradients(loss_of(own, lone.model), own_adapter, lone)
    found = gradients(loss_of(policy, critic.model), adapter, critic)
    assert len(found) == len(expected) == len(adapter.parameters()) + len(critic.parameters())
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)


def test_a_pass_repeated_in_the_backward_pass_uses_the_adapter_of_the_forward_pass(build_lm: Build) -> None:
    """With activation checkpointing the critic's layers run again after the policy's."""

    def found(checkpointing: bool) -> list[torch.Tensor]:
        policy = build_lm().requires_grad_(False)
        adapters = beside_a_policy(policy)
        if checkpointing:
            options = {"use_reentrant": False, "context_fn": partial(recompute_with, policy)}
            policy.activation_checkpointing_enable(options)
            policy.train()
        return gradients(loss_of(policy, adapters[1].model), *adapters)

    for one, two in zip(found(checkpointing=True), found(checkpointing=False), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def test_the_layers_are_only_changed_where_another_adapter_becomes_active(
    build_lm: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass that recomputes activations enters the context in every layer."""
    policy, calls = build_lm().requires_grad_(False), []
    beside_a_policy(policy)
    monkeypatch.setattr("rlhf_core.models.lora.activate", lambda model, names: calls.append(list(names)))
    with active(policy, ["default"]):
        assert not calls
    with active(policy, ["critic"]):
        assert calls == [["critic"]]
    assert calls == [["critic"], ["default"]]


def test_a_merged_critic_takes_the_body_without_a_copy(
    tmp_path: Path, kind: str, build_lm: Build, tokenizer: Tokenizer
) -> None:
    policy = build_lm(kind).requires_grad_(False)
    _, critic = beside_a_policy(policy)
    values, embedding = state_values(critic.model, BATCH), policy.get_input_embeddings().weight
    assert shares_body(critic.model)
    merged = merged_scalar_model(critic)
    assert not shares_body(merged)
    assert merged.get_input_embeddings().weight is embedding
    assert not any("lora" in name for name in merged.state_dict())
    save_checkpoint(tmp_path / "critic", merged, tokenizer)
    torch.testing.assert_close(state_values(load_scalar_model(tmp_path / "critic"), BATCH), values, rtol=0, atol=1e-4)


def test_a_saved_adapter_scores_as_the_model_that_it_was_merged_into(
    tmp_path: Path, kind: str, build_lm: Build, tokenizer: Tokenizer
) -> None:
    """As the stage `reward` saves it and PPO reads it: frozen, and switched off between its passes."""
    base = build_lm(kind).requires_grad_(False)
    trained = stir(add_lora(scalar_model_of(copy.deepcopy(base), head_for(base)), SETTINGS, seed=1))
    assert not has_adapter(tmp_path)
    save_adapter(tmp_path, trained, SETTINGS)
    save_checkpoint(tmp_path, trained.merge(), tokenizer)
    body = build_lm(kind).requires_grad_(False)
    read = read_adapter(tmp_path, body, "reward")
    assert has_adapter(tmp_path)
    expected = sequence_scores(load_scalar_model(tmp_path), BATCH)
    torch.testing.assert_close(sequence_scores(read.model, BATCH), expected, rtol=0, atol=1e-4)
    assert torch.equal(response_logits(body, BATCH), response_logits(base, BATCH))
    assert not any(p.requires_grad for p in body.parameters())
    trainable = read_adapter(tmp_path, body, "critic", trainable=True)
    assert all(p.requires_grad for p in trainable.parameters())
    assert not any(p.requires_grad for p in read.parameters())


def test_an_adapter_of_another_body_is_refused(tmp_path: Path, build_lm: Build) -> None:
    save_adapter(tmp_path, add_lora(build_lm("gpt2"), SETTINGS, seed=1), SETTINGS)
    with pytest.raises(UserError, match="other layers or another rank"):
        read_adapter(tmp_path, build_lm("llama"), "reward")
