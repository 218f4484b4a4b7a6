"""An exam: prompts, the way they are asked, and who marks the answers. `select` and `evaluate` put every model through
one; what is made of the marks is theirs to decide."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.tokenizer import decode_response, encode_prompt, encode_response, load_tokenizer, stop_ids
from rlhf_core.errors import UserError
from rlhf_core.evaluation.divergence import Divergence, measure_divergence
from rlhf_core.evaluation.judges import Judge
from rlhf_core.evaluation.pair_judges import PairJudge, both_orders
from rlhf_core.evaluation.wins import wins
from rlhf_core.models.hf import context_length, load_causal_lm, load_scalar_model, place
from rlhf_core.models.sampling import sample
from rlhf_core.models.scorers import Answers, RewardModelScorer
from tasks.datasets.jsonl import Row
from tasks.stage.long_rows import fitting, prompt_encoder
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts

REWARD_MODEL_JUDGE = "reward model"


@dataclass(frozen=True)
class CandidateModel:
    """A model with its tokenizer, and the name it has in tables."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    noise: str = ""
    """Contestants with equal names of the noise answer from the same random numbers; empty: from their own."""


@dataclass(frozen=True)
class ScoredAnswers:
    """One answer to each prompt, and what is known of it; all lists in the order of the prompts."""

    responses: list[list[int]]
    """Token ids of the contestant's tokenizer."""
    ended: list[bool]
    texts: list[str]
    rewards: list[float]
    gold: list[float] | None
    """None where no judge scores."""
    tokens: list[int]
    """Length of each answer, in tokens of the SFT model."""
    divergence: Divergence | None
    """From the SFT model; None for a model with another tokenizer."""

    def says(self, prompt: int) -> tuple[str, bool]:
        """The answer as a judge sees it."""
        return self.texts[prompt], self.ended[prompt]


