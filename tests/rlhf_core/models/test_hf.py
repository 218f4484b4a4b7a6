"""`models.py`: equal seeds give equal weights, dropout is off, and a saved folder is equal bytes that load anywhere."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Gemma3Config,
    GraniteConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core.config.base import ScratchConfig
from rlhf_core.config.precision import Frozen
from rlhf_core.data.tokenizer import stop_ids
from rlhf_core.errors import UserError
from rlhf_core.inspect.dialogue import load_chat_model
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


# weights that are missing, have another name, or are too many


Rename = Callable[[str], str | None]
FOLDERS: dict[str, Rename] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "parallel": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "compiled layers": lambda name: re.sub(r"(layers\.\d\.)", r"\1_orig_mod.", name),
}
"""Names of weights in a checkpoint of a wrapped model, by their own."""


def rewritten(source: Path, target: Path, rename: Rename, **config: object) -> Path:
    """A copy of a model folder with other names of weights (None: left out) and other settings."""
    shutil.copytree(source, target)
    weights = {new: tensor for name, tensor in load_file(source / "model.safetensors").items() if (new := rename(name))}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(content))
    return target


@pytest.fixture
def whole(tmp_path: Path, build_lm: Build, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A language model whose output layer has weights of its own."""
    save_checkpoint(tmp_path / "whole", build_lm("qwen2"), tokenizer)
    return tmp_path / "whole"


