"""What the ledger counts is what a real run allocates."""

import torch

from rlhf_core.planning.ledger import (
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    Ledger,
    Part,
    counting,
    require_support,
    without_data,
)


def test_this_torch_is_supported() -> None:
    require_support()


def test_weights_gradients_and_optimizer_of_a_linear_layer() -> None:
    with without_data() as mode:
        layer = torch.nn.Linear(10, 20, bias=False)
    size = 4 * 10 * 20
    with Ledger(vocabulary=99, mode=mode) as ledger:
        ledger.follow("policy", layer)
        optimizer = torch.optim.Adam(layer.parameters(), fused=True)
        ledger.follow_optimizer("policy", optimizer)
        layer(torch.ones(3, 10)).sum().backward()
        assert ledger.live[Part(WEIGHTS, "policy")] == ledger.live[Part(GRADIENTS, "policy")] == size
        optimizer.step()
        optimizer.zero_grad()
        assert ledger.live[Part(GRADIENTS, "policy")] == 0
        assert 2 * size <= ledger.live[Part(OPTIMIZER, "policy")] <= 2 * size + 8  # and the number of steps


def test_the_peak_is_the_highest_sum_and_starts_again() -> None:
    with without_data() as mode:
        weight = torch.empty(1000)
    ledger = Ledger(vocabulary=99, mode=mode)
    with counting(ledger):
        doubled = weight * 2
        assert (doubled + 1 + doubled).nbytes == 4000
    assert ledger.peak == 12_000 == sum(ledger.at_peak.values())
    with counting(ledger):
        pass
    assert ledger.peak == 4000


def test_a_number_of_a_tensor_without_data_is_one() -> None:
    with without_data() as mode:
        weight = torch.empty(3)
    with Ledger(vocabulary=99, mode=mode):
        assert weight.sum().item() == 1.0
        assert bool((weight > 5).any())
        assert torch.tensor([2, 7]).tolist() == [2, 7]
        assert torch.tensor([True, False]).nonzero().tolist() == [[0]]
