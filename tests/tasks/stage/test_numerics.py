"""Kernels of a stage as its parameters say, and a stage that says why it is exempt from byte identity."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tasks.stage import models
from tasks.stage.models import set_numerics

if TYPE_CHECKING:
    from tasks.stage.stage import Stage


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_parameters_choose_the_kernels(
    deterministic: bool, precision: str, make_stage: Callable[..., "Stage[Any]"], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage("sft", None, [])
    stage.common = stage.common.model_copy(update={"deterministic": deterministic, "precision": precision})
    for _ in range(2):
        set_numerics(stage)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    # "medium" rounds the factors to 8 bits on a CPU that has matrix units for bfloat16 (AMX): "high" there
    assert torch.get_float32_matmul_precision() in ({"medium", "high"} if precision == "bfloat16" else {"highest"})
    left, right = torch.randn(2, 256, 256)
    assert (left @ right - (left.double() @ right.double())).abs().max() < 1e-3, "a CPU computes in float32"
    printed = capsys.readouterr().out
    assert printed.count("WARNING deterministic: false") == len(stage.exemptions) == (0 if deterministic else 1)


@pytest.mark.parametrize(
    ("precision", "times", "warnings"), [("bfloat16", 3.0, 1), ("bfloat16", 0.5, 0), ("float32", 3.0, 0)]
)
def test_a_slow_bfloat16_is_warned_of_once(
    precision: str,
    times: float,
    warnings: int,
    make_stage: Callable[..., "Stage[Any]"],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(models, "bfloat16_time", lambda: times)
    monkeypatch.setattr(models, "default_device", lambda: torch.device("cpu"))
    stage = make_stage("sft", None, [])
    stage.common = stage.common.model_copy(update={"precision": precision})
    for _ in range(2):
        set_numerics(stage)
    assert capsys.readouterr().out.count("WARNING precision: bfloat16 takes 3.0 times as long as float32") == warnings


def test_the_time_of_a_product_is_measured() -> None:
    before = torch.random.get_rng_state()
    assert models.bfloat16_time() > 0
    assert torch.equal(before, torch.random.get_rng_state())
