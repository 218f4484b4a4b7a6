"""`token_logprobs.py`: chunks change nothing, and no tensor is larger than one; values and gradients of small logits
are tested in test_losses.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_core.models import head as head_module
from rlhf_core.models import token_logprobs as module
from rlhf_core.models.head import Head, LastStep, Predictions
from rlhf_core.models.token_logprobs import action_logprobs, compare_distributions, exact_kl, logprobs_and_entropy
from rlhf_core.ppo.kl import estimate_kl

TOKENS, HIDDEN, VOCABULARY = 13, 4, 11
ACTIONS = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0))
Outcome = Callable[[Predictions, Predictions, Tensor, float], Tensor]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits_of(seed: int) -> Tensor:
    return numbers(seed, TOKENS, VOCABULARY)


def predictions(seed: int, step: LastStep, bias: bool = True, tokens: int = TOKENS) -> Predictions:
    """With gradients of everything."""
    parts = [numbers(seed, tokens, HIDDEN), numbers(seed + 1, VOCABULARY, HIDDEN), numbers(seed + 2, VOCABULARY)]
    hidden, weight, shift = (part.requires_grad_() for part in parts)
    return Predictions(hidden, Head(weight, shift if bias else None, step))


def slopes(model: Predictions, value: Tensor) -> list[Tensor]:
    inputs = [x for x in (model.hidden, model.head.weight, model.head.bias) if x is not None]
    return list(torch.autograd.grad(value, inputs))


def weighted(values: tuple[Tensor, ...]) -> Tensor:
    """A number that depends on every value in another way."""
    return sum(((k + 1) * x * torch.linspace(0.5, 2, len(x))).sum() for k, x in enumerate(values))  # type: ignore[return-value]


def plain(model: Predictions, actions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """By autograd, from a tensor of all logits."""
    logprobs = (model.logits() / temperature).log_softmax(dim=-1)
    return logprobs.gather(1, actions[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(dim=1)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """chunks(n): n tokens at once."""
    return lambda tokens: monkeypatch.setattr(head_module, "CHUNK_ON_CPU", tokens * VOCABULARY)


@settings(max_examples=60, derandomize=True)
@given(
    st.integers(1, 20),
    st.integers(1, 25),
    st.floats(0.3, 2.0),
    st.sampled_from([LastStep(), LastStep(0.3), LastStep(cap=2.0), LastStep(4.0, 1.5)]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_chunks_give_the_values_and_gradients_of_the_plain_form(
    tokens: int, chunk: int, temperature: float, step: LastStep, bias: bool, seed: int
) -> None:
    model, actions = predictions(seed, step, bias, tokens), ACTIONS.repeat(2)[:tokens]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "CHUNK_ON_CPU", chunk * VOCABULARY)
        patch.setattr(module, "PIECE_ON_CPU", 3 * VOCABULARY)
        found = logprobs_and_entropy(model, actions, temperature)
        gradients = slopes(model, weighted(found))
    expected = plain(model, actions, temperature)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, slopes(model, weighted(expected)), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-6


@settings(max_examples=40, derandomize=True)
@given(st.integers(1, 15), st.floats(0.3, 2.0), st.sampled_from([None, 2.0]), st.integers(0, 1000))
def test_the_exact_kl_in_chunks_is_the_plain_one(chunk: int, temperature: float, cap: float | None, seed: int) -> None:
    model, reference = predictions(seed, LastStep(cap=cap)), predictions(seed + 7, LastStep(cap=cap))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "CHUNK_ON_CPU", chunk * VOCABULARY)
        found = exact_kl(model, reference, temperature)
        gradients = slopes(model, weighted((found,)))
        compared = compare_distributions(model, reference, ACTIONS, temperature)
    expected = estimate_kl(model.logits() / temperature, reference.logits() / temperature, "full")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, slopes(model, weighted((expected,))), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-6
    torch.testing.assert_close(compared.kl, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = plain(model, ACTIONS, temperature), plain(reference, ACTIONS, temperature)
    for one, other in zip(compared[:2] + compared[3:], (ours[0], theirs[0], ours[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation makes, backward passes included."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return result


USES: dict[str, Outcome] = {
    "policy": lambda model, _, actions, t: sum(logprobs_and_entropy(model, actions, t)).sum(),  # type: ignore[union-attr]
    "exact_kl": lambda model, other, _, t: exact_kl(model, other, t).sum(),
    "comparison": lambda model, other, actions, t: sum(compare_distributions(model, other, actions, t)).sum(),  # type: ignore[arg-type, union-attr]
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("step", [LastStep(), LastStep(2.0, 3.0)])
def test_no_tensor_is_larger_than_a_chunk(use: str, step: LastStep, chunks: Callable[[int], None]) -> None:
    """Neither forward nor backward: with 64 tokens, all logits would be 16 times as large."""
    chunks(4)
    model, other, actions = predictions(1, step, tokens=64), predictions(5, step, tokens=64), ACTIONS.repeat(5)[:64]
    with Largest() as largest:
        value = USES[use](model, other, actions, 0.7)
        if value.requires_grad:
            value.backward()
    assert largest.elements <= max(4 * VOCABULARY, 64 * HIDDEN)


def test_logits_of_one_chunk_are_computed_once_and_those_of_several_not_kept(
    chunks: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    compute = Head.logits
    monkeypatch.setattr(Head, "logits", lambda head, hidden: made.append(len(hidden)) or compute(head, hidden))
    for tokens, expected in ((TOKENS, [13]), (5, [5, 5, 3, 5, 5, 3])):
        chunks(tokens)
        made.clear()
        model, kept = predictions(1, LastStep()), list[int]()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=kept: to.append(t.numel()) or t, lambda t: t):
            logprobs, _ = logprobs_and_entropy(model, ACTIONS)
        logprobs.sum().backward()
        assert made == expected
        assert max(kept) == (TOKENS * VOCABULARY if len(expected) == 1 else TOKENS * HIDDEN)


@pytest.mark.parametrize("piece", [1, 30])
def test_pieces_change_no_bit(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the values nor of the gradient."""
    found = []
    for size in (2**18, piece):
        monkeypatch.setattr(module, "PIECE_ON_CPU", size)
        logits = logits_of(1).requires_grad_()
        logprobs, entropy = logprobs_and_entropy(Predictions(logits), ACTIONS, 0.7)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        found.append(torch.cat([logprobs, entropy, logits.grad.flatten()]))  # type: ignore[union-attr]
    assert torch.equal(*found)


