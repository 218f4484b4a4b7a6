"""`lora.py`: adapters in a plain model, switched off to the bit, and merged into a folder that needs no peft."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlhf_core.config.lora import LoraSettings
from rlhf_core.errors import UserError
from rlhf_core.models.batch import TokenBatch, pad_batch, response_logits, sequence_scores, state_values
from rlhf_core.models.hf import load_scalar_model, save_checkpoint, scalar_head
from rlhf_core.models.lora import Adapter, _layers, add_lora
from rlhf_core.models.sampling import Sampled, sample

Build = Callable[..., PreTrainedModel]
SETTINGS = LoraSettings(rank=4, alpha=8.0)
ADAPTED_SIZES = {
    # per layer: sum over its linear layers of inputs + outputs; d = 32, grouped keys 16, inner 48 (GPT-2: 128)
    "gpt2": (32 + 96) + (32 + 32) + (32 + 128) + (128 + 32),
    "llama": 4 * (32 + 32) + 3 * (32 + 48),
    "qwen2": 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48),
    "qwen3": 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48),
}


def batch() -> TokenBatch:
    return pad_batch([[3, 9, 4], [3, 4]], [[20, 21, 1], [30]], 0)


def stir(adapter: Adapter) -> Adapter:
    """As if trained: every parameter of the adapter away from its start."""
    generator = torch.Generator().manual_seed(7)
    moved = {name: p + 0.1 * torch.randn(p.shape, generator=generator) for name, p in adapter.state_dict().items()}
    adapter.load_state_dict(moved)
    return adapter


def sampled(model: PreTrainedModel) -> Sampled:
    keys = [(1, 2), (1, 3)]
    return sample(
        model,
        [[3, 9, 4], [3, 4]],
        keys,
        max_new_tokens=6,
        temperature=1.0,
        stop_ids=frozenset({1}),
        pad_id=0,
        batch_size=2,
    )


def bytes_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    """The base for comparisons: torch rounds a product with one row differently where the weight requires a gradient,
    even under no_grad."""
    return model.requires_grad_(False)


def test_the_model_stays_a_plain_model_with_the_base_models_output(kind: str, build_lm: Build) -> None:
    base, model = frozen(build_lm(kind)), build_lm(kind)
    add_lora(model, SETTINGS, seed=1)
    assert type(model) is type(base)
    assert model.base_model_prefix == base.base_model_prefix
    assert not model.training
    assert torch.equal(response_logits(model, batch()), response_logits(base, batch()))
    assert sampled(model) == sampled(base)


def test_a_scalar_model_keeps_its_head_and_its_values(kind: str, build_scalar: Build) -> None:
    base, model = build_scalar(kind), build_scalar(kind)
    add_lora(model, SETTINGS, seed=1)
    assert type(scalar_head(model)) is torch.nn.Linear
    assert scalar_head(model).weight.requires_grad
    assert torch.equal(state_values(model, batch()), state_values(base, batch()))


def test_only_adapters_train_and_neither_output_layer_nor_head_is_adapted(
    kind: str, build_lm: Build, build_scalar: Build
) -> None:
    for model, head in ((build_lm(kind), 0), (build_scalar(kind), 32)):
        add_lora(model, SETTINGS, seed=1)
        trainable = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        assert sum(trainable.values()) == 2 * SETTINGS.rank * ADAPTED_SIZES[kind] + head
        assert {name for name in trainable if "lora_" not in name} == ({"score.weight"} if head else set())
        outputs = model.get_output_embeddings()
        assert outputs is None or type(outputs) is torch.nn.Linear
        assert type(model.get_input_embeddings()) is torch.nn.Embedding


def test_a_deeper_model_is_adapted_in_the_same_layers(build_scalar: Build) -> None:
    """From twenty layers on, peft shortens the list of names that it is given."""
    config = copy.deepcopy(build_scalar().config)
    config.num_hidden_layers = 4
    config.layer_types = None
    model = AutoModelForSequenceClassification.from_config(config)
    layers = len([name for name in add_lora(model, SETTINGS, seed=1).state_dict() if "lora_A" in name])
    assert layers == 4 * 7
    assert type(scalar_head(model)) is torch.nn.Linear


def test_equal_seeds_give_equal_adapters_and_leave_the_global_random_state(build_lm: Build) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    models = [build_lm() for _ in range(3)]
    torch.manual_seed(11)
    one = add_lora(models[0], SETTINGS, seed=1).state_dict()
    assert torch.equal(torch.rand(3), expected)
    assert equal(one, add_lora(models[1], SETTINGS, seed=1).state_dict())
    assert not equal(one, add_lora(models[2], SETTINGS, seed=2).state_dict())
    spread = torch.cat([a.flatten() * a.shape[1] ** 0.5 for name, a in one.items() if "lora_A" in name])
    assert spread.abs().max() <= 1.0
    assert spread.std().item() == pytest.approx(3**-0.5, rel=0.05)


def test_an_adapter_switched_off_is_the_base_bit_for_bit(kind: str, build_lm: Build) -> None:
    """The reference of PPO: no second model in memory."""
    base, model = frozen(build_lm(kind)), build_lm(kind)
    adapter = stir(add_lora(model, SETTINGS, seed=1))
    adapted = response_logits(model, batch())
    reference = response_logits(base, batch())
    assert (adapted - reference).abs().max() > 0.01
    with adapter.off() as off:
        assert off is model
        assert torch.equal(response_logits(off, batch()), reference)
        assert sampled(off) == sampled(base)
    assert torch.equal(response_logits(model, batch()), adapted)


def test_off_is_nested_and_ends_with_an_exception(build_lm: Build) -> None:
    base, model = build_lm(), build_lm()
    adapter = stir(add_lora(model, SETTINGS, seed=1))
    adapted, reference = response_logits(model, batch()), response_logits(base, batch())
    with adapter.off():
        with adapter.off():
            pass
        assert torch.equal(response_logits(model, batch()), reference)
        with pytest.raises(KeyError), adapter.off():
            raise KeyError
        assert torch.equal(response_logits(model, batch()), reference)
    assert torch.equal(response_logits(model, batch()), adapted)
    with pytest.raises(KeyError), adapter.off():
        raise KeyError
    assert torch.equal(response_logits(model, batch()), adapted)


def test_off_between_forward_and_backward_changes_no_gradient(build_lm: Build) -> None:
    """As the KL in the loss reads the reference: after the policy's forward pass, before its backward pass."""

    def gradients(interrupted: bool) -> dict[str, torch.Tensor]:
        model = build_lm()
        adapter = stir(add_lora(model, SETTINGS, seed=1))
        loss = response_logits(model, batch()).square().mean()
        if interrupted:
            with adapter.off():
                response_logits(model, batch())
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(interrupted=False)
    assert len(expected) == 2 * 2 * 7
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    assert equal(gradients(interrupted=True), expected)


