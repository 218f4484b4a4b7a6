"""`actor_critic.py`: which models there are, one pass for policy and values, adapters that switch off to the
reference."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.batch import pad_batch, response_logits, state_values
from rlhf_core.models.hf import fresh_head, load_causal_lm, load_scalar_model, save_checkpoint, scalar_model_of
from rlhf_core.models.packed import can_pack
from rlhf_core.models.precision import body_precision
from rlhf_core.models.shared_body import add_scalar_adapter, recompute_with
from rlhf_core.models.token_logprobs import exact_kl
from rlhf_core.ppo.actor_critic import ActorCritic, require_equal_start
from rlhf_core.ppo.trainer import PPOTrainer

MakeTrainer = Callable[..., PPOTrainer]
Build = Callable[..., PreTrainedModel]

SHARED: dict[str, Any] = {"critic": {"kind": "shared"}}
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0}}
BATCH = pad_batch([[3, 9, 4], [3, 8, 7, 6, 4]], [[20, 21, 1], [30]], 0)


def equal(one: Any, two: Any) -> bool:
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_failure_12_a_shared_critic_reads_policy_and_values_in_one_pass(kind: str, make_trainer: MakeTrainer) -> None:
    """The body runs once a forward, no second model is in memory, and the values are those of the last hidden state."""
    models = make_trainer(kind, **SHARED).models
    torch.nn.init.normal_(models.head.weight)
    assert can_pack(models.policy)
    models.read(BATCH, lambda p: p)  # examines the output layer
    body, passes = getattr(models.policy, models.policy.base_model_prefix), []
    body.register_forward_hook(lambda *_: passes.append(1))
    predictions, values = models.read(BATCH, lambda p: p)
    assert passes == [1]
    assert models.critic is None
    alone = scalar_model_of(models.policy, models.head)
    assert torch.allclose(values, state_values(alone, BATCH), atol=1e-5)
    assert torch.allclose(predictions.logits(), response_logits(models.policy, BATCH), atol=1e-5)


def test_a_shared_critic_trains_head_and_body(make_trainer: MakeTrainer) -> None:
    """The head by its own learning rate; the body feels the value loss too."""
    trainer = make_trainer(**SHARED, entropy_coef=0.0)
    with_values = copy.deepcopy(trainer.models.policy.state_dict())
    row = trainer.step()
    assert row["grad_norm_critic"] > 0
    assert trainer.models.head.weight.abs().max() > 0
    trainer.step()
    deaf = make_trainer(**SHARED, entropy_coef=0.0, vf_coef=0.0)
    deaf.step(), deaf.step()
    changed = trainer.models.policy.state_dict()
    assert any(not torch.equal(changed[name], deaf.models.policy.state_dict()[name]) for name in with_values)


@pytest.mark.parametrize("advantage", ["reinforce", "rloo", "grpo"])
def test_without_a_critic_nothing_values_states(make_trainer: MakeTrainer, advantage: str) -> None:
    trainer = make_trainer(advantage=advantage, samples_per_prompt=2)
    assert list(trainer.optimizers) == ["policy"]
    assert not trainer.models.has_critic
    row = trainer.step()
    assert row["value_loss"] is None
    assert row["explained_variance"] is None
    assert row["grad_norm_policy"] > 0


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_failure_12_with_lora_the_reference_is_the_policy_without_its_adapter(
    make_trainer: MakeTrainer, build_lm: Build, critic: str
) -> None:
    """Bit for bit the start, also after training, and no second policy is in memory."""
    trainer = make_trainer(**LORA, critic={"kind": critic})
    start = build_lm("llama", seed=1).requires_grad_(False)
    for _ in range(2):
        assert torch.equal(trainer.models.read_reference(BATCH, lambda p: p.logits()), response_logits(start, BATCH))
        row = trainer.step()
    assert trainer.models.reference is None
    assert row["kl_k3"] > 0
    assert trainer.step()["engine_mismatch_max"] < 1e-4


def test_with_lora_another_model_can_be_the_reference(
    make_trainer: MakeTrainer, build_lm: Build, build_scalar: Build
) -> None:
    """As in a later round, whose policy begins where the last one ended and whose reference is the SFT model."""
    other = build_lm("llama", seed=2)
    models = ActorCritic(make_trainer(**LORA).config, build_lm("llama", seed=1), other, build_scalar())
    assert torch.equal(models.read_reference(BATCH, lambda p: p.logits()), response_logits(other, BATCH))
    assert not torch.equal(
        models.read_policy(BATCH, lambda p: p.logits()), models.read_reference(BATCH, lambda p: p.logits())
    )
    assert models.trained().keys() == {"policy", "critic"}
    assert not any(parameter.requires_grad for parameter in other.parameters())


def test_with_lora_only_adapters_and_heads_are_trained(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**LORA)
    before = {name: copy.deepcopy(model.state_dict()) for name, model in trainer.models._bodies().items()}
    trainer.step()
    for name, model in trainer.models._bodies().items():
        changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[name][key])}
        assert changed
        assert all("lora_" in key or key == "score.weight" for key in changed)
        assert changed <= trainer.models.state_dict()[name].keys()
        assert all("lora_" in key or key == "score.weight" for key in trainer.models.state_dict()[name])


def test_the_finished_models_are_plain_folders(
    make_trainer: MakeTrainer, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """With LoRA and with a shared critic, transformers alone loads what the run saved, and gets the same answers."""
    trainer = make_trainer(**LORA, **SHARED)
    trainer.step()
    predictions, values = trainer.models.read(BATCH, lambda p: p)
    logits = predictions.logits()
    save_checkpoint(tmp_path / "critic", copy.deepcopy(trainer.models).finished_critic(), tokenizer)
    save_checkpoint(tmp_path / "policy", trainer.models.finished_policy(), tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert torch.allclose(response_logits(loaded, BATCH), logits, atol=1e-4)
    assert torch.allclose(state_values(load_scalar_model(tmp_path / "critic"), BATCH), values, atol=1e-4)


RLOO: dict[str, Any] = {"advantage": "rloo", "samples_per_prompt": 2}
MOVES: dict[str, Any] = {"reference_ema": 0.3}


@pytest.mark.parametrize("options", [SHARED, LORA, {**LORA, **SHARED}, RLOO, MOVES, {**LORA, **MOVES}])
def test_rule_19_every_kind_of_models_resumes_to_the_same_bytes(
    make_trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    whole = make_trainer(**options)
    rows = [whole.step() for _ in range(3)]
    first, second = make_trainer(**options), make_trainer(**options)
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [second.step(), second.step()] == rows[1:]
    assert equal_states(second.models.state_dict(), whole.models.state_dict())


def equal_states(one: Any, two: Any) -> bool:
    return all(torch.equal(w, two[name][key]) for name, part in one.items() for key, w in part.items())


@pytest.mark.parametrize("options", [{}, LORA, {**LORA, **SHARED}, {"kl": {"penalty": "loss", "estimator": "full"}}])
def test_a_moving_reference_is_the_average_of_the_policies_of_the_steps(
    make_trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    """By hand for three steps; it is never trained, and its start stays. The penalty is to where it is, and `kl` to its
    start: a policy that moves away from both is nearer to the reference that follows."""
    trainer = make_trainer(**options, **MOVES, learning_rate=1e-2)
    models = trainer.models
    policy = models.adapters.get("policy", models.policy)
    average = [parameter.clone() for parameter in models.moving.parameters()]
    assert "lora" not in options or all(map(torch.equal, average, policy.parameters()))
    with models.as_reference(fixed=True) as fixed:
        start = response_logits(fixed, BATCH)
    for number in range(3):
        rollout = trainer.rollout()
        with models.as_reference(fixed=True) as fixed:
            assert torch.equal(response_logits(fixed, BATCH), start)
        row = trainer.step(rollout)
        average = [0.7 * mine + 0.3 * now.detach() for mine, now in zip(average, policy.parameters(), strict=True)]
        assert row["kl"] == pytest.approx(rollout.fixed_kl.sum(dim=1).mean().item())
        assert row["kl_moving"] == pytest.approx(rollout.ref_kl.sum(dim=1).mean().item())
        assert row["kl_k1"] == pytest.approx((rollout.old_logprobs - rollout.fixed_logprobs).sum(dim=1).mean().item())
        assert (row["kl_moving"] == row["kl"]) is (number == 0)
    assert 0 < row["kl_moving"] < row["kl"]
    found = list(models.moving.parameters())
    assert all(torch.allclose(mine, wanted, atol=1e-6) for mine, wanted in zip(found, average, strict=True))
    assert not any(parameter.requires_grad for parameter in found)
    assert not {id(p) for p in found} & {id(p) for group in models.trained().values() for p in group}


def test_an_adaptive_coefficient_follows_the_kl_to_the_moving_reference(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(**MOVES, learning_rate=1e-2, kl={"controller": "adaptive"})
    given: list[float] = []
    monkeypatch.setattr(trainer.controller, "update", lambda kl, count: given.append(kl))
    rows = [trainer.step() for _ in range(3)]
    assert given == [row["kl_moving"] for row in rows]
    assert given[-1] != rows[-1]["kl"]


def test_with_lora_the_moving_reference_is_in_no_finished_policy(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**LORA, **MOVES, learning_rate=1e-2)
    trainer.step()
    logits = trainer.models.read_policy(BATCH, lambda p: p.logits())
    assert not torch.equal(trainer.models.read_reference(BATCH, lambda p: p.logits()), logits)
    policy = trainer.models.finished_policy()
    assert not any("lora" in name for name, _ in policy.named_parameters())
    assert torch.allclose(response_logits(policy, BATCH), logits, atol=1e-4)


def test_no_reference_moves_while_only_the_critic_learns(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**MOVES, critic={"warmup_steps": 1})
    before = [parameter.clone() for parameter in trainer.models.moving.parameters()]
    trainer.step()
    assert all(map(torch.equal, before, trainer.models.moving.parameters()))
    trainer.step()
    assert not all(map(torch.equal, before, trainer.models.moving.parameters()))


def on_one_body(make_trainer: MakeTrainer, build_lm: Build, **options: Any) -> PPOTrainer:
    """A run whose critic is an adapter on the policy's body."""
    before = make_trainer(**LORA, **options)
    policy = build_lm("llama", seed=1).requires_grad_(False)
    head = fresh_head(policy)
    head.load_state_dict(before.models.critic.score.state_dict())
    critic = add_scalar_adapter(policy, head, before.config.lora, 0, "critic")
    models = ActorCritic(before.config, policy, None, critic)
    arguments = before.tokenizer, before.scoring.source, before.prompts, before.seed
    return PPOTrainer(before.config, models, *arguments)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_a_critic_on_the_policys_body_resumes_to_the_same_bytes_and_is_saved_as_a_folder(
    make_trainer: MakeTrainer,
    build_lm: Build,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    options: dict[str, Any],
) -> None:
    whole = on_one_body(make_trainer, build_lm, **options)
    rows = [whole.step() for _ in range(3)]
    assert all(row["grad_norm_critic"] > 0 and row["grad_norm_policy"] > 0 for row in rows)
    first, second = (on_one_body(make_trainer, build_lm, **options) for _ in range(2))
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [second.step(), second.step()] == rows[1:]
    start = build_lm("llama", seed=1).requires_grad_(False)
    assert torch.equal(whole.models.read_reference(BATCH, lambda p: p.logits()), response_logits(start, BATCH))
    predictions, values = whole.models.read(BATCH, lambda p: p)
    logits = predictions.logits().detach()
    save_checkpoint(tmp_path / "critic", copy.deepcopy(whole.models).finished_critic(), tokenizer)
    save_checkpoint(tmp_path / "policy", whole.models.finished_policy(), tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert torch.allclose(response_logits(loaded, BATCH), logits, atol=1e-4)
    assert torch.allclose(state_values(load_scalar_model(tmp_path / "critic"), BATCH), values, atol=1e-4)


def test_adapters_are_switched_in_a_repeated_pass_only_where_two_are_on_one_body(
    make_trainer: MakeTrainer, build_lm: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switching walks through the model once a layer."""
    given = []
    monkeypatch.setattr(
        "rlhf_core.ppo.actor_critic.recomputing", lambda *arguments: given.append(arguments[2]) or nullcontext()
    )
    for trainer in (make_trainer(**LORA), on_one_body(make_trainer, build_lm)):
        with trainer.models.training():
            pass
    assert given == [None, recompute_with]


def test_a_critic_on_the_policys_body_trains_as_one_with_its_own(make_trainer: MakeTrainer, build_lm: Build) -> None:
    """The same rows of figures, to rounding, where the critic's own body is the policy's start."""
    shared = on_one_body(make_trainer, build_lm)
    critic = scalar_model_of(build_lm("llama", seed=1), copy.deepcopy(shared.models.critic.score))
    models = ActorCritic(shared.config, build_lm("llama", seed=1), None, critic)
    arguments = shared.tokenizer, shared.scoring.source, shared.prompts, shared.seed
    own = PPOTrainer(shared.config, models, *arguments)
    for _ in range(2):
        one, two = shared.step(), own.step()
        assert one == {name: value if value is None else pytest.approx(value, rel=1e-4) for name, value in two.items()}


def gradients(trainer: PPOTrainer) -> torch.Tensor:
    """The policy's gradient of the first minibatch, read where the optimiser would step."""
    seen: list[torch.Tensor] = []

    def stop(*_: Any) -> None:
        seen.append(torch.cat([p.grad.flatten() for p in trainer.models.trained()["policy"] if p.grad is not None]))
        raise StopIteration

    trainer._step_optimizers = stop  # type: ignore[method-assign]
    with pytest.raises(StopIteration):
        trainer.step()
    return seen[0]


def test_gradient_checkpointing_changes_memory_and_not_the_gradient(kind: str, make_trainer: MakeTrainer) -> None:
    """Layers run again in the backward pass: the same gradient, more forward passes of a layer."""
    usual, again = make_trainer(kind), make_trainer(kind, gradient_checkpointing=True)
    calls = {}
    for name, trainer in (("usual", usual), ("again", again)):
        layer = next(m for m in trainer.models.policy.modules() if hasattr(m, "mlp"))
        counted: list[int] = []
        layer.mlp.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
        calls[name] = (gradients(trainer), counted)
    assert torch.allclose(calls["usual"][0], calls["again"][0], rtol=1e-5, atol=1e-8)
    assert len(calls["again"][1]) > len(calls["usual"][1])
    assert not again.models.policy.training


def test_rule_07_bfloat16_stays_within_its_tolerance_and_weights_stay_float32(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(precision="bfloat16")
    exact = make_trainer()
    rollout = trainer.rollout()
    logits = trainer.models.read_policy(BATCH, lambda p: p.logits())
    assert not torch.equal(logits, exact.models.read_policy(BATCH, lambda p: p.logits()))
    assert (logits.dtype, rollout.old_logprobs.dtype) == (torch.float32, torch.float32)
    assert trainer.step()["engine_mismatch_max"] > 0
    assert {p.dtype for p in trainer.models.policy.parameters()} == {torch.float32}


ARCHITECTURES = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 2},
    "gpt2": {},
    "gpt_neox": {},
    "gemma": {"head_dim": 16, "num_key_value_heads": 2},
    "phi": {},
}
SIZE = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.mark.parametrize("way", ["all weights", "lora", "lora, another reference"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rule_27_in_bfloat16_policy_and_reference_with_equal_weights_are_equal_functions(
    name: str, way: str, tmp_path: Path, ppo_values: Callable[..., dict[str, Any]]
) -> None:
    """Loaded as the stage loads them; with a graph and without. A frozen model as others load it is another function,
    and is refused."""
    torch.manual_seed(1)
    size = {"n_embd" if name == "gpt2" and key == "hidden_size" else key: value for key, value in SIZE.items()}
    start = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **size, **ARCHITECTURES[name]))
    for parameter in start.parameters():
        parameter.data.mul_(3.0)  # far from the even distribution of a new model
    start.save_pretrained(tmp_path)
    lora = {} if way == "all weights" else {"lora": {"rank": 2, "target_modules": "all-linear"}}
    config = PPOConfig(**ppo_values(critic={"kind": "shared"}, **lora))
    load = partial(load_causal_lm, tmp_path)
    body = body_precision("bfloat16", config.lora)
    reference = None if way == "lora" else load(frozen=body)
    models = ActorCritic(config, load(frozen=body), reference, None, precision="bfloat16")

    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            found, other = models.read_policy(BATCH, lambda p: p), models.read_reference(BATCH, lambda p: p)
        assert torch.equal(found.hidden, other.hidden)
        kl = exact_kl(found, other, temperature=1.0).detach()
        assert kl.abs().max() < 1e-6
        require_equal_start(models, BATCH.spread(kl), BATCH.mask)
    with torch.no_grad():
        exact = ActorCritic(PPOConfig(**ppo_values(critic={"kind": "shared"})), load(), load(), None)
        assert not torch.equal(exact.read_policy(BATCH, lambda p: p.hidden), found.hidden), "products are rounded"
    if way == "all weights":
        assert reference.get_input_embeddings().weight.dtype == torch.float32
        assert models.is_at_start()
        with pytest.raises(ValueError, match=r"embeddings are torch\.float32, the reference's torch\.bfloat16"):
            ActorCritic(config, load(), load(frozen="bfloat16"), None, precision="bfloat16")


def test_rule_27_a_start_that_is_another_function_than_its_reference_stops_the_run(
    make_trainer: MakeTrainer, build_lm: Build
) -> None:
    """Where the weights differ the KL may be anything; a trained critic's adapter on the body is no difference."""
    kl, mask = torch.full((2, 3), 1e-3), torch.ones(2, 3)
    same, lora = make_trainer(same_reference=True, precision="bfloat16").models, make_trainer(**LORA).models
    shared = on_one_body(make_trainer, build_lm).models
    with torch.no_grad():
        for parameter in shared.adapters["critic"].parameters():
            parameter.add_(0.1)
    for models in (same, lora, shared):
        require_equal_start(models, kl * 1e-3, mask)
        for wrong in (kl, kl * float("nan")):
            with pytest.raises(RuntimeError, match="policy and reference have the same weights"):
                require_equal_start(models, wrong, mask)
    require_equal_start(make_trainer().models, kl, mask)
    with torch.no_grad():
        next(same.policy.parameters()).add_(0.1)
    require_equal_start(same, kl, mask)


def test_rule_27_the_first_step_compares_policy_and_reference(make_trainer: MakeTrainer) -> None:
    """A reference of the same weights with other positions."""
    make_trainer(same_reference=True).step()
    trainer = make_trainer(same_reference=True)
    before = [parameter.detach().clone() for parameter in trainer.models.policy.parameters()]
    trainer.models.reference.model.rotary_emb.inv_freq.mul_(2.0)
    with pytest.raises(RuntimeError, match="policy and reference have the same weights"):
        trainer.step()
    assert all(torch.equal(p, old) for p, old in zip(trainer.models.policy.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_rule_24_heads_are_float32_under_autocast(make_trainer: MakeTrainer, kind: str) -> None:
    """The logits and values are those of a float32 product of the body's bfloat16 output, with more than the eight
    significant bits of a bfloat16."""
    models = make_trainer(precision="bfloat16", critic={"kind": kind}).models
    if models.head is not None:
        torch.nn.init.normal_(models.head.weight)
    predictions, values = models.read(BATCH, lambda p: p)
    assert predictions.head.weight is not None  # chunks of logits, not the model's own
    for found in (predictions.logits(), values, models.read_reference(BATCH, lambda p: p.logits())):
        assert found.dtype == torch.float32
        assert not torch.equal(found, found.bfloat16().float())


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_rule_21_the_critic_warms_up_without_a_graph_of_the_policy(make_trainer: MakeTrainer, kind: str) -> None:
    models = make_trainer(critic={"kind": kind}).models
    for trains_policy in (True, False):
        predictions, values = models.read(BATCH, lambda p: p, trains_policy)
        assert predictions.hidden.requires_grad == trains_policy
        assert values.requires_grad
    values.sum().backward()
    assert all(parameter.grad is None for parameter in models.trained()["policy"])


@pytest.mark.parametrize(
    ("changes", "reference", "critic"),
    [({}, False, True), ({}, True, False), (SHARED, True, True)],
)
def test_models_that_do_not_fit_the_settings_are_refused(
    make_trainer: MakeTrainer,
    build_lm: Build,
    build_scalar: Build,
    changes: dict[str, Any],
    reference: bool,
    critic: bool,
) -> None:
    config = make_trainer(**changes).config
    given = build_lm(seed=2) if reference else None, build_scalar() if critic else None
    with pytest.raises(ValueError, match="is needed"):
        ActorCritic(config, build_lm(), *given)


def test_finished_models_over_a_bfloat16_body_are_float32(make_trainer: MakeTrainer) -> None:
    """Adapters are merged into float32 weights: a sum of bfloat16 would lose them."""
    trainer = make_trainer(precision="bfloat16", **LORA)
    for model in (trainer.models.policy, trainer.models.critic):
        for name, parameter in model.named_parameters():
            if "lora_" not in name and "score" not in name:
                parameter.data = parameter.data.bfloat16()
    trainer.step()
    policy, critic = trainer.models.finished_policy(), trainer.models.finished_critic()
    assert isinstance(critic, PreTrainedModel)
    assert {p.dtype for model in (policy, critic) for p in model.parameters()} == {torch.float32}
    assert not all(torch.equal(p, p.bfloat16().float()) for p in policy.parameters())
