"""`packed.py`: what a model computes without padding equals what it computes with padding, and is less."""

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    MambaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import create_causal_mask

from rlhf_core.models import packed as module
from rlhf_core.models.batch import (
    TokenBatch,
    pad_batch,
    predict,
    response_logits,
    sequence_scores,
    state_values,
)
from rlhf_core.models.hf import save_checkpoint
from rlhf_core.models.lora import LoraSettings, add_lora
from rlhf_core.models.packed import ATTENTION, Packed, attention, can_pack

Build = Callable[..., PreTrainedModel]
PAD = 0
PROMPTS = [[3, 9, 4], [3, 8, 7, 6, 5, 11, 12, 13, 4], [5], [3, 9, 4], [3, 9, 4], [3, 9, 4], [3, 8, 7, 4]]
RESPONSES = [[20, 21, 22, 1], [30], [40, 41, 42, 43, 44, 45], [20, 21], [], [20, 21, 22, 1], [PAD, 7, PAD]]
"""With equal prompts, equal responses, a response that begins another one, and an empty one."""

tokens = st.integers(min_value=0, max_value=3)
trees = st.lists(st.lists(tokens, min_size=1, max_size=7), min_size=1, max_size=8)


@pytest.fixture
def batch() -> TokenBatch:
    return pad_batch(PROMPTS, RESPONSES, PAD)


@given(trees)
def test_nodes_are_the_distinct_prefixes(sequences: list[list[int]]) -> None:
    packed = Packed.of(sequences)
    assert len(packed.input_ids) == len({tuple(s[:end]) for s in sequences for end in range(1, len(s) + 1)})
    for nodes, sequence in zip(packed.nodes, sequences, strict=True):
        assert packed.input_ids[nodes[: len(sequence)]].tolist() == sequence
        assert packed.position_ids[nodes[: len(sequence)]].tolist() == list(range(len(sequence)))


@given(trees)
def test_attention_of_each_node_is_that_of_its_sequence(sequences: list[list[int]]) -> None:
    """Keys and values of four heads in two groups, sequence by sequence."""
    torch.manual_seed(0)
    packed, layer = Packed.of(sequences), torch.nn.Module()
    layer.num_key_value_groups = 2
    size = len(packed.input_ids)
    query, key, value = torch.randn(1, 4, size, 8), torch.randn(1, 2, size, 8), torch.randn(1, 2, size, 8)
    found, _ = attention(layer, query, key, value, None, packed=packed, scaling=0.3)
    assert found.shape == (1, size, 4, 8)
    for nodes, sequence in zip(packed.nodes, sequences, strict=True):
        own = nodes[: len(sequence)]
        expected, _ = attention(layer, query[:, :, own], key[:, :, own], value[:, :, own], None, scaling=0.3)
        torch.testing.assert_close(found[:, own], expected, rtol=0, atol=1e-5)