def test_off_leaves_a_frozen_model_frozen(build_lm: Build) -> None:
    model = build_lm()
    adapter = add_lora(model, SETTINGS, seed=1)
    model.requires_grad_(False)
    with adapter.off():
        pass
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_training_moves_the_adapter_and_not_the_base(kind: str, build_scalar: Build) -> None:
    model = build_scalar(kind)
    before = bytes_of(model)
    adapter = add_lora(model, SETTINGS, seed=1)
    start = {name: p.clone() for name, p in adapter.state_dict().items()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # A moves from the second step on: B is 0 at the first
        optimizer.zero_grad()
        sequence_scores(model, batch()).square().mean().backward()
        optimizer.step()
    assert not any(torch.equal(start[name], p) for name, p in adapter.state_dict().items())
    after = {name.replace(".base_layer", ""): p for name, p in model.state_dict().items() if "lora_" not in name}
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"score.weight"}
    assert before.keys() == after.keys()


def test_activation_checkpointing_gives_the_adapters_the_same_gradient(kind: str, build_lm: Build) -> None:
    """The frozen embeddings need no gradient; the layers behind them still get theirs."""

    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = build_lm(kind)
        stir(add_lora(model, SETTINGS, seed=1))
        if checkpointing:
            model.activation_checkpointing_enable()
        model.train()
        response_logits(model, batch()).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(checkpointing=False)
    found = gradients(checkpointing=True)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_a_merged_policy_is_a_plain_folder_with_the_adapted_logits(
    tmp_path: Path, kind: str, build_lm: Build, tokenizer: Tokenizer
) -> None:
    base, model = build_lm(kind), build_lm(kind)
    names, flags = list(base.state_dict()), [p.requires_grad for p in base.parameters()]
    adapter = stir(add_lora(model, SETTINGS, seed=1))
    adapted = response_logits(model, batch()).detach()
    merged = adapter.merge()
    assert merged is model
    assert list(merged.state_dict()) == names
    assert [p.requires_grad for p in merged.parameters()] == flags
    save_checkpoint(tmp_path / "merged", merged, tokenizer)
    save_checkpoint(tmp_path / "base", base, tokenizer)
    assert {p.name for p in (tmp_path / "merged").iterdir()} == {p.name for p in (tmp_path / "base").iterdir()}
    assert (tmp_path / "merged/config.json").read_bytes() == (tmp_path / "base/config.json").read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(response_logits(loaded, batch()), adapted, rtol=0, atol=1e-5 * adapted.abs().max())
    assert torch.equal(response_logits(loaded, batch()), response_logits(merged, batch()))


def test_a_merged_critic_loads_with_its_head(
    tmp_path: Path, kind: str, build_scalar: Build, tokenizer: Tokenizer
) -> None:
    model = build_scalar(kind)
    adapter = stir(add_lora(model, SETTINGS, seed=1))
    adapted = state_values(model, batch()).detach()
    save_checkpoint(tmp_path, adapter.merge(), tokenizer)
    for loaded in (load_scalar_model(tmp_path), AutoModelForSequenceClassification.from_pretrained(tmp_path)):
        values = state_values(loaded.eval(), batch())
        torch.testing.assert_close(values, adapted, rtol=0, atol=1e-5 * adapted.abs().max().item())


