"""Frozen models in bfloat16, heads in float32, and weights that are read into the memory of a model."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models import packed
from rlhf_core.models.batch import pad_batch, predict, response_logits, sequence_scores
from rlhf_core.models.hf import (
    load_causal_lm,
    load_scalar_model,
    load_weights,
    save_checkpoint,
    save_weights,
    scalar_head,
    scalar_model_from,
    unique_weights,
)
from rlhf_core.models.packed import _equal, can_pack
from rlhf_core.models.precision import autocast, float32_weight, keep_float32

Build = Callable[..., PreTrainedModel]
BATCH = pad_batch([[3, 9, 4], [3, 4]], [[20, 21], [30, 31, 32]], 0)


def dtypes(model: PreTrainedModel) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


@torch.no_grad()
def test_rule_24_a_frozen_model_has_bfloat16_weights_and_float32_logits(
    kind: str, tmp_path: Path, build_lm: Build
) -> None:
    build_lm(kind).save_pretrained(tmp_path)
    exact, frozen = load_causal_lm(tmp_path), load_causal_lm(tmp_path, frozen="bfloat16")
    assert (dtypes(exact), dtypes(frozen)) == ({torch.float32}, {torch.bfloat16})
    expected, found = response_logits(exact, BATCH), response_logits(frozen, BATCH)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float()), "more than eight significant bits"
    assert torch.allclose(found, expected, atol=0.05 * expected.abs().max().item())


@torch.no_grad()
def test_rule_24_the_head_of_a_frozen_scalar_model_is_that_of_its_folder(
    kind: str, tmp_path: Path, build_scalar: Build
) -> None:
    """Its numbers are not rounded with those of the body, nor read from the adapter beside the model."""
    model = build_scalar(kind)
    model.save_pretrained(tmp_path)
    (tmp_path / "lora.safetensors").write_bytes(b"not the model's")
    frozen = load_scalar_model(tmp_path, frozen="bfloat16")
    assert torch.equal(scalar_head(frozen).weight, scalar_head(model).weight)
    assert getattr(frozen, frozen.base_model_prefix).dtype == torch.bfloat16
    expected, found = sequence_scores(model.eval(), BATCH), sequence_scores(frozen, BATCH)
    assert (found.dtype, torch.equal(found, found.bfloat16().float())) == (torch.float32, False)
    assert torch.allclose(found, expected, atol=0.05)


def test_rule_24_a_fresh_head_over_a_frozen_body_is_float32(tmp_path: Path, build_lm: Build) -> None:
    build_lm().save_pretrained(tmp_path)
    exact, frozen = scalar_model_from(tmp_path, 1), scalar_model_from(tmp_path, 1, frozen="bfloat16")
    assert torch.equal(scalar_head(frozen).weight, scalar_head(exact).weight)


@torch.no_grad()
def test_rule_24_scores_are_float32_under_autocast(build_scalar: Build) -> None:
    model = build_scalar().eval()
    with autocast("bfloat16", model.device):
        found = sequence_scores(model, BATCH)
    assert not torch.equal(found, found.bfloat16().float())
    assert not torch.equal(found, sequence_scores(model, BATCH)), "the body computes in bfloat16"


@torch.no_grad()
def test_a_copy_of_a_model_computes_with_its_own_head(build_lm: Build) -> None:
    model = build_lm()
    keep_float32(model.get_output_embeddings())
    other = copy.deepcopy(model)
    other.get_output_embeddings().weight.zero_()
    assert response_logits(other, BATCH).abs().max() == 0
    assert response_logits(model, BATCH).abs().max() > 0


@torch.no_grad()
def test_the_float32_copy_of_a_frozen_head_is_kept_until_its_weight_changes(build_lm: Build) -> None:
    model = build_lm().bfloat16().requires_grad_(False)
    head = model.get_output_embeddings()
    keep_float32(head)
    kept = float32_weight(head)
    assert float32_weight(head) is kept
    before = response_logits(model, BATCH)
    other = copy.deepcopy(model)
    head.weight.mul_(2)
    assert torch.equal(float32_weight(head), head.weight.float())
    assert not torch.equal(response_logits(model, BATCH), before)
    assert torch.equal(response_logits(other, BATCH), before)
    assert "_leash_float32" not in "".join(model.state_dict())
    model.float()
    assert float32_weight(head) is not kept
    assert float32_weight(head).data_ptr() == head.weight.data_ptr()


def test_the_copy_of_a_head_with_a_gradient_is_kept_while_none_is_recorded(build_lm: Build) -> None:
    """A model below adapters, which samples before it is trained."""
    head = build_lm().bfloat16().requires_grad_(True).get_output_embeddings()
    with torch.no_grad():
        kept = float32_weight(head)
        assert float32_weight(head) is kept
    assert float32_weight(head).requires_grad


def test_attention_of_short_sequences_has_another_backward_pass_under_autocast(kind: str, build_lm: Build) -> None:
    """Packed hidden states are to the bit those of torch's attention; gradients are those of float32 up to the rounding
    of the products."""
    model = build_lm(kind)
    assert can_pack(model)

    def passed() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        hidden = predict(model, BATCH).hidden
        hidden.float().sin().sum().backward()
        return hidden.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    exact, expected = passed()
    with pytest.MonkeyPatch.context() as patch, autocast("bfloat16", model.device):
        short, found = passed()
        patch.setattr(packed, "LONGEST_AS_PRODUCTS", 0)
        long, other = passed()
    assert torch.equal(short, long)
    assert not torch.equal(found, other)
    assert (short - exact).norm() <= 0.02 * exact.norm()
    assert (found - expected).norm() <= 1.2 * (other - expected).norm() <= 0.1 * expected.norm()


def test_bfloat16_models_pack(build_lm: Build) -> None:
    assert can_pack(build_lm().bfloat16())


def test_packed_states_of_few_bits_are_compared_token_by_token() -> None:
    """A number of a hundred hides the others in a comparison by the largest."""
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    states[0, 0] = 100.0
    other = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    other[0, 0] = 100.0
    assert _equal((states * 1.004).bfloat16(), states.bfloat16())
    assert not _equal(other.bfloat16(), states.bfloat16())
    assert _equal(states + 1e-5, states)
    assert not _equal(states + 0.1, states)


def test_weights_are_read_into_the_memory_of_a_model(tmp_path: Path, build_lm: Build) -> None:
    source, target = build_lm(seed=1), build_lm(seed=2)
    places = {name: tensor.data_ptr() for name, tensor in unique_weights(target).items()}
    save_weights(tmp_path / "half", unique_weights(source), torch.bfloat16)
    save_weights(tmp_path / "whole", unique_weights(source))
    load_weights(tmp_path / "half", unique_weights(target))
    for name, tensor in unique_weights(target).items():
        assert torch.equal(tensor, unique_weights(source)[name].bfloat16().to(tensor.dtype))
        assert tensor.data_ptr() == places[name]
    half, whole = ((tmp_path / name).stat().st_size for name in ("half", "whole"))
    assert half < 0.6 * whole
    with pytest.raises(KeyError):
        load_weights(tmp_path / "whole", {})


def test_a_view_is_saved_without_what_lies_around_it(tmp_path: Path) -> None:
    wide = torch.arange(1000.0)
    save_weights(tmp_path / "file", {"a": wide[:3], "b": wide[3:6]})
    into = {"a": torch.zeros(3), "b": torch.zeros(3)}
    load_weights(tmp_path / "file", into)
    assert into["b"].tolist() == [3.0, 4.0, 5.0]


def test_a_saved_folder_of_a_trained_model_is_float32(tmp_path: Path, build_lm: Build, tokenizer: object) -> None:
    """With the bits below those of bfloat16."""
    save_checkpoint(tmp_path, build_lm(), tokenizer)  # type: ignore[arg-type]
    weight = load_causal_lm(tmp_path).get_input_embeddings().weight
    assert not torch.equal(weight, weight.bfloat16().float())
