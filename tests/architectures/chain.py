"""The whole chain on one architecture, through the functions that the stages call: base → SFT → reward model → PPO with
its own critic, a shared one and adapters → evaluation. Each part passes all its checks or is refused with a UserError.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers
from rlhf_core.data.tokenizer import (
    complete,
    decode_response,
    encode_prompt,
    encode_response,
    load_tokenizer,
    read_tokenizer,
    stop_ids,
)
from rlhf_core.demo.world import DemoWorld
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.evaluation.divergence import measure_divergence
from rlhf_core.evaluation.judges import NoisyAnnotators, RubricJudge, all_pairs
from rlhf_core.evaluation.wins import wins
from rlhf_core.models.batch import pad_batch, sequence_scores
from rlhf_core.models.hf import (
    fit_vocabulary,
    load_causal_lm,
    load_scalar_model,
    map_scalar,
    place,
    save_checkpoint,
    scalar_model_from,
)
from rlhf_core.models.packed import can_pack
from rlhf_core.models.sampling import require_cache, sample
from rlhf_core.models.scorers import RewardModelScorer
from rlhf_core.models.sequence_logprobs import sequence_logprobs
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.reward import Comparison, score_pairs, train_reward_model
from rlhf_core.sft import Demonstration, fine_tune
from rlhf_core.training.run import Run

SEED = 1
NEW_TOKENS = 10
TOLERANCE = 1e-4
"""Nats between two computations of one log-probability, and between two of one score."""

SFT = SFTConfig(
    learning_rate=3e-3,
    epochs=2,
    batch_size=8,
    micro_batch_size=8,
    warmup_steps=0,
    weight_decay=0.0,
    max_tokens=160,
    evaluate_every=2,
    patience=0,
)
REWARD = RewardConfig(learning_rate=3e-3, epochs=2, batch_size=4, warmup_steps=0, weight_decay=0.0, max_tokens=160)
PPO: dict[str, Any] = {
    "steps": 2,
    "batch_size": 8,
    "minibatches": 2,
    "micro_batch_size": 4,
    "ppo_epochs": 1,
    "learning_rate": 1e-3,
    "clip_ratio": 0.2,
    "vf_coef": 0.5,
    "entropy_coef": 0.0,
    "gamma": 1.0,
    "lam": 0.95,
    "temperature": 1.0,
    "max_new_tokens": NEW_TOKENS,
    "whiten_advantages": True,
    "kl": {"coef": 0.05, "controller": "fixed", "target": 1.0, "horizon": 40},
    "critic": {"init": "reward", "learning_rate": 2e-3, "value_clip": 0.3, "clip_value": True, "warmup_steps": 0},
    "optimizer": {"betas": [0.9, 0.95], "eps": 1e-5, "warmup_steps": 0, "decay": "none", "max_grad_norm": 1.0},
    "score": {"normalise": True, "clip": 5.0, "missing_eos_penalty": 1.0},
    "sample_every": 10,
}
SHARED: dict[str, Any] = {"critic": {**PPO["critic"], "kind": "shared"}}
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0}, "gradient_checkpointing": True}

Texts = tuple[Conversation, list[str]]
"""A prompt, and answers to it."""


@dataclass
class Chain:
    """The parts of the chain on the model in `folder`, in order; a part needs those before it."""

    folder: Path
    """With the pretrained model in `pretrained/`."""
    refusals: dict[str, str] = field(default_factory=dict)
    """The message of each part that was refused."""
    passed: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    """What the stage `base` changed in the tokenizer."""
    packs: bool | None = None
    """Whether rows are computed without padding."""

    def run(self) -> "Chain":
        """All parts; one that is refused ends those that need it."""
        make_deterministic(SEED, 1)
        self._part("base", self.base) and self._part("sampling", self.sampling) and self._part("sft", self.sft)
        if "sft" in self.passed and self._part("reward", self.reward):
            self._part("ppo", self.ppo_own_critic)
            self._part("shared", self.ppo_shared_critic)
            self._part("lora", self.ppo_lora)
            if "ppo" in self.passed:
                self._part("evaluate", self.evaluate)
        return self

    def _part(self, name: str, work: Callable[[], None]) -> bool:
        try:
            work()
        except UserError as error:
            self.refusals[name] = str(error)
            return False
        self.passed.append(name)
        return True

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of the base model, as later stages load it."""
        return load_tokenizer(self.folder / "base")

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    @property
    def eos_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def texts(self) -> list[Texts]:
        """Prompts of the demo world with four answers each; with a system message where the template requires one."""
        world, opening = DemoWorld(SEED, domains=1, needs=2), Conversation()
        try:
            encode_prompt(self.tokenizer, [{"role": "user", "content": "Eggs?"}])
        except UserError:
            opening = [{"role": "system", "content": "Be brief."}]
        return [
            ([*opening, {"role": "user", "content": prompt}], [world.demonstration(prompt, i) for i in range(4)])
            for prompt in world.prompts(20)
        ]

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids of the prompts."""
        return [encode_prompt(self.tokenizer, prompt) for prompt, _ in self.texts]

    def run_of(self, name: str) -> Run:
        return Run(state_dir=self.folder / "work" / name, seed=SEED, report=lambda *_: None)

    def base(self) -> None:
        """The tokenizer keeps every text, and the prompt begins as the tokenizer begins texts."""
        source = self.folder / "pretrained"
        model, tokenizer = load_causal_lm(source), read_tokenizer(source)
        begins = tokenizer("a")["input_ids"][0]
        tokenizer, self.repairs = complete(tokenizer, "<|pad|>")
        require_cache(model)
        fit_vocabulary(model, tokenizer)
        save_checkpoint(self.folder / "base", model, tokenizer)
        assert len(self.tokenizer) <= load_causal_lm(self.folder / "base").get_input_embeddings().num_embeddings
        for text in (self.texts[0][1][0], "Eat 2 eggs & ünïcode 🙂"):
            ids = encode_response(self.tokenizer, text)
            assert ids[-1] == self.tokenizer.eos_token_id
            assert decode_response(self.tokenizer, ids) == text
        if begins == tokenizer.bos_token_id:
            assert self.prompts[0][:2].count(begins) == 1, "bos is missing or doubled"
            assert self.prompts[0][0] == begins

    def sampling(self) -> None:
        """The sampler's log-probabilities are those of the plain model, row by row; with packed rows and with padded
        ones, and with recomputed activations in training mode."""
        model = place(load_causal_lm(self.folder / "base"))
        plain = AutoModelForCausalLM.from_pretrained(self.folder / "base").eval()
        prompts = [*self.prompts[:3], self.prompts[0], self.prompts[1][:3]]
        drawn = self.draw(model, prompts)
        assert any(len(set(response)) > 3 for response in drawn)
        alone = [total(plain, prompt, response) for prompt, response in zip(prompts, drawn, strict=True)]
        self.packs = can_pack(model)
        found = sequence_logprobs(model, prompts, drawn, self.pad_id, 5)
        assert close(found, alone)
        model.train()
        assert sequence_logprobs(model, prompts, drawn, self.pad_id, 5) == found, "noise in training mode"

    def draw(self, model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
        """A response for each prompt; checks the sampler's log-probabilities against those of a second pass."""
        keys = [(SEED, i) for i in range(len(prompts))]
        sampled = sample(
            model,
            prompts,
            keys,
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
            stop_ids=stop_ids(self.tokenizer, model),
            pad_id=self.pad_id,
            batch_size=len(prompts),
        )
        again = sequence_logprobs(model, prompts, sampled.responses, self.pad_id, len(prompts))
        assert close([sum(row) for row in sampled.logprobs], again)
        return sampled.responses

    def sft(self) -> None:
        """The validation loss falls."""
        model = load_causal_lm(self.folder / "base")
        rows = [
            Demonstration(prompt, encode_response(self.tokenizer, answers[0]))
            for prompt, (_, answers) in zip(self.prompts, self.texts, strict=True)
        ]
        result = fine_tune(model, rows[:16], rows[16:], SFT, self.pad_id, self.run_of("sft"))
        assert result.validation_loss < result.base_validation_loss
        save_checkpoint(self.folder / "sft", model, self.tokenizer)

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Pairs of the rubric."""
        annotators = NoisyAnnotators(RubricJudge(), temperature=0.0, flip_rate=0.0, seed=SEED)
        found = []
        for number, (prompt, answers) in enumerate(self.texts):
            ranked = all_pairs(prompt, answers, annotators, (number,))
            responses = [encode_response(self.tokenizer, answer) for answer in answers]
            pairs = [(pair.chosen, pair.rejected) for pair in ranked.pairs]
            if pairs:
                found.append(Comparison(self.prompts[number], responses, pairs))
        return found

    def reward(self) -> None:
        """The loss falls on what is learnt; the saved model is a plain one with the same scores."""
        model = scalar_model_from(self.folder / "sft", SEED)
        before = score_pairs(model, self.comparisons, self.pad_id, 4).loss
        train_reward_model(model, self.comparisons, REWARD, self.pad_id, self.run_of("reward"))
        model.eval()
        after = score_pairs(model, self.comparisons, self.pad_id, 4)
        assert after.loss < before
        save_checkpoint(self.folder / "reward", model, self.tokenizer)
        plain = AutoModelForSequenceClassification.from_pretrained(self.folder / "reward").eval()
        first = self.comparisons[0]
        scores = self.scores(load_scalar_model(self.folder / "reward"), first)
        assert close(scores, [score(plain, first.prompt + response) for response in first.responses])

    def scores(self, model: PreTrainedModel, comparison: Comparison) -> list[float]:
        prompts = [comparison.prompt] * len(comparison.responses)
        with torch.no_grad():
            return sequence_scores(model, pad_batch(prompts, comparison.responses, self.pad_id)).tolist()

    def trainer(self, **changes: Any) -> PPOTrainer:
        """A PPO run from the SFT model and the reward model."""
        config, scorer = PPOConfig(**(PPO | changes)), place(load_scalar_model(self.folder / "reward"))
        critic = None
        if config.needs_critic_model:
            critic = load_scalar_model(self.folder / "reward")
            map_scalar(critic, 0.5, 0.1)
        reference = place(load_causal_lm(self.folder / "sft")) if config.lora is None else None
        models = ActorCritic(config, load_causal_lm(self.folder / "sft"), reference, critic, SEED)
        source = RewardSource(
            RewardModelScorer(scorer, self.pad_id, self.eos_id, 8), ScoreNormalisation(0.0, 1.0), RubricJudge()
        )
        prompts = [prompt for prompt, _ in self.texts]
        return PPOTrainer(config, models, self.tokenizer, source, prompts, SEED)

    def steps(self, trainer: PPOTrainer) -> PPOTrainer:
        """The remaining steps. The trainer itself checks that the first ratio is 1."""
        while trainer.steps_done < trainer.config.steps:
            row = trainer.step()
            assert row["engine_mismatch_max"] is not None
            assert row["engine_mismatch_max"] < TOLERANCE
            if trainer.steps_done == 1:
                assert abs(row["kl"] or 0.0) < TOLERANCE, "the policy begins as its reference"
        return trainer

    def ppo_own_critic(self) -> None:
        """A run that is continued from a checkpoint ends as one in one piece. Policy and critic are plain models."""
        whole = self.steps(self.trainer())
        first = self.trainer()
        first.step()
        second = self.trainer()
        second.load_state_dict(first.state_dict())
        ended = self.steps(second).models.state_dict()
        assert equal(ended, whole.models.state_dict())
        policy, critic = whole.models.finished_policy(), whole.models.finished_critic()  # each has its own body
        assert isinstance(critic, PreTrainedModel)
        save_checkpoint(self.folder / "critic", critic, self.tokenizer)
        first_comparison = self.comparisons[0]
        again = load_scalar_model(self.folder / "critic")
        assert close(self.scores(again, first_comparison), self.scores(critic, first_comparison))
        self.save_policy(policy, "policy")

    def ppo_shared_critic(self) -> None:
        """The head on the policy's body is saved as a plain model with the same values."""
        trainer = self.steps(self.trainer(**SHARED))
        batch = pad_batch(self.prompts[:2], [[5, 6, 7], [8]], self.pad_id)
        with torch.no_grad():
            _, values = trainer.models.read(batch, lambda p: p)
        critic = trainer.models.finished_critic()
        assert critic is not None
        assert values.abs().max() > 0
        save_checkpoint(self.folder / "shared", critic, self.tokenizer)
        plain = AutoModelForSequenceClassification.from_pretrained(self.folder / "shared").eval()
        assert close(values[:, 0].tolist(), [score(plain, prompt) for prompt in self.prompts[:2]])

    def ppo_lora(self) -> None:
        """Adapters on policy and critic, merged at the end."""
        trainer = self.steps(self.trainer(**LORA))
        policy = trainer.models.finished_policy()
        self.save_policy(policy, "lora")

    def save_policy(self, policy: PreTrainedModel, name: str) -> None:
        """It differs from the SFT model, and a plain AutoModelForCausalLM gives the same log-probabilities."""
        save_checkpoint(self.folder / name, policy, self.tokenizer)
        plain, before = (AutoModelForCausalLM.from_pretrained(self.folder / place).eval() for place in (name, "sft"))
        prompts, responses = self.prompts[:3], [[5, 6, 7], [8], [9, 10]]
        found = sequence_logprobs(policy, prompts, responses, self.pad_id, 3)
        texts = list(zip(prompts, responses, strict=True))
        assert close(found, [total(plain, *text) for text in texts])
        assert not close(found, [total(before, *text) for text in texts])

    def evaluate(self) -> None:
        """Policy and SFT model answer the same prompts; scores, KL and wins are finite."""
        policy, sft = (place(load_causal_lm(self.folder / name)) for name in ("policy", "sft"))
        conversations = [prompt for prompt, _ in self.texts]
        scorer = RewardModelScorer(place(load_scalar_model(self.folder / "reward")), self.pad_id, self.eos_id, 8)
        gold, answered = [], {}
        for name, model in (("sft", sft), ("policy", policy)):
            answered[name] = self.draw(model, self.prompts)
            texts = [decode_response(self.tokenizer, response) for response in answered[name]]
            gold.append(RubricJudge()(Answers(conversations, texts)).total)
            rewards = scorer(Answers(conversations, texts, self.prompts, answered[name])).total
            assert torch.tensor(rewards).isfinite().all()
        settings = {"pad_id": self.pad_id, "temperature": 1.0, "batch_size": 8}
        kl = measure_divergence(policy, sft, self.prompts, answered["policy"], **settings)
        assert torch.tensor(kl.kl).isfinite().all()
        assert sum(kl.kl) > 0
        assert len(wins(*gold)) == len(self.prompts)


@torch.no_grad()
def total(plain: PreTrainedModel, prompt: list[int], response: list[int]) -> float:
    """log π(response | prompt) of a plain model that reads one row without padding."""
    logprobs = plain(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None]).sum().item()


@torch.no_grad()
def score(plain: PreTrainedModel, ids: list[int]) -> float:
    """The output of a plain AutoModelForSequenceClassification for one row."""
    return plain(torch.tensor([ids])).logits[0, 0].item()


def close(found: list[float], expected: list[float]) -> bool:
    """Within `TOLERANCE`."""
    return torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0.0, atol=TOLERANCE)


def equal(one: Any, two: Any) -> bool:
    """Equal to the bit, tensors in dictionaries included."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    return torch.equal(one, two)
