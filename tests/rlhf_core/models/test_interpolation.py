"""Interpolated policies: the ends, the middle, and models that do not fit."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf_core.errors import UserError
from rlhf_core.models.hf import unique_weights
from rlhf_core.models.interpolation import interpolate

Build = Callable[..., PreTrainedModel]


def test_the_ends_are_the_models_and_the_middle_is_their_mean(build_lm: Build) -> None:
    start, model = build_lm(seed=1), build_lm(seed=2)
    before = [{name: t.clone() for name, t in unique_weights(each).items()} for each in (start, model)]
    for eta, expected in ((0.0, start), (1.0, model)):
        found, wanted = unique_weights(interpolate(start, model, eta)), unique_weights(expected)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for name, tensor in unique_weights(interpolate(start, model, 0.25)).items():
        assert torch.allclose(tensor, 0.75 * before[0][name] + 0.25 * before[1][name], atol=1e-6)
    for each, kept in zip((start, model), before, strict=True):
        assert all(torch.equal(t, kept[name]) for name, t in unique_weights(each).items()), "neither is changed"


@pytest.mark.parametrize("eta", [-0.1, 1.1, float("nan")])
def test_an_eta_outside_0_and_1_is_refused(build_lm: Build, eta: float) -> None:
    with pytest.raises(UserError, match=r"from 0 .* to 1"):
        interpolate(build_lm(seed=1), build_lm(seed=2), eta)


def test_models_of_other_shapes_are_refused(build_lm: Build) -> None:
    model = build_lm(seed=1)
    config = LlamaConfig(**model.config.to_dict() | {"intermediate_size": 2 * model.config.intermediate_size})
    with pytest.raises(UserError, match="both must be of one architecture"):
        interpolate(LlamaForCausalLM(config), model, 0.5)
    deeper = LlamaConfig(**model.config.to_dict() | {"num_hidden_layers": 1 + model.config.num_hidden_layers})
    with pytest.raises(UserError, match="missing"):
        interpolate(model, LlamaForCausalLM(deeper), 0.5)
