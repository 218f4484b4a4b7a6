"""`quantised.py`: 4-bit weights below adapters. The layers are those of bitsandbytes, which computes on a CPU, too."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlhf_core.config.lora import LoraSettings
from rlhf_core.errors import UserError
from rlhf_core.models.batch import pad_batch, predict, sequence_scores, state_values
from rlhf_core.models.hf import draw_head, fresh_head, load_causal_lm, load_scalar_model, save_checkpoint
from rlhf_core.models.lora import Adapter, add_lora
from rlhf_core.models.precision import autocast
from rlhf_core.models.quantised import dequantised, is_quantised
from rlhf_core.models.shared_body import add_scalar_adapter, merged_scalar_model

Build = Callable[..., PreTrainedModel]
SETTINGS = LoraSettings(rank=4, alpha=8.0, quantize="nf4")
BATCH = pad_batch([[3, 9, 4], [3, 4]], [[20, 21, 1], [30]], 0)


@pytest.fixture
def folder(tmp_path: Path, build_lm: Build, tokenizer: Tokenizer) -> Path:
    save_checkpoint(tmp_path / "base", build_lm("llama"), tokenizer)
    return tmp_path / "base"


def stir(adapter: Adapter) -> Adapter:
    """As if trained."""
    generator = torch.Generator().manual_seed(7)
    adapter.load_state_dict(
        {name: p + 0.1 * torch.randn(p.shape, generator=generator) for name, p in adapter.state_dict().items()}
    )
    return adapter


def logits(model: PreTrainedModel) -> torch.Tensor:
    with autocast("bfloat16", torch.device("cpu")), torch.no_grad():
        return predict(model, BATCH).logits()


def test_without_bitsandbytes_the_pip_command_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.models.quantised.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    with pytest.raises(UserError, match=r"lora.quantize: nf4 needs bitsandbytes: pip install"):
        load_causal_lm(folder, frozen="nf4")


@pytest.mark.quantize
def test_bitsandbytes_warns_of_nothing() -> None:
    """Every process imports it, by peft; on some CPUs it would write a line to stderr, beside that of an error."""
    code = "import rlhf_core, logging, bitsandbytes; logging.getLogger('bitsandbytes.cextension').warning('words')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.quantize
def test_the_body_takes_an_eighth_of_the_memory_and_has_nearly_the_same_weights(folder: Path) -> None:
    full, small = load_causal_lm(folder), load_causal_lm(folder, frozen="nf4")
    assert is_quantised(small)
    assert not is_quantised(full)
    bytes_of = [sum(p.nbytes for p in model.model.layers.parameters() if p.ndim > 1) for model in (full, small)]
    assert bytes_of[1] * 8 == bytes_of[0]
    for exact, layer in zip(full.model.layers, small.model.layers, strict=True):
        weight, rounded = exact.mlp.up_proj.weight, dequantised(layer.mlp.up_proj).weight
        assert 0.01 < (rounded - weight).norm() / weight.norm() < 0.3


@pytest.mark.quantize
def test_only_adapters_train_and_what_is_saved_computes_as_what_was_trained(folder: Path, tokenizer: Tokenizer) -> None:
    model = load_causal_lm(folder, frozen="nf4")
    adapter = stir(add_lora(model, SETTINGS, seed=1))
    with autocast("bfloat16", torch.device("cpu")):
        predict(model, BATCH).logits().square().mean().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(adapter.state_dict())
    assert all(p.dtype == torch.float32 for p in adapter.parameters())
    trained, base = logits(model), logits(load_causal_lm(folder, frozen="nf4"))
    merged = adapter.merge()
    assert not is_quantised(merged)
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    save_checkpoint(folder.parent / "merged", merged, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(folder.parent / "merged").eval()
    assert not hasattr(loaded.config, "quantization_config")
    assert (logits(loaded) - trained).norm() < 0.1 * (base - trained).norm()


@pytest.mark.quantize
def test_policy_and_critic_share_a_4_bit_body(folder: Path, tokenizer: Tokenizer) -> None:
    policy = load_causal_lm(folder, frozen="nf4")
    head = fresh_head(policy)
    draw_head(head, 3)
    critic = stir(add_scalar_adapter(policy, head.float(), SETTINGS, seed=2, name="critic"))
    adapter = stir(add_lora(policy, SETTINGS, seed=1))
    before = logits(policy)
    with autocast("bfloat16", torch.device("cpu")), torch.no_grad():
        values = state_values(critic.model, BATCH)
        scores = sequence_scores(critic.model, BATCH)
    save_checkpoint(folder.parent / "critic", merged_scalar_model(copy.deepcopy(critic)), tokenizer)
    assert is_quantised(policy)
    assert torch.equal(logits(policy), before)
    loaded = load_scalar_model(folder.parent / "critic")
    with autocast("bfloat16", torch.device("cpu")), torch.no_grad():
        torch.testing.assert_close(state_values(loaded, BATCH), values, rtol=0.05, atol=0.1)
        torch.testing.assert_close(sequence_scores(loaded, BATCH), scores, rtol=0.05, atol=0.1)
    adapter.merge()
    assert not is_quantised(policy)