def test_a_frozen_layer_gets_no_gradient_and_costs_none(chunks: Callable[[int], None]) -> None:
    """As with LoRA: the product with the hidden states that gives the weight's gradient is not computed."""
    chunks(5)
    counts = []
    for trained in (True, False):
        model = predictions(1, LastStep())
        for part in (model.head.weight, model.head.bias):
            part.requires_grad_(trained)  # type: ignore[union-attr]
        with Products() as products:
            logprobs_and_entropy(model, ACTIONS)[0].sum().backward()
        counts.append(products.count)
        assert (model.head.weight.grad is not None) == trained  # type: ignore[union-attr]
        assert model.hidden.grad is not None
    assert counts[0] - counts[1] == 3


class Products(TorchDispatchMode):
    """The number of matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [5, 100])
def test_rule_24_bfloat16_inputs_are_multiplied_in_float32_also_under_autocast(
    chunk: int, chunks: Callable[[int], None]
) -> None:
    """Values are those of float32 products of the rounded numbers; gradients come in the inputs' precision."""
    chunks(chunk)
    model = predictions(1, LastStep(cap=5.0))
    rounded = Predictions(
        model.hidden.detach().bfloat16().requires_grad_(),
        Head(
            *(part.detach().bfloat16().requires_grad_() for part in (model.head.weight, model.head.bias)),
            model.head.step,
        ),  # type: ignore[union-attr]
    )
    exact = Predictions(
        rounded.hidden.float(),
        Head(rounded.head.weight.float(), rounded.head.bias.float(), rounded.head.step),  # type: ignore[union-attr]
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = logprobs_and_entropy(rounded, ACTIONS, 0.7)
        kl = exact_kl(rounded, Predictions(rounded.hidden.flip(0), rounded.head), 0.7)
        gradients = slopes(rounded, weighted(found))
    expected = plain(exact, ACTIONS, 0.7)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        kl,
        estimate_kl(exact.logits() / 0.7, exact.head.logits(exact.hidden.flip(0)) / 0.7, "full"),
        rtol=1e-5,
        atol=1e-5,
    )
    for one, other in zip(gradients, slopes(exact, weighted(expected)), strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - other).norm() <= 0.005 * other.norm()


