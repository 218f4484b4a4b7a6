"""`head.py`: hidden states and output layer together are the model's own logits, for each architecture; where they are
not, its own logits are read."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf_core.models import head as module
from rlhf_core.models.batch import pad_batch, predict, response_logits
from rlhf_core.models.head import LastStep, Predictions
from rlhf_core.models.token_logprobs import exact_kl, logprobs_and_entropy

SIZE = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
LLAMA = SIZE | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT = SIZE | {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0}
KINDS: dict[str, tuple[PreTrainedConfig, LastStep]] = {
    "llama tied": (LlamaConfig(**LLAMA, tie_word_embeddings=True), LastStep()),
    "llama untied": (LlamaConfig(**LLAMA, tie_word_embeddings=False), LastStep()),
    "gpt2": (
        GPT2Config(**SIZE, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        LastStep(),
    ),
    "opt": (OPTConfig(**OPT), LastStep()),
    "opt with a projection": (OPTConfig(**OPT, word_embed_proj_dim=16), LastStep()),
    "gemma2": (
        Gemma2Config(**LLAMA, head_dim=8, num_key_value_heads=2, final_logit_softcapping=2.0, sliding_window=4),
        LastStep(cap=2.0),
    ),
    "cohere": (CohereConfig(**LLAMA, logit_scale=0.25), LastStep(0.25)),
    "granite": (GraniteConfig(**LLAMA, logits_scaling=8.0), LastStep(0.125)),
}
BATCH = pad_batch([[3, 9, 4], [3, 8, 7, 6, 4], [3, 9, 4]], [[20, 21, 1], [30], [20, 22]], 0)


@pytest.fixture(params=KINDS)
def built(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, LastStep]:
    config, step = KINDS[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # large enough for the caps to matter
        nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model, step


def own_logits(model: PreTrainedModel) -> Tensor:
    """By transformers' forward pass over each row alone."""
    parts = []
    for ids, attention, mask in zip(BATCH.input_ids, BATCH.attention_mask, BATCH.mask, strict=True):
        real, count = ids[attention.bool()], int(mask.sum())
        parts.append(model(real[None]).logits[0, -count - 1 : -1])
    return torch.cat(parts)


def loss(logits: Tensor) -> Tensor:
    logprobs = (logits / 0.7).log_softmax(dim=-1)
    chosen = logprobs.gather(1, BATCH.response_tokens[:, None])[:, 0]
    return (chosen * torch.linspace(-1, 2, len(chosen))).sum() - 0.3 * (logprobs.exp() * logprobs).sum()


def gradients(model: PreTrainedModel, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tokens", [2, 100])
def test_values_and_gradients_are_those_of_the_models_own_logits(
    built: tuple[PreTrainedModel, LastStep], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all parameters: tied embeddings get the gradients of both uses."""
    model, step = built
    monkeypatch.setattr(module, "CHUNK_ON_CPU", 60 * tokens)
    predictions = predict(model, BATCH)
    assert predictions.head.weight is model.get_output_embeddings().weight
    assert predictions.head.step == step
    torch.testing.assert_close(predictions.logits(), own_logits(model), rtol=1e-5, atol=1e-5)
    logprobs, entropy = logprobs_and_entropy(predictions, BATCH.response_tokens, 0.7)
    value = (logprobs * torch.linspace(-1, 2, len(logprobs))).sum() + 0.3 * entropy.sum()
    found, expected = gradients(model, value), gradients(model, loss(own_logits(model)))
    assert found.keys() == expected.keys()
    total = torch.cat([x.flatten() for x in expected.values()]).norm()
    for name, slope in expected.items():
        assert (found[name] - slope).norm() <= 1e-5 * slope.norm() + 1e-6 * total, name


@torch.no_grad()
def test_a_layer_of_zeros_hides_no_last_step(built: tuple[PreTrainedModel, LastStep]) -> None:
    """An unknown step is noticed although every logit is 0."""
    model, step = built
    model.get_output_embeddings().weight.zero_()
    assert predict(model, BATCH).head.step == step
    other = with_another_step(model)
    assert predict(other, BATCH).head.weight is None
    other.get_output_embeddings().weight.normal_()
    torch.testing.assert_close(response_logits(other, BATCH), own_logits(other), rtol=1e-5, atol=1e-5)


def with_another_step(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose logits are 1.5 times those that its configuration describes."""
    model = copy.deepcopy(model)
    forward = model.forward

    def scaled(*arguments: object, **options: object) -> object:
        output = forward(*arguments, **options)
        output.logits = 1.5 * output.logits
        return output

    model.forward = scaled
    return model


class Doubled(nn.Linear):
    """An output layer that is not a product with its weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def other_layer(model: PreTrainedModel) -> PreTrainedModel:
    layer = Doubled(32, 60, bias=False)
    nn.init.normal_(layer.weight)
    model.set_output_embeddings(layer)
    return model


def patched_layer(model: PreTrainedModel) -> PreTrainedModel:
    """As accelerate does to load weights at each call."""
    layer = model.get_output_embeddings()
    forward = layer.forward
    layer.forward = lambda hidden: 2 * forward(hidden)
    return model


def ignores_logits_to_keep(model: PreTrainedModel) -> PreTrainedModel:
    forward = model.forward
    model.forward = lambda *a, logits_to_keep=0, **options: forward(*a, **options)
    return model


@pytest.mark.parametrize("change", [with_another_step, other_layer, patched_layer, ignores_logits_to_keep])
def test_any_other_model_gives_its_own_logits(
    change: Callable[[PreTrainedModel], PreTrainedModel], build_lm: Callable[..., PreTrainedModel]
) -> None:
    """With their gradients, and the last hidden states for a shared critic."""
    model = change(build_lm("qwen2"))
    predictions = predict(model, BATCH)
    torch.testing.assert_close(predictions.logits(), own_logits(model), rtol=1e-5, atol=1e-5)
    logprobs, entropy = logprobs_and_entropy(predictions, BATCH.response_tokens, 0.7)
    value = (logprobs * torch.linspace(-1, 2, len(logprobs))).sum() + 0.3 * entropy.sum()
    found, expected = gradients(model, value), gradients(model, loss(own_logits(model)))
    for name, slope in expected.items():
        torch.testing.assert_close(found[name], slope, rtol=1e-4, atol=1e-4 * slope.abs().max().item())
    states = predictions.states
    assert states is not None
    torch.testing.assert_close(states, predict(build_lm("qwen2"), BATCH).hidden, rtol=0, atol=1e-5)
    assert exact_kl(predictions, Predictions(predictions.logits().detach()), 1.0).abs().max() < 1e-6


def test_no_forward_pass_makes_logits(build_lm: Callable[..., PreTrainedModel]) -> None:
    model = build_lm()
    predict(model, BATCH)  # decides
    sizes: list[int] = []
    model.register_forward_hook(lambda _, __, output: sizes.append(output.logits.numel()))
    predict(model, BATCH)
    assert sizes == [0]
    assert model(torch.tensor([[3, 4]])).logits.shape == (1, 2, 60)


def test_an_error_leaves_the_output_layer_as_it_was(build_lm: Callable[..., PreTrainedModel]) -> None:
    model = build_lm()
    predict(model, BATCH)
    hook = model.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        predict(model, BATCH)
    hook.remove()
    torch.testing.assert_close(response_logits(model, BATCH), own_logits(model), rtol=1e-5, atol=1e-5)