@dataclass(frozen=True)
class Evaluator:
    """Prompts and settings that are the same for everybody."""

    stage: Stage[Any]
    rows: list[Row]
    """Each with its `prompt`."""
    reference: CandidateModel
    """The SFT model."""
    scorer: RewardModelScorer
    judge: Judge | None
    """Scores answers one by one; None where only people could."""
    pair_judge: PairJudge | None
    """Says which of two answers is better; None: whoever scores them decides."""
    temperature: float
    max_new_tokens: int
    batch_size: int
    stop_tokens: Sequence[str]
    purpose: str = ""
    """Exams of different purposes draw from different random numbers."""

    def answer(self, candidate: CandidateModel, seed: int) -> ScoredAnswers:
        """One answer to each prompt, independent of the other contestants' answers, marked. Raises UserError where the
        contestant's context is too short."""
        self.require_room(candidate)
        prompt_ids = self.prompt_ids(candidate)
        stops = stop_ids(candidate.tokenizer, self.stop_tokens)
        responses, ended = self._draw(candidate, prompt_ids, stops, seed)
        texts = [decode_response(candidate.tokenizer, response, stops) for response in responses]
        shared = self.shares_tokenizer(candidate)
        read = responses if shared else self._in_our_tokens(texts, ended)
        rewards = self.scorer(Answers(self.prompts, texts, self.prompt_ids(self.reference), read))
        gold = self.judge.score(self.prompts, texts) if self.judge else None
        divergence = self._diverge(candidate, responses) if shared else None
        return ScoredAnswers(responses, ended, texts, rewards, gold, [len(ids) for ids in read], divergence)

    def compare(self, scored: ScoredAnswers, other: ScoredAnswers) -> list[float]:
        """How far `marked` is preferred to `other`, prompt by prompt, ½ for a tie: by the judge of pairs, asked in both
        orders, where there is one; else by the judge's scores; else by the reward model's."""
        if scored is other:
            return [0.5] * len(self.rows)
        if self.pair_judge is not None:
            return both_orders(self.pair_judge, self.prompts, other.texts, scored.texts).preference
        if scored.gold is not None and other.gold is not None:
            return wins(other.gold, scored.gold)
        return [
            0.5 if scored.says(i) == other.says(i) else won  # equal answers, read in other batches, differ by a hair
            for i, won in enumerate(wins(other.rewards, scored.rewards))
        ]

    @property
    def judged_by(self) -> str:
        """What kind of judge that is: one of `pairs`, one who `scores`, or the `reward model`."""
        if self.pair_judge is not None:
            return "pairs"
        return "reward model" if self.judge is None else "scores"

    @property
    def winner_named_by(self) -> str:
        """Whose comparisons `compare` makes, as tables and pictures say it."""
        judge = self.pair_judge or self.judge
        return REWARD_MODEL_JUDGE if judge is None else judge.name

    @cached_property
    def prompts(self) -> list[Any]:
        """The conversations."""
        return [row["prompt"] for row in self.rows]

    def prompt_ids(self, candidate: CandidateModel) -> list[list[int]]:
        """The prompts in the contestant's own tokens."""
        return [encode_prompt(candidate.tokenizer, prompt) for prompt in self.prompts]

    def shares_tokenizer(self, candidate: CandidateModel) -> bool:
        """Whether the contestant's token ids mean what the SFT model's do."""
        ours, theirs = self.reference.tokenizer, candidate.tokenizer
        if theirs is ours:
            return True
        return bool(theirs.get_vocab() == ours.get_vocab() and theirs.chat_template == ours.chat_template)

    def require_room(self, candidate: CandidateModel) -> None:
        """Raise UserError unless the contestant's context holds every prompt and an answer."""
        longest = max(len(ids) for ids in self.prompt_ids(candidate)) + self.max_new_tokens
        if longest > context_length(candidate.model):
            raise UserError(
                f"{candidate.name}: a prompt with {self.max_new_tokens} new tokens is {longest} tokens long, and its "
                f"context holds {context_length(candidate.model)}; lower max_new_tokens, or leave the model out"
            )

    def _draw(
        self, candidate: CandidateModel, prompt_ids: Sequence[Sequence[int]], stops: frozenset[int], seed: int
    ) -> tuple[list[list[int]], list[bool]]:
        """Prompts of similar length are answered together; what an earlier process has drawn is not drawn again."""

        def work(places: Sequence[int]) -> list[tuple[list[int], bool]]:
            sampled = sample(
                candidate.model,
                [prompt_ids[i] for i in places],
                [(seed, noise, i) for i in places],
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                stop_ids=stops,
                pad_id=int(candidate.tokenizer.pad_token_id),
                batch_size=self.batch_size,
            )
            return list(zip(sampled.responses, sampled.ended, strict=True))

        noise = int.from_bytes(
            sha256(f"{self.purpose}{candidate.noise or candidate.name}".encode()).digest()[:8], "big"
        )
        order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        journal = f"answers-{candidate.name}-{seed}"
        drawn = dict(
            zip(order, self.stage.resumed(journal, batches, work, unit="answer", whose=candidate.name), strict=True)
        )
        return [drawn[i][0] for i in range(len(order))], [drawn[i][1] for i in range(len(order))]

    def _in_our_tokens(self, texts: Sequence[str], ended: Sequence[bool]) -> list[list[int]]:
        """What the SFT model's kind reads of a text: as much as its own answers may be long."""
        tokenizer = self.reference.tokenizer
        read = [encode_response(tokenizer, text, end) for text, end in zip(texts, ended, strict=True)]
        return [ids[: self.max_new_tokens] for ids in read]

    def _diverge(self, candidate: CandidateModel, responses: Sequence[Sequence[int]]) -> Divergence:
        return measure_divergence(
            candidate.model,
            self.reference.model,
            self.prompt_ids(self.reference),
            responses,
            pad_id=int(self.reference.tokenizer.pad_token_id),
            temperature=self.temperature,
            batch_size=self.batch_size,
        )


def load_candidate(stage: Stage[Any], name: str, folder: Path) -> CandidateModel:
    """The model and tokenizer of a folder, for inference."""
    model = place(load_causal_lm(folder, trust_remote_code=trusts(stage)))
    return CandidateModel(name, model, load_tokenizer(folder, trust_remote_code=trusts(stage)))


def load_scorer(stage: Stage[Any], pad_id: int, batch_size: int) -> RewardModelScorer:
    """models/reward, for inference."""
    model = place(load_scalar_model(stage.root / "models/reward", trust_remote_code=trusts(stage)))
    return RewardModelScorer(model, pad_id, batch_size)


def fitting_rows(
    stage: Stage[Any], path: str, rows: list[Row], reference: CandidateModel, max_new_tokens: int
) -> tuple[list[Row], int]:
    """The rows of `path` whose prompt leaves room for an answer, and how many do not."""
    limit = context_length(reference.model)
    kept, too_long = fitting(stage, path, rows, prompt_encoder(reference.tokenizer), limit, reserve=max_new_tokens)
    return [row for row, _ in kept], too_long