@pytest.mark.slow
def test_a_merged_folder_loads_where_peft_is_not_installed(
    tmp_path: Path, build_lm: Build, tokenizer: Tokenizer
) -> None:
    save_checkpoint(tmp_path, stir(add_lora(build_lm(), SETTINGS, seed=1)).merge(), tokenizer)
    program = (
        "import sys; sys.modules['peft'] = None; from transformers import AutoModelForCausalLM as M; "
        "model, info = M.from_pretrained(sys.argv[1], output_loading_info=True); "
        "print(sorted(info['missing_keys']), sorted(info['unexpected_keys']))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_merging_uses_the_adapter_up_and_the_model_can_be_adapted_again(build_lm: Build) -> None:
    model = build_lm()
    adapter = stir(add_lora(model, SETTINGS, seed=1))
    merged = response_logits(adapter.merge(), batch())
    for use in (
        adapter.merge,
        adapter.state_dict,
        lambda: adapter.load_state_dict({}),
        lambda: adapter.off().__enter__(),
    ):
        with pytest.raises(ValueError, match="was merged"):
            use()
    add_lora(model, SETTINGS, seed=2)
    assert torch.equal(response_logits(model, batch()), merged)
    with pytest.raises(ValueError, match="already"):
        add_lora(model, SETTINGS, seed=2)


def test_a_saved_adapter_continues_in_another_model(tmp_path: Path, build_scalar: Build) -> None:
    """Through a file, without pickles, and nothing but what trains."""
    one, two = build_scalar(), build_scalar()
    adapter = stir(add_lora(one, SETTINGS, seed=1))
    torch.save(adapter.state_dict(), tmp_path / "adapter.pt")
    state = torch.load(tmp_path / "adapter.pt", weights_only=True)
    assert set(state) == {name for name, p in one.named_parameters() if p.requires_grad}
    add_lora(two, SETTINGS, seed=9).load_state_dict(state)
    assert torch.equal(state_values(two, batch()), state_values(one, batch()))


def test_an_adapter_of_other_settings_is_refused(build_lm: Build) -> None:
    state = add_lora(build_lm(), SETTINGS, seed=1).state_dict()
    other = add_lora(build_lm(), LoraSettings(rank=2), seed=1)
    with pytest.raises(UserError, match="another rank"):
        other.load_state_dict(state)
    with pytest.raises(UserError, match="other layers"):
        other.load_state_dict({})


def test_alpha_over_rank_scales_the_change(build_lm: Build) -> None:
    def change(settings: LoraSettings) -> torch.Tensor:
        model = build_lm()
        weight = model.model.layers[0].mlp.up_proj.weight
        before = weight.detach().clone()
        stir(add_lora(model, settings, seed=1)).merge()
        return weight.detach() - before

    one, two = change(LoraSettings(rank=4, alpha=4.0)), change(LoraSettings(rank=4, alpha=8.0))
    torch.testing.assert_close(two, 2 * one, rtol=0, atol=1e-6)
    assert torch.linalg.matrix_rank(one, tol=1e-4) == 4


def test_chosen_layers_alone_are_adapted(build_lm: Build) -> None:
    adapter = add_lora(build_lm(), LoraSettings(rank=4, target_modules=["q_proj", "v_proj"]), seed=1)
    assert {name.split(".")[-4] for name in adapter.state_dict()} == {"q_proj", "v_proj"}
    assert len(adapter.state_dict()) == 2 * 2 * 2


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "c_attn", "score"])
def test_a_layer_that_cannot_be_adapted_is_refused_by_name(name: str, build_lm: Build) -> None:
    model = build_lm()
    with pytest.raises(UserError, match=f"has no layer {name}; it has down_proj, .*q_proj"):
        add_lora(model, LoraSettings(target_modules=["q_proj", name]), seed=1)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("key", ["dropout", "lora_dropout"])
def test_rule_07_dropout_is_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ValueError, match="the ratio of PPO would not be 1"):
        LoraSettings(**{"rank": 4, key: 0.0})


@pytest.mark.parametrize(
    "values", [{"rank": 0}, {"alpha": 0.0}, {"target_modules": []}, {"target_modules": "attention"}]
)
def test_settings_out_of_range_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        LoraSettings(**values)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapted_layers_compute_what_peft_computes(kind: str, build_lm: Build) -> None:
    """In float32; under autocast they are as near to that as peft's."""

    def passed(rounds: bool) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
            logits = response_logits(model, batch())
        logits.float().sin().sum().backward()
        return torch.cat([logits.detach().flatten(), *(p.grad.flatten() for p in adapter.parameters())])

    model = build_lm(kind)
    adapter = stir(add_lora(model, SETTINGS, 0))
    exact, rounded = passed(False), passed(True)
    for layer in _layers(model):
        del layer.forward
    expected, other = passed(False), passed(True)
    assert torch.allclose(exact, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(rounded, other)
    assert (rounded - expected).norm() <= 1.5 * (other - expected).norm()
