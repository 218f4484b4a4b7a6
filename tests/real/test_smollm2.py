"""What holds for a pretrained model, on SmolLM2-135M-Instruct: answers, equal starts, Adam's first step, and a PPO run
that is resumed."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import decode_response, encode_prompt, stop_ids
from rlhf_core.models.hf import load_causal_lm, save_checkpoint
from rlhf_core.models.packed import can_pack
from rlhf_core.models.precision import body_precision
from rlhf_core.models.sampling import sample
from rlhf_core.models.scorers import Answers, Scored
from rlhf_core.models.sharding import clip_gradients
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.ppo.actor_critic import START_KL, ActorCritic, require_equal_start
from rlhf_core.ppo.optimizers import build_optimizers
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation
from rlhf_core.ppo.trainer import PPOTrainer

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

COUNTRIES = ("France", "Italy", "Germany", "Japan")
PROMPTS: list[Conversation] = [
    [{"role": "user", "content": f"What is the capital of {country}?"}] for country in COUNTRIES
]
LORA = {"rank": 8}


@pytest.fixture(autouse=True)
def _free_memory() -> Any:
    """A model has half a gigabyte."""
    yield
    gc.collect()


Make = Callable[..., PPOTrainer]


@pytest.fixture
def make(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Make:
    """make(precision="float32", **config) -> PPO from the model, which shares its body with the critic; an answer's
    score is its number of e's."""

    def build(precision: Precision = "float32", **changes: Any) -> PPOTrainer:
        values: dict[str, Any] = {
            **{"steps": 4, "batch_size": 4, "minibatches": 2, "ppo_epochs": 1, "micro_batch_tokens": 512},
            **{"max_new_tokens": 12, "learning_rate": 1e-5, "critic": {"kind": "shared", "warmup_steps": 0}},
        }
        config = PPOConfig.model_validate(values | changes)
        body = body_precision(precision, config.lora)
        policy, reference = (load_causal_lm(folder, frozen=body) for _ in range(2))
        models = ActorCritic(config, policy, None if config.lora else reference, None, 1, precision)
        source = RewardSource(scores_of(tokenizer), ScoreNormalisation(5.0, 3.0))
        return PPOTrainer(config, models, tokenizer, source, PROMPTS, seed=1)

    return build


def scores_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[Answers], Scored]:
    return lambda answers: Scored([float(text.count("e")) for text in answers.texts])


def test_greedy_answers_are_right_and_end_where_the_chat_template_ends_them(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = load_causal_lm(folder)
    stops = stop_ids(tokenizer, model)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id in stops
    assert tokenizer.pad_token_id not in stops
    ids = [encode_prompt(tokenizer, prompt) for prompt in PROMPTS]
    drawn = sample(
        model, ids, [(1, row) for row in range(len(ids))], max_new_tokens=32, temperature=1e-4, stop_ids=stops,
        pad_id=int(tokenizer.pad_token_id), batch_size=len(ids),
    )  # fmt: skip
    texts = [decode_response(tokenizer, response, stops) for response in drawn.responses]
    assert texts[0] == "The capital of France is Paris."
    assert drawn.ended[0]
    assert drawn.responses[0][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_rule_27_policy_and_reference_are_equal_functions_at_the_start(
    precision: Precision, lora: dict[str, Any] | None, make: Make
) -> None:
    trainer = make(precision, lora=lora)
    rollout = trainer.rollout()
    assert trainer.models.is_at_start()
    assert rollout.ref_kl.abs().max() < START_KL
    require_equal_start(trainer.models, rollout.ref_kl, rollout.mask)


def test_packed_passes_compute_what_transformers_computes(folder: Path, make: Make) -> None:
    trainer = make()
    rollout = trainer.rollout()
    assert can_pack(trainer.models.policy)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row, (prompt, response) in enumerate(zip(rollout.prompt_ids, rollout.response_ids, strict=True)):
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(rollout.old_logprobs[row, : len(response)], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("eps", "least", "most"), [(1e-8, 0.95, 1.0), (1e-5, 0.0, 0.7)])
def test_adams_first_step_is_the_learning_rate(eps: float, least: float, most: float, make: Make) -> None:
    """The mean change of a weight of the layers, as a share of the learning rate, after a gradient that was clipped to
    norm 1: its entries are about 1e-5, so that an ε of 1e-5 takes a part of the step."""
    trainer = make(optimizer={"eps": eps, "warmup_steps": 0})
    rollout = trainer.rollout()
    batch = rollout.batch(range(len(rollout.texts)), trainer.pad_id)
    predictions, _ = trainer.models.read(batch, lambda p: p)
    logprobs, _ = logprobs_and_entropy(predictions, batch.response_tokens)
    (100 * logprobs.mean()).backward()  # type: ignore[no-untyped-call]
    parameters = trainer.models.trained()["policy"]
    assert clip_gradients(parameters, 1.0) > 1.0
    layers = [p for name, p in trainer.models.policy.named_parameters() if ".layers." in name and p.ndim == 2]
    before = [p.detach().clone() for p in layers]
    optimizer = build_optimizers({"policy": parameters}, trainer.config)["policy"]
    optimizer.step()
    moved = sum((new - old).detach().abs().sum() for new, old in zip(layers, before, strict=True))
    share = float(moved) / sum(p.numel() for p in layers) / trainer.config.learning_rate
    assert least <= share <= most


def test_a_ppo_run_is_resumed_with_the_same_bytes(
    make: Make, folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """With LoRA, in bfloat16: a step, its state through a file, the second step; against two steps."""
    whole = make("bfloat16", lora=LORA, temperature=0.5)
    first = whole.step()
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    second = whole.step()
    resumed = make("bfloat16", lora=LORA, temperature=0.5)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.step() == second
    for name, parameters in whole.models.trained().items():
        pairs = zip(parameters, resumed.models.trained()[name], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert first["kl"] == pytest.approx(0.0, abs=12 * START_KL)
    assert (first["update_kl"] or 0) > 0
    assert (first["missing_eos_share"] or 0) < 1
    assert (second["kl"] or 0) > 0

    save_checkpoint(tmp_path / "policy", whole.models.finished_policy(), tokenizer)
    saved = load_causal_lm(tmp_path / "policy")
    start = load_causal_lm(folder)
    distances = [(p - start.get_parameter(name)).abs().max() for name, p in saved.named_parameters()]
    assert max(distances) < 0.05
    assert max(distances) > 0
