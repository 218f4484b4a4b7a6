"""Snapshots: the weights that PPO trains, and the policy that they bring back."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.lora import LoraSettings
from rlhf_core.errors import NonFiniteError, UserError
from rlhf_core.models.hf import load_causal_lm, save_checkpoint
from rlhf_core.ppo import snapshots
from rlhf_core.ppo.trainer import PPOTrainer

Make = Callable[..., PPOTrainer]
WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "gpt2": {"kind": "gpt2"},
    "tied head": {"critic": {"kind": "shared"}},
    "adapters": {"lora": {"rank": 2, "alpha": 4.0}},
}


def equal(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("way", WAYS)
def test_a_snapshot_brings_back_the_very_weights(
    make_trainer: Make, build_lm: Callable[..., PreTrainedModel], tmp_path: Path, way: str
) -> None:
    """Each of two steps, beside what the run itself ends with."""
    trainer = make_trainer(**WAYS[way])
    seen = {}
    for step in (1, 2):
        trainer.step()
        snapshots.write(tmp_path, trainer.models, step, trainer.config.lora)
        seen[step] = copy.deepcopy(trainer.models)
    assert snapshots.steps_in(tmp_path) == [1, 2]
    kind = WAYS[way].get("kind", "llama")
    for step, models in seen.items():
        policy = models.finished_policy()
        assert equal(snapshots.load(tmp_path, step, build_lm(kind, seed=1)), policy), step
    first, last = (seen[step].policy for step in (1, 2))
    assert not equal(first, last)


def test_what_a_model_makes_for_itself_is_not_kept(make_trainer: Make, tmp_path: Path) -> None:
    """Rotary frequencies are a buffer that no checkpoint holds."""
    models = make_trainer().models
    assert any(name.endswith("inv_freq") for name, _ in models.policy.named_buffers())
    snapshots.write(tmp_path, models, 1)
    assert load_file(snapshots.path_of(tmp_path, 1)).keys() <= models.policy.state_dict().keys()


def test_adapters_make_a_small_snapshot(make_trainer: Make, tmp_path: Path) -> None:
    for name, changes in WAYS.items():
        snapshots.write(tmp_path / name, make_trainer(**changes).models, 1, make_trainer(**changes).config.lora)
    whole, small = (snapshots.path_of(tmp_path / name, 1).stat().st_size for name in ("all weights", "adapters"))
    assert small < whole / 3


def test_one_that_is_missing_or_of_another_model_is_refused(
    make_trainer: Make, build_lm: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    snapshots.write(tmp_path, make_trainer().models, 3)
    with pytest.raises(UserError, match="no such snapshot; `leash run ppo` makes them"):
        snapshots.load(tmp_path, 4, build_lm())
    with pytest.raises(UserError, match="a snapshot of another model"):
        snapshots.load(tmp_path, 3, build_lm("gpt2"))
    assert snapshots.steps_in(tmp_path / "nowhere") == []


def test_weights_that_are_not_finite_leave_no_file(make_trainer: Make, tmp_path: Path) -> None:
    models = make_trainer().models
    next(models.policy.parameters()).data[0] = torch.nan
    with pytest.raises(NonFiniteError):
        snapshots.write(tmp_path / "new", models, 1)
    assert not (tmp_path / "new").exists()


def test_equal_runs_leave_equal_bytes(make_trainer: Make, tmp_path: Path) -> None:
    for name in ("a", "b"):
        trainer = make_trainer(lora={"rank": 2, "alpha": 4.0})
        trainer.step()
        snapshots.write(tmp_path / name, trainer.models, 1, trainer.config.lora)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]
    assert json.loads(files[0]["settings.json"])["lora"]["rank"] == 2


def test_precision_bfloat16_halves_a_snapshot_and_leaves_adapters_as_they_are(
    make_trainer: Make, build_lm: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    for way in ("all weights", "adapters"):
        trainer = make_trainer(**WAYS[way], precision="bfloat16")
        snapshots.write(tmp_path / way, trainer.models, 1, trainer.config.lora)
        kept = load_file(snapshots.path_of(tmp_path / way, 1))
        assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16 if way == "all weights" else torch.float32}
        assert snapshots.are_adapters(tmp_path / way) == (way == "adapters")
    found = snapshots.load(tmp_path / "all weights", 1, build_lm(seed=7)).state_dict()
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert all(torch.equal(found[name], w.bfloat16().float()) for name, w in build_lm(seed=1).state_dict().items())


@pytest.mark.quantize
def test_adapters_above_4_bit_weights_bring_back_the_policy_that_was_trained(
    make_trainer: Make,
    build_lm: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The very weights that the run ends with: 4-bit ones as numbers, plus the adapters."""
    save_checkpoint(tmp_path / "base", build_lm(), tokenizer)
    nf4 = partial(load_causal_lm, tmp_path / "base", frozen="nf4")
    monkeypatch.setitem(make_trainer.__globals__, "tiny_lm", lambda *_, **__: nf4())
    trainer = make_trainer(lora={"rank": 2, "alpha": 4.0, "quantize": "nf4"}, precision="bfloat16")
    trainer.step()
    snapshots.write(tmp_path / "nf4", trainer.models, 1, trainer.config.lora)
    snapshots.write(tmp_path / "plain", make_trainer(**WAYS["adapters"]).models, 1, LoraSettings(rank=2, alpha=4.0))
    assert [snapshots.start_precision(tmp_path / name) for name in ("nf4", "plain")] == ["nf4", "float32"]
    with pytest.raises(ValueError, match="trained above other weights"):
        snapshots.load(tmp_path / "nf4", 1, load_causal_lm(tmp_path / "base"))
    policy = trainer.models.finished_policy()
    assert equal(snapshots.load(tmp_path / "nf4", 1, nf4()), policy)
