"""`determinism.py`: streams that are a function of their key, and equal global generators."""

import importlib
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rlhf_core import determinism
from rlhf_core.determinism import make_deterministic, permutation, stream, strict_kernels
from rlhf_core.errors import UserError


@pytest.fixture
def _restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def test_a_stream_depends_on_its_key_alone() -> None:
    again = stream(1, 2, 3, 4).random(5)
    np.random.seed(99)
    stream(5).random(3)
    assert (stream(1, 2, 3, 4).random(5) == again).all()


def test_every_place_of_a_key_matters() -> None:
    keys = [(1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5), (4, 3, 2, 1)]
    assert len({stream(*key).random() for key in keys}) == len(keys)


def test_neighbouring_streams_are_independent() -> None:
    """First numbers of streams whose keys differ by one: uniform and uncorrelated."""
    draws = np.array([stream(7, 2, 0, place).random() for place in range(2000)])
    assert abs(draws.mean() - 0.5) < 4 * (1 / 12 / 2000) ** 0.5
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / 2000**0.5


def test_a_permutation_holds_every_item_once() -> None:
    order = permutation(50, 1, 0)
    assert sorted(order) == list(range(50))
    assert order == permutation(50, 1, 0)
    assert order != permutation(50, 1, 1)
    assert all(type(item) is int for item in order)


@pytest.mark.usefixtures("_restored")
def test_failure_09_equal_seeds_give_equal_numbers() -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(1))

    make_deterministic(3, 2)
    first = numbers()
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    make_deterministic(3, 1)
    assert numbers() == first
    make_deterministic(4, 1)
    assert all(a != b for a, b in zip(numbers(), first, strict=True))


@pytest.mark.parametrize(("own", "expected"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_matrix_products_on_a_gpu_are_deterministic_from_the_start(
    monkeypatch: pytest.MonkeyPatch, own: str | None, expected: str
) -> None:
    """cuBLAS reads the variable when CUDA starts: it is set when the module is imported; a user's own value wins."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own or "")
    if own is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    importlib.reload(determinism)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == expected


@pytest.mark.usefixtures("_restored")
def test_deterministic_kernels_and_tf32_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(determinism.WORKSPACE, determinism.OURS)
    make_deterministic(3, 1)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    first = float(torch.rand(1))
    make_deterministic(3, 1, deterministic=False, tf32=True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() in ("medium", "high"), "high on a CPU with AMX"
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert determinism.WORKSPACE not in os.environ
    assert float(torch.rand(1)) == first, "generators are seeded all the same"
    monkeypatch.setenv(determinism.WORKSPACE, ":16:8")
    make_deterministic(3, 1, deterministic=False)
    assert os.environ[determinism.WORKSPACE] == ":16:8", "a value of the user's own stays"


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("deterministic", [True, False])
def test_strict_kernels_are_those_that_were_selected(deterministic: bool) -> None:
    make_deterministic(3, 1, deterministic=deterministic)
    with strict_kernels():
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.usefixtures("_restored")
def test_an_operation_without_a_deterministic_kernel_is_an_error_of_one_line() -> None:
    """`put_` has none on any device."""
    make_deterministic(3, 1)
    ones, places = torch.ones(3), torch.tensor([1])
    with pytest.raises(UserError, match=r"^put_ has no deterministic kernel .*; set deterministic: false$") as error:
        put(ones, places)
    assert "\n" not in str(error.value)
    with pytest.raises(RuntimeError, match="index"), strict_kernels():
        ones.gather(0, torch.tensor([7]))


def put(array: torch.Tensor, places: torch.Tensor) -> None:
    with strict_kernels():
        array.put_(places, torch.ones(1))