def outcome(model: PreTrainedModel, value: Tensor) -> tuple[Tensor, Tensor]:
    """A function's value, and its gradient in all weights."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, value.numel()).view(value.shape)
    (value * weights).sum().backward()
    return value.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def require_equal(
    model: PreTrainedModel,
    read: Callable[[PreTrainedModel, TokenBatch], Tensor],
    batch: TokenBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values and gradients without padding and with it agree to a relative 1e-6, in float64: the rounding of float32
    alone is as large on some CPUs."""
    model.double()
    assert can_pack(model)
    packed = outcome(model, read(model, batch))
    monkeypatch.setitem(module._decided, model, False)
    padded = outcome(model, read(model, batch))
    for one, other in zip(packed, padded, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


def hidden(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    return predict(model, batch).hidden


@pytest.mark.parametrize("read", [response_logits, hidden])
def test_logits_and_gradients_are_those_with_padding(
    kind: str, read: Callable, build_lm: Build, batch: TokenBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_equal(build_lm(kind), read, batch, monkeypatch)


@pytest.mark.parametrize("read", [state_values, sequence_scores])
def test_values_scores_and_gradients_are_those_with_padding(
    kind: str, read: Callable, build_scalar: Build, batch: TokenBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_equal(build_scalar(kind), read, batch, monkeypatch)


def test_with_lora_and_recomputed_activations(
    kind: str, build_lm: Build, batch: TokenBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_lm(kind)
    add_lora(model, LoraSettings(rank=2, alpha=4.0), seed=0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.requires_grad else None
    model.activation_checkpointing_enable()
    require_equal(model.train(), response_logits, batch, monkeypatch)


def test_no_padding_and_no_prefix_is_computed_twice(build_lm: Build, build_scalar: Build, batch: TokenBatch) -> None:
    """The tokens that reach an MLP are the distinct prefixes, without last tokens where they predict nothing."""
    whole = [tuple(p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    predicting = [tuple(p + r[:-1]) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    policy, critic = build_lm(), build_scalar()
    for model, read, rows in (
        (policy, response_logits, predicting),
        (critic, state_values, predicting),
        (critic, sequence_scores, whole),
    ):
        assert can_pack(model)
        read(model, batch)  # examines the output layer
        seen: list[int] = []
        hook = model.model.layers[0].mlp.register_forward_hook(
            lambda _, args, __, to=seen: to.append(args[0].numel() // 32)
        )
        read(model, batch)
        hook.remove()
        assert seen == [len({row[:end] for row in rows for end in range(1, len(row) + 1)})]


def test_equal_passes_give_equal_bytes(kind: str, build_lm: Build, batch: TokenBatch) -> None:
    model = build_lm(kind)
    one, two = (outcome(model, response_logits(model, batch)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_the_order_of_rows_changes_no_logit(kind: str, build_lm: Build) -> None:
    model, order = build_lm(kind), list(range(len(PROMPTS)))
    random.Random(0).shuffle(order)
    batch, other = (
        pad_batch([PROMPTS[i] for i in o], [RESPONSES[i] for i in o], PAD) for o in (range(len(order)), order)
    )
    one, two = (x.spread(response_logits(model, x)) for x in (batch, other))
    torch.testing.assert_close(one[order], two, rtol=0, atol=1e-5)


SIZE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def recurrent() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(MambaConfig(**SIZE, state_size=4))


def windowed() -> PreTrainedModel:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return AutoModelForCausalLM.from_config(MistralConfig(**SIZE, **heads, sliding_window=4))


def eager() -> PreTrainedModel:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return AutoModelForCausalLM.from_config(
        MistralConfig(**SIZE, **heads, sliding_window=None), attn_implementation="eager"
    )


@pytest.mark.parametrize("build", [recurrent, windowed, eager])
def test_a_model_of_another_kind_is_read_with_padding(build: Callable[[], PreTrainedModel]) -> None:
    model = build().eval()
    before = model.config._attn_implementation
    assert not can_pack(model)
    assert model.config._attn_implementation == before
    batch = pad_batch([[3, 9, 4], [3, 8, 4]], [[20, 21, 22, 1], [30, 31]], PAD)
    logits = batch.spread(response_logits(model, batch))
    alone = model(torch.tensor([[3, 9, 4, 20, 21, 22, 1]])).logits[0, 2:6]
    torch.testing.assert_close(logits[0], alone, rtol=0, atol=1e-5)


def test_transformers_calls_attention_as_packed_py_expects(build_lm: Build) -> None:
    """The function is found by its name, masks of four dimensions are passed on as they are, and arguments of a forward
    pass reach the function."""
    assert AttentionInterface()[ATTENTION] is attention
    assert ATTENTION in AttentionMaskInterface()
    model, packed = build_lm(), Packed.of([[3, 4], [3, 5]])
    assert can_pack(model)
    mask = packed.inputs["attention_mask"]
    assert create_causal_mask(model.config, torch.zeros(1, 3, 32), mask, None) is mask
    with pytest.raises(ValueError, match="sliding_window"):
        model(**packed.inputs, sliding_window=3)


def test_the_comparison_does_not_round_products(build_lm: Build) -> None:
    """`precision: bfloat16` allows TensorFloat-32, whose rounding is larger than the allowed difference."""
    model, seen = build_lm(), []
    model.model.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert can_pack(model)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}


def test_a_lack_of_memory_says_nothing_about_the_architecture(build_lm: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_lm()

    def short(*_: object) -> Packed:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Packed, "of", short)
        with pytest.raises(torch.OutOfMemoryError):
            can_pack(model)
    assert can_pack(model)


def test_saved_copied_and_generating_models_are_those_of_transformers(
    build_lm: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The name of the attention function reaches no file, a copy is packed again, and `generate` gives equal tokens."""
    plain, model = build_lm(), build_lm()
    assert can_pack(model)
    for name, each in (("plain", plain), ("packed", model)):
        save_checkpoint(tmp_path / name, each, tokenizer)
    assert (tmp_path / "plain/config.json").read_bytes() == (tmp_path / "packed/config.json").read_bytes()
    assert can_pack(copy.deepcopy(model))
    ids = torch.tensor([[3, 9, 4]])
    assert torch.equal(model.generate(ids, max_new_tokens=5), plain.generate(ids, max_new_tokens=5))