@pytest.mark.parametrize("chunk", [5, 100])
def test_rule_24_under_autocast_only_the_products_of_the_gradients_are_rounded(
    chunk: int, chunks: Callable[[int], None]
) -> None:
    """Those of the weight and of the hidden states; log-probabilities are to the bit those of float32."""
    chunks(chunk)
    model, exact = predictions(1, LastStep()), predictions(1, LastStep())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = action_logprobs(model, ACTIONS, 0.7)
    expected = logprobs_and_entropy(exact, ACTIONS, 0.7)[0]
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    for one, other in ((model.hidden, exact.hidden), (model.head.weight, exact.head.weight)):
        assert one.grad.dtype == torch.float32  # type: ignore[union-attr]
        assert 0 < (one.grad - other.grad).norm() <= 0.01 * other.grad.norm()  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rule_08_two_models_are_compared_in_one_pass(temperature: float) -> None:
    policy, reference = Predictions(logits_of(1)), Predictions(logits_of(2))
    found = compare_distributions(policy, reference, ACTIONS, temperature)
    assert torch.equal(found.logprobs, logprobs_and_entropy(policy, ACTIONS, temperature)[0])
    assert torch.equal(found.ref_logprobs, logprobs_and_entropy(reference, ACTIONS, temperature)[0])
    assert torch.equal(found.entropy, logprobs_and_entropy(policy, ACTIONS, temperature)[1])
    assert torch.allclose(
        found.kl, estimate_kl(logits_of(1) / temperature, logits_of(2) / temperature, "full"), atol=1e-6
    )


class _Casts(TorchDispatchMode):
    """Counts casts of an output layer's weight."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_weight = func is torch.ops.aten._to_copy.default and args[0].shape == (VOCABULARY, HIDDEN)
        self.count += is_weight
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compare", [exact_kl, partial(compare_distributions, actions=ACTIONS)])
def test_two_models_with_one_output_layer_cast_it_once(compare: Any, chunks: Callable[[int], None]) -> None:
    """A policy and its reference without adapters; with weights in bfloat16 each cast is a layer in float32."""
    chunks(3)
    weight = numbers(1, VOCABULARY, HIDDEN).bfloat16()
    policy, reference = (Predictions(numbers(seed, TOKENS, HIDDEN), Head(weight)) for seed in (2, 3))
    with _Casts() as casts:
        compare(policy, reference, temperature=1.0)
    assert casts.count == 1
    with _Casts() as casts:
        compare(policy, Predictions(reference.hidden, Head(weight.clone())), temperature=1.0)
    assert casts.count == 2


def test_a_logit_of_minus_infinity_gives_finite_numbers_and_gradients() -> None:
    """As for a model that masks tokens of its vocabulary: the values are those without these tokens."""
    logits, other = logits_of(1), logits_of(2)
    logits[..., 7:] = other[..., 7:] = -torch.inf
    actions = ACTIONS % 7
    found = []
    for width in (11, 7):
        free = logits[..., :width].clone().requires_grad_()
        logprobs, entropy = logprobs_and_entropy(Predictions(free), actions, 0.7)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        reference = Predictions(other[..., :width])
        kl = compare_distributions(Predictions(free), reference, actions, 0.7).kl
        exact = exact_kl(Predictions(free), reference, 0.7)
        found.append(torch.cat([t.detach().flatten() for t in (logprobs, entropy, kl, exact, free.grad[..., :7])]))  # type: ignore[index]
    assert torch.isfinite(found[0]).all()
    assert torch.allclose(*found, atol=1e-6)


def test_no_token_gives_nothing_and_gradients_of_zero() -> None:
    model = predictions(1, LastStep(), tokens=0)
    logprobs, entropy = logprobs_and_entropy(model, ACTIONS[:0])
    assert logprobs.shape == entropy.shape == (0,)
    assert all(slope.eq(0).all() for slope in slopes(model, logprobs.sum()))
    assert compare_distributions(model, model, ACTIONS[:0], 1.0).kl.shape == (0,)
