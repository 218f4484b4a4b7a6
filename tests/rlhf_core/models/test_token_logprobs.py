"""`logprobs.py` on logits larger than one piece, and the KL of two models; values and gradients of small ones stand in
test_losses.py."""

import pytest
import torch

from rlhf_core.models import token_logprobs as module
from rlhf_core.models.token_logprobs import compare_logprobs, logprobs_and_entropy
from rlhf_core.ppo.kl import full_kl


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(seed))


ACTIONS = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1.0] * 5, [1.0] * 2 + [0.0] * 3, [1.0] + [0.0] * 4])


@pytest.mark.parametrize("piece", [1, 30, 10_000])
def test_pieces_change_no_bit(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the values nor of the gradient."""
    found = []
    for size in (2**18, piece):
        monkeypatch.setattr(module, "PIECE_ON_CPU", size)
        logits = numbers(1).requires_grad_()
        logprobs, entropy = logprobs_and_entropy(logits, ACTIONS, 0.7, MASK)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        found.append(torch.cat([logprobs.flatten(), entropy.flatten(), logits.grad.flatten()]))
    assert torch.equal(*found)


def test_the_gradient_is_the_one_tensor_that_is_made() -> None:
    """Beside the logits nothing of their size is kept for the backward pass."""
    logits = numbers(1).requires_grad_()
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.numel(), t.data_ptr())) or t, lambda t: t):
        logprobs_and_entropy(logits, ACTIONS, 1.0, MASK)
    assert [pointer for size, pointer in kept if size >= logits.numel()] == [logits.data_ptr()]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rule_08_two_models_are_compared_in_one_pass(temperature: float) -> None:
    policy, reference = numbers(1), numbers(2)
    logprobs, ref_logprobs, kl = compare_logprobs(policy, reference, ACTIONS, temperature, MASK)
    assert torch.allclose(logprobs, logprobs_and_entropy(policy, ACTIONS, temperature, MASK)[0])
    assert torch.allclose(ref_logprobs, logprobs_and_entropy(reference, ACTIONS, temperature, MASK)[0])
    assert torch.allclose(kl, full_kl(policy / temperature, reference / temperature, MASK), atol=1e-6)


def test_rule_18_two_models_are_compared_on_real_tokens_only() -> None:
    garbage = numbers(1).masked_fill(MASK[..., None] == 0, float("nan"))
    for table, clean in zip(
        compare_logprobs(garbage, garbage, ACTIONS, 1.0, MASK),
        compare_logprobs(numbers(1), numbers(1), ACTIONS, 1.0, MASK),
        strict=True,
    ):
        assert torch.equal(table, clean)


def test_a_logit_of_minus_infinity_gives_finite_numbers_and_gradients() -> None:
    """As for a model that masks tokens of its vocabulary: the values are those without these tokens."""
    logits, other = numbers(1), numbers(2)
    logits[..., 7:] = other[..., 7:] = -torch.inf
    actions = ACTIONS % 7
    found = []
    for width in (11, 7):
        free = logits[..., :width].clone().requires_grad_()
        logprobs, entropy = logprobs_and_entropy(free, actions, 0.7, MASK)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        kl = compare_logprobs(logits[..., :width], other[..., :width], actions, 0.7, MASK)[2]
        exact = full_kl(logits[..., :width], other[..., :width], MASK)
        found.append(torch.cat([t.detach().flatten() for t in (logprobs, entropy, kl, exact, free.grad[..., :7])]))
    assert torch.isfinite(found[0]).all()
    assert torch.allclose(*found, atol=1e-6)
