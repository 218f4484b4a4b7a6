"""`models.py`: equal seeds give equal weights, dropout is off, and a saved folder is equal bytes that load anywhere."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Gemma3Config,
    GraniteConfig,
    OPTConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core.config.base import ScratchConfig
from rlhf_core.errors import UserError
from rlhf_core.models.batch import pad_batch, predict, sequence_scores, state_values
from rlhf_core.models.hf import (
    build_llama,
    context_length,
    fit_vocabulary,
    fresh_head,
    load_causal_lm,
    load_scalar_model,
    map_scalar,
    place,
    save_checkpoint,
    scalar_head,
    scalar_model_from,
    scalar_model_of,
    without_dropout,
)

Build = Callable[..., PreTrainedModel]
SCRATCH = ScratchConfig(vocabulary=300, context=48, layers=2, hidden=32, intermediate=40, heads=4)
SIZE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
}
IDS = torch.tensor([[3, 9, 4, 20, 21]])


def weights_equal(one: PreTrainedModel, two: PreTrainedModel) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_failure_09_equal_seeds_give_equal_weights(tokenizer: PreTrainedTokenizerBase) -> None:
    one = build_llama(SCRATCH, tokenizer, 1)
    torch.rand(3)
    assert weights_equal(one, build_llama(SCRATCH, tokenizer, 1))
    assert not weights_equal(one, build_llama(SCRATCH, tokenizer, 2))


def test_a_model_from_scratch_fits_its_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    model = build_llama(SCRATCH, tokenizer, 1)
    assert model.get_output_embeddings().weight.shape[0] == len(tokenizer)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)
    assert context_length(model) == 48


def test_rule_07_dropout_is_off_in_every_loaded_model(tmp_path: Path, build_lm: Build, build_scalar: Build) -> None:
    """GPT-2 with dropout 0.1 in its folder, and in training mode as the Trainer sets it."""
    build_lm("gpt2", dropout=0.1).save_pretrained(tmp_path / "lm")
    build_scalar("gpt2", dropout=0.1).save_pretrained(tmp_path / "scalar")
    loaded = (
        load_causal_lm(tmp_path / "lm"),
        load_scalar_model(tmp_path / "scalar"),
        scalar_model_from(tmp_path / "lm", 1),
    )
    for model in loaded:
        model.train()
        assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
        body = getattr(model, model.base_model_prefix)
        assert torch.equal(body(IDS).last_hidden_state, body(IDS).last_hidden_state)


def test_loaded_models_are_float32(tmp_path: Path, build_lm: Build) -> None:
    build_lm().bfloat16().save_pretrained(tmp_path)
    assert load_causal_lm(tmp_path).dtype == torch.float32
    assert scalar_model_from(tmp_path, 1).dtype == torch.float32


def test_a_scalar_model_keeps_the_body_and_gets_a_fresh_head(tmp_path: Path, kind: str, build_lm: Build) -> None:
    """Weights N(0, 1/(d+1)), a function of the seed."""
    lm = build_lm(kind)
    lm.save_pretrained(tmp_path)
    model = scalar_model_from(tmp_path, 1)
    body, expected = getattr(model, model.base_model_prefix), getattr(lm, lm.base_model_prefix)
    assert weights_equal(body, expected)
    weight = scalar_head(model).weight.detach()
    assert weight.shape == (1, 32)
    assert 0.6 < weight.std() * 33**0.5 < 1.4
    torch.rand(5)
    assert torch.equal(scalar_head(scalar_model_from(tmp_path, 1)).weight, weight)
    assert not torch.equal(scalar_head(scalar_model_from(tmp_path, 2)).weight, weight)


def test_a_folder_without_a_scalar_head_is_refused(tmp_path: Path, build_lm: Build) -> None:
    build_lm().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="expected one output a token"):
        load_scalar_model(tmp_path)


def test_an_architecture_that_hides_its_head_is_refused() -> None:
    config = BertConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(UserError, match="no linear head named `score`"):
        scalar_head(BertForSequenceClassification(config))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_checkpoint_is_equal_bytes_each_time(
    tmp_path: Path, kind: str, build_lm: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Also after a way through another folder: no path or name of it stays behind."""
    save_checkpoint(tmp_path / "one", build_lm(kind), tokenizer)
    save_checkpoint(tmp_path / "two", build_lm(kind), tokenizer)
    first = files_of(tmp_path / "one")
    assert first == files_of(tmp_path / "two")
    assert not any(str(tmp_path).encode() in content for content in first.values())
    for start in ("one", "two"):
        model = load_causal_lm(tmp_path / start)
        save_checkpoint(tmp_path / f"from-{start}", model, AutoTokenizer.from_pretrained(tmp_path / start))
    assert files_of(tmp_path / "from-one") == files_of(tmp_path / "from-two")
    assert not any(str(tmp_path).encode() in content for content in files_of(tmp_path / "from-one").values())