@pytest.mark.parametrize("name", FOLDERS)
def test_names_of_a_wrapped_model_are_repaired_and_said(name: str, whole: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    model = load_causal_lm(rewritten(whole, tmp_path / "wrapped", FOLDERS[name]), log=lines.append)
    expected = load_causal_lm(whole)
    assert weights_equal(model, expected)
    assert re.fullmatch(r".*/wrapped: weights renamed: (module\.|.*_orig_mod\.)\S+ is \S+, and \d+ more", lines[0])
    save_checkpoint(tmp_path / "saved", model, AutoTokenizer.from_pretrained(whole))
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == expected.state_dict().keys()
    read: list[str] = []
    load_causal_lm(tmp_path / "saved", log=read.append)
    assert not read


LACKING: dict[str, tuple[Rename, str]] = {
    "one MLP": (lambda name: None if "layers.1.mlp" in name else name, r"mlp\.down_proj\.weight, .* up_proj|mlp"),
    "output layer": (lambda name: None if name == "lm_head.weight" else name, r"missing \(lm_head\.weight\)"),
    "another wrapper": (lambda name: f"wrapped.{name}", r"missing .* and \d+ more\), and others .*\(wrapped\.lm_head"),
    "a wrapper and the names": (
        lambda name: {"model.norm.weight": "module.model.layers.0.mlp.up_proj.weight"}.get(name, name),
        r"missing \(model\.norm\.weight\), and others .*\(module\.model\.layers\.0\.mlp\.up_proj\.weight\)",
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_rule_31_missing_weights_are_an_error_that_names_them(name: str, whole: Path, tmp_path: Path) -> None:
    """transformers draws them at random, with a warning that no stage shows."""
    rename, words = LACKING[name]
    folder = rewritten(whole, tmp_path / "lacking", rename)
    for load in (load_causal_lm, lambda path: load_chat_model(path, "policy")):
        with pytest.raises(UserError, match=words) as refused:
            load(folder)
        assert "\n" not in str(refused.value)
        assert "save_pretrained" in str(refused.value)


def test_a_body_is_enough_only_where_the_output_layer_is_tied(tmp_path: Path, build_lm: Build) -> None:
    for kind in ("llama", "qwen2"):
        model = build_lm(kind)
        model.save_pretrained(tmp_path / kind)
        rewritten(tmp_path / kind, tmp_path / f"{kind}-body", lambda name: name.removeprefix("model."))
        model.base_model.save_pretrained(tmp_path / f"{kind}-alone")
    tied = load_causal_lm(tmp_path / "llama")
    assert weights_equal(load_causal_lm(tmp_path / "llama-body"), tied)
    assert weights_equal(load_causal_lm(tmp_path / "llama-alone"), tied)
    with pytest.raises(UserError, match=r"missing \(lm_head\.weight\)"):
        load_causal_lm(tmp_path / "qwen2-alone")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("head", ["score", "value_head"])
def test_a_reward_model_is_no_language_model(kind: str, head: str, tmp_path: Path, build_scalar: Build) -> None:
    build_scalar(kind).save_pretrained(tmp_path / "reward")
    folder = rewritten(tmp_path / "reward", tmp_path / "named", lambda name: name.replace("score.", f"{head}."))
    with pytest.raises(UserError, match=f"{head}.weight"):
        load_causal_lm(folder)


def test_tensors_that_are_not_read_are_said(whole: Path, tmp_path: Path) -> None:
    """A policy of TRL keeps its value head."""
    folder, lines = rewritten(whole, tmp_path / "trl", lambda name: name), list[str]()
    weights = load_file(folder / "model.safetensors") | {"v_head.summary.weight": torch.ones(1, 32)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert weights_equal(load_causal_lm(folder, log=lines.append), load_causal_lm(whole))
    assert lines == [f"{folder}: not read, because the model has no place for them: v_head.summary.weight"]


@pytest.mark.parametrize("head", ["value_head", "v_head", "v_head.summary"])
@pytest.mark.parametrize("frozen", ["float32", "bfloat16"])
def test_a_scalar_head_of_openrlhf_or_trl_is_read(
    head: str, frozen: Frozen, tmp_path: Path, build_scalar: Build
) -> None:
    """With the bias that TRL's has; in bfloat16 the head keeps its own numbers."""
    scalar, lines = build_scalar("llama"), list[str]()
    scalar.save_pretrained(tmp_path / "reward")
    folder = rewritten(tmp_path / "reward", tmp_path / "named", lambda name: name.replace("score.", f"{head}."))
    weights = load_file(folder / "model.safetensors") | {f"{head}.bias": torch.tensor([0.25])}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_scalar_model(folder, frozen=frozen, log=lines.append)
    assert torch.equal(scalar_head(model).weight, scalar_head(scalar).weight)
    assert scalar_head(model).bias.item() == 0.25
    assert lines == [f"{folder}: weights renamed: {head}.bias is score.bias, and 1 more"]


ODD_HEADS = ["classifier", "reward_head", "regression_head", "critic.score", "model.score", "module.score", "quality"]


@pytest.mark.parametrize("head", ODD_HEADS)
def test_a_scalar_head_of_any_name_is_no_language_model(head: str, whole: Path, tmp_path: Path) -> None:
    """With the class of a language model in config.json; the last name is found by its one row."""
    folder = with_tensors(whole, tmp_path / "odd", {f"{head}.weight": torch.ones(1, 32)})
    with pytest.raises(UserError, match=rf"head for scores \({head}\.weight\)"):
        load_causal_lm(folder)


def test_a_reward_model_of_trl_is_no_language_model(tmp_path: Path, build_scalar: Build) -> None:
    build_scalar("llama").save_pretrained(tmp_path / "reward")
    folder = rewritten(tmp_path / "reward", tmp_path / "trl", lambda name: name.replace("score.", "v_head."))
    with pytest.raises(UserError, match=r"head for scores \(\w+ForSequenceClassification\)"):
        load_causal_lm(folder)


def with_tensors(source: Path, target: Path, extra: dict[str, torch.Tensor], **config: object) -> Path:
    """A copy of a model folder with further tensors."""
    rewritten(source, target, lambda name: name, **config)
    weights = load_file(target / "model.safetensors") | extra
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("own", ["score", "model.score"])
@pytest.mark.parametrize("other", ["value_head", "v_head", "v_head.summary"])
def test_the_own_head_of_a_reward_model_comes_before_one_of_another_name(
    own: str, other: str, tmp_path: Path, build_scalar: Build
) -> None:
    scalar = build_scalar("llama")
    scalar.save_pretrained(tmp_path / "reward")
    named = rewritten(tmp_path / "reward", tmp_path / "named", lambda name: name.replace("score.", f"{own}."))
    extra = {f"{other}.weight": torch.ones(1, 32), f"{other}.bias": torch.ones(1)}
    folder = with_tensors(named, tmp_path / "two", extra)
    for frozen in ("float32", "bfloat16"):
        head = scalar_head(load_scalar_model(folder, frozen=cast(Frozen, frozen)))
        assert torch.equal(head.weight, scalar_head(scalar).weight)
        assert head.bias is None


def test_a_head_has_one_bias(tmp_path: Path, build_scalar: Build) -> None:
    build_scalar("llama").save_pretrained(tmp_path / "reward")
    folder = with_tensors(tmp_path / "reward", tmp_path / "two", {"score.bias": torch.ones(2)})
    with pytest.raises(UserError, match="has 2 biases, not one"):
        load_scalar_model(folder)


UNREAD: dict[str, tuple[dict[str, torch.Tensor], dict[str, object]]] = {
    "a layer": ({"model.layers.2.mlp.up_proj.weight": torch.ones(48, 32)}, {}),
    "a layer by config.json": ({}, {"num_hidden_layers": 1, "layer_types": None}),
    "a bias": ({"model.layers.0.mlp.up_proj.bias": torch.ones(48)}, {}),
    "a bias of the output layer": ({"lm_head.bias": torch.ones(60)}, {}),
    "a wrapped copy": ({"module.model.norm.weight": torch.zeros(32)}, {}),
}


@pytest.mark.parametrize("name", UNREAD)
def test_weights_of_the_models_own_layers_that_are_not_read_are_refused(name: str, whole: Path, tmp_path: Path) -> None:
    extra, config = UNREAD[name]
    folder = with_tensors(whole, tmp_path / "more", extra, **config)
    scalar = [] if "lm_head.bias" in extra else [lambda path: scalar_model_from(path, 1)]
    for load in (load_causal_lm, *scalar):
        with pytest.raises(UserError, match="weights of its own layers are not read") as refused:
            load(folder)
        assert next(iter(extra), "model.layers.1.input_layernorm.weight") in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]),
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias", "h.1.attn.masked_bias"]),
    ],
)
def test_masks_and_positions_of_older_versions_may_be_there(
    kind: str, names: list[str], tmp_path: Path, build_lm: Build
) -> None:
    build_lm(kind).save_pretrained(tmp_path / "model")
    extra = {name: torch.ones(8) for name in names}
    if kind == "llama":  # the tied output layer as a copy
        extra["lm_head.weight"] = load_file(tmp_path / "model/model.safetensors")["model.embed_tokens.weight"].clone()
    folder = with_tensors(tmp_path / "model", tmp_path / "old", extra)
    assert weights_equal(load_causal_lm(folder), load_causal_lm(tmp_path / "model"))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_an_output_layer_that_is_tied_and_has_weights_of_its_own_is_refused(
    prefix: str, whole: Path, tmp_path: Path
) -> None:
    folder = rewritten(whole, tmp_path / "tied", lambda name: prefix + name, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, .*: false"):
        load_causal_lm(folder)


def test_a_missing_part_of_the_weights_is_one_line(tmp_path: Path, build_lm: Build) -> None:
    build_lm("qwen2").save_pretrained(tmp_path, max_shard_size="10KB")
    part = sorted(tmp_path.glob("model-*.safetensors"))[1]
    part.unlink()
    with pytest.raises(UserError, match=f"{part.name} is missing, which its index of weights names") as refused:
        load_causal_lm(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_scalar_model_lacks_nothing_and_a_fresh_one_its_head_alone(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing \(score\.weight\), and others .*\(lm_head\.weight\)"):
        load_scalar_model(rewritten(whole, tmp_path / "headless", lambda name: name, num_labels=1, id2label={"0": "a"}))
    scalar_model_from(whole, 1)
    with pytest.raises(UserError, match=r"missing \(model\.norm\.weight\)"):
        scalar_model_from(rewritten(whole, tmp_path / "a", lambda n: None if n == "model.norm.weight" else n), 1)


def test_weights_of_another_shape_are_named(whole: Path, tmp_path: Path) -> None:
    folder = rewritten(whole, tmp_path / "narrow", lambda name: name, intermediate_size=40)
    with pytest.raises(UserError, match=r"down_proj\.weight has the shape \(32, 48\), and by config\.json \(32, 40\)"):
        load_causal_lm(folder)


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZE, num_key_value_heads=4, num_local_experts=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "experts")
    for pattern in (r"experts\.1\.w1", r"experts\.1\."):
        folder = tmp_path / str(len(pattern))
        rewritten(tmp_path / "experts", folder, lambda name, part=pattern: None if re.search(part, name) else name)
        with pytest.raises(UserError, match="experts"):
            load_causal_lm(folder)


# one end of answers


def test_rule_26_config_generation_config_and_tokenizer_name_one_end(
    tmp_path: Path, build_lm: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The tokenizer's eos, and those control tokens that ended the model's answers before; the pad token everywhere.
    Text is no end: the configuration class of Llama names token 2."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = "<|user|>"
    model = build_lm()
    model.config.eos_token_id, model.generation_config.eos_token_id = [1, 40], 4
    model.generation_config.pad_token_id = 1
    fit_vocabulary(model, tokenizer)
    save_checkpoint(tmp_path, load_saved(model, tmp_path / "first", tokenizer), tokenizer)
    config, generation = (
        json.loads((tmp_path / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    assert (config["eos_token_id"], config["pad_token_id"]) == (3, 0)
    assert (generation["eos_token_id"], generation["pad_token_id"]) == ([3, 1, 4], 0)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 3
    scalar = scalar_model_from(tmp_path, 1)
    assert (scalar.config.eos_token_id, scalar.config.pad_token_id) == (3, 0)
    assert stop_ids(tokenizer, load_causal_lm(tmp_path)) == {1, 3, 4}


@pytest.mark.parametrize("named", [2, [2, 0, 4], 20])
def test_rule_26_a_default_of_the_configuration_makes_no_bos_pad_or_text_an_end(
    named: int | list[int], tmp_path: Path, build_lm: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A folder without generation_config.json; what that file names counts, such as Qwen's pad token, which ends its
    texts."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = "<|system|>"
    model = build_lm()
    model.config.eos_token_id = named
    save_checkpoint(tmp_path, model, tokenizer)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    kept = {1, 4} if isinstance(named, list) else {1}
    loaded = load_causal_lm(tmp_path)
    assert stop_ids(tokenizer, loaded) == kept
    fit_vocabulary(loaded, tokenizer)
    assert stop_ids(tokenizer, loaded) == kept
    assert loaded.generation_config.eos_token_id == ([1, 4] if len(kept) > 1 else 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 0]}')
    loaded = load_causal_lm(tmp_path)
    fit_vocabulary(loaded, tokenizer)
    assert stop_ids(tokenizer, loaded) == kept | {0, 4}


def load_saved(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model as a later stage loads it."""
    save_checkpoint(folder, model, tokenizer)
    return load_causal_lm(folder)