def test_a_checkpoint_holds_no_pickle(tmp_path: Path, build_lm: Build, tokenizer: PreTrainedTokenizerBase) -> None:
    tmp_path.joinpath("training_args.bin").write_bytes(b"left by a Trainer")
    save_checkpoint(tmp_path, build_lm(), tokenizer)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".jinja", ".safetensors"}


def test_a_policy_loads_with_the_auto_classes(
    tmp_path: Path, kind: str, build_lm: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = build_lm(kind)
    save_checkpoint(tmp_path, model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def test_a_reward_model_loads_with_the_auto_classes(
    tmp_path: Path, kind: str, build_scalar: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A padded batch through the plain Hugging Face model gives our scores."""
    model = build_scalar(kind)
    save_checkpoint(tmp_path, model, tokenizer)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ours = sequence_scores(load_scalar_model(tmp_path).eval(), pad_batch([[3, 9, 4], [3, 4]], [[20, 21], [30]], 0))
    ids = torch.tensor([[3, 9, 4, 20, 21], [3, 4, 30, 0, 0]])
    theirs = loaded(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, 0]
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


def test_a_placed_model_is_for_reading_only(build_lm: Build) -> None:
    model = place(copy.deepcopy(build_lm("gpt2", dropout=0.1)).train())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_rule_20_a_mapped_scalar_model_is_scale_times_output_plus_shift(
    tmp_path: Path, kind: str, build_scalar: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Before and after a round trip through a folder, which `from_pretrained` reads too, without the shift."""
    model, mapped = build_scalar(kind), build_scalar(kind)
    map_scalar(mapped, 2.0, -3.0)
    batch = pad_batch([[5, 6, 7], [8]], [[9, 10], [11]], pad_id=0)
    expected = 2.0 * sequence_scores(model, batch) - 3.0
    assert torch.allclose(sequence_scores(mapped, batch), expected, atol=1e-5)
    save_checkpoint(tmp_path / "critic", mapped, tokenizer)
    assert torch.allclose(sequence_scores(load_scalar_model(tmp_path / "critic"), batch), expected, atol=1e-5)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").eval()
    assert torch.allclose(sequence_scores(plain, batch), expected + 3.0, atol=1e-5)


def test_what_is_random_in_training_mode_is_off_whatever_its_name() -> None:
    config = without_dropout(OPTConfig(layerdrop=0.2, dropout=0.1))
    assert (config.layerdrop, config.dropout) == (0.0, 0.0)


def test_an_architecture_without_a_scalar_model_is_refused_before_training(tmp_path: Path) -> None:
    config = GraniteConfig(**SIZE, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no AutoModelForSequenceClassification for granite"):
        scalar_model_from(tmp_path, 1)
    with pytest.raises(UserError, match="no AutoModelForSequenceClassification for granite"):
        fresh_head(model)


def test_the_head_of_a_shared_critic_reads_what_the_output_layer_reads() -> None:
    config = OPTConfig(vocab_size=60, hidden_size=32, ffn_dim=40, num_hidden_layers=1, num_attention_heads=4,
                       word_embed_proj_dim=16, do_layer_norm_before=False)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    batch = pad_batch([[3, 9, 4]], [[20, 21]], 1)
    head, hidden = fresh_head(model), predict(model, batch).states
    assert hidden is not None
    torch.nn.init.normal_(head.weight)
    own = scalar_model_of(model, head)
    assert own.get_input_embeddings().weight is model.get_input_embeddings().weight, "the body is not copied"
    alone = state_values(own, batch)
    assert torch.allclose(head(hidden)[None, :, 0], alone, atol=1e-5)


def test_the_context_of_a_model_with_a_part_for_text() -> None:
    text = {**SIZE, "num_key_value_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = SimpleNamespace(config=Gemma3Config(text_config=text, vision_config=vision))
    assert context_length(cast(PreTrainedModel, model)) == 48


def test_a_vocabulary_grows_with_the_tokenizer_and_never_shrinks(
    build_lm: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    model, added = build_lm(), copy.deepcopy(tokenizer)
    model.config.pad_token_id = None
    added.add_tokens(["<|new|>"])
    for given, embeddings in ((added, len(tokenizer) + 1), (tokenizer, len(tokenizer) + 1)):
        fit_vocabulary(model, given)
        assert model.get_input_embeddings().num_embeddings == embeddings
        assert model.get_output_embeddings().weight.shape[0] == embeddings
    assert model.config.pad_token_id == tokenizer.pad_token_id
