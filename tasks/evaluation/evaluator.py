"""The evaluator samples every model's answers to the same prompts and scores them."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.tokenizer import decode_response, encode_prompt, encode_response, load_tokenizer, stop_ids
from rlhf_core.errors import UserError
from rlhf_core.evaluation.divergence import Divergence, measure_divergence
from rlhf_core.evaluation.judges import Judge
from rlhf_core.evaluation.pair_judges import PairJudge, both_orders
from rlhf_core.evaluation.wins import wins
from rlhf_core.models.hf import context_length
from rlhf_core.models.sampling import SamplingSettings, sample
from rlhf_core.models.scorers import Answers, Scored, Scorer
from tasks.datasets.jsonl import Row
from tasks.judging.pair_judge import pair_judge_of
from tasks.params.scorer import Term, is_reward_model
from tasks.stage.long_rows import fitting, prompt_encoder
from tasks.stage.models import load_frozen
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.scorer import extras_of, scorer_of, terms_of

REWARD_MODEL_JUDGE = "reward model"
JUDGING_MODEL = "judging reward model"
"""The reward model that PPO is not trained on (`reward.judge_share`)."""
ScoresOf = Literal["rewards", "judging"]
"""Scores of a reward model: PPO's, or the judging one's."""
PROXIES = (REWARD_MODEL_JUDGE, "scorer")
"""Kinds of judge where there is no other: the score that the models were trained by."""

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Known = dict[tuple[int, tuple[int, ...]], tuple[float, dict[str, float]]]
"""Scores with their terms by prompt and token ids."""


@dataclass(frozen=True)
class CandidateModel:
    """A model with its tokenizer, and its name in tables."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    noise: str = ""
    """Name of the random numbers: candidates with the same value share them. Empty: the candidate's own name."""


@dataclass(frozen=True)
class ScoredAnswers:
    """One answer to each prompt with its scores; all lists in the order of the prompts."""

    responses: list[list[int]]
    """Token ids of the candidate's tokenizer."""
    ended: list[bool]
    texts: list[str]
    rewards: list[float]
    gold: list[float] | None
    """The judge's scores; None without a judge that scores."""
    tokens: list[int]
    """Length of each answer, in tokens of the SFT model."""
    divergence: Divergence | None
    """From the SFT model; None for a model with another tokenizer."""
    terms: dict[str, list[float]] = field(default_factory=dict)
    """What the rewards were made from, by term; empty where they are a single reward model's."""
    judging: list[float] | None = None
    """Scores of the judging reward model; None in a run without one."""

    def as_judged(self, prompt: int) -> tuple[str, bool]:
        """Text and end of an answer, which is all that a judge receives."""
        return self.texts[prompt], self.ended[prompt]


@dataclass(frozen=True)
class Evaluator:
    """Samples and scores answers to the same prompts, with the same settings for every model."""

    stage: Stage[Any]
    rows: list[Row]
    """Each with its `prompt`."""
    reference: CandidateModel
    """The SFT model."""
    scorer: Scorer
    judge: Judge | None
    """Scores single answers; None if the data have no judge."""
    pair_judge: PairJudge | None
    """Compares two answers; None if scores are compared instead."""
    temperature: float
    max_new_tokens: int
    batch_size: int
    stop_tokens: Sequence[str]
    scorer_name: str = REWARD_MODEL_JUDGE
    """For tables."""
    purpose: str = ""
    """Evaluators of different purposes use different random numbers."""
    judging: Scorer | None = None
    """The reward model that PPO is not trained on; None in a run without one."""
    _rewards: Known = field(default_factory=dict)
    """Cache of scores with their terms, shared by all models."""
    _judging: Known = field(default_factory=dict)
    _gold: dict[tuple[int, str], float] = field(default_factory=dict)
    _encoded: dict[str, list[list[int]]] = field(default_factory=dict)
    """Cache of the prompts' token ids, by the name of the model that the tokenizer belongs to."""

    def answer(self, candidate: CandidateModel, seeds: Sequence[int]) -> list[ScoredAnswers]:
        """For each seed one answer to each prompt. Raises UserError if the candidate's context is too short."""
        self.require_room(candidate)
        stops = stop_ids(candidate.tokenizer, candidate.model, self.stop_tokens)
        places = [place for _ in seeds for place in range(len(self.rows))]
        drawn = self._draw(candidate, [(seed, i) for seed in seeds for i in range(len(self.rows))], stops)
        responses, ended = [response for response, _ in drawn], [end for _, end in drawn]
        texts = [decode_response(candidate.tokenizer, response, stops) for response in responses]
        shared = self.shares_tokenizer(candidate)
        read = responses if shared else self._in_reference_tokens(texts, ended)
        scored = self._score(self.scorer, self._rewards, places, texts, read)
        found = ScoredAnswers(
            responses,
            ended,
            texts,
            scored.total,
            self._judge(places, texts) if self.judge else None,
            [len(ids) for ids in read],
            self._diverge(candidate, places, responses) if shared else None,
            scored.parts,
            self.judging_scores(places, texts, read),
        )
        return [_part(found, start, start + len(self.rows)) for start in range(0, len(places), len(self.rows))]

    def compare(self, scored: ScoredAnswers, other: ScoredAnswers, by: ScoresOf | None = None) -> list[float]:
        """For each prompt how much `scored` is preferred to `other`, in [0, 1]; ½ is a tie.

        Uses the scores that `by` names. None: the pair judge, in both orders; without one the judge's scores; without a
        judge those of the judging reward model; without it the scorer's.
        """
        if scored is other:
            return [0.5] * len(self.rows)
        if by is None and self.pair_judge is not None:
            return both_orders(self.pair_judge, self.prompts, other.texts, scored.texts).preference
        if by is None and scored.gold is not None and other.gold is not None:
            return wins(other.gold, scored.gold)
        column = by or ("rewards" if self.judging is None else "judging")
        return [
            0.5 if scored.as_judged(i) == other.as_judged(i) else won  # best-of-n scores equal answers in other batches
            for i, won in enumerate(wins(getattr(other, column), getattr(scored, column)))
        ]

    @property
    def judged_by(self) -> str:
        """The kind of judge behind `compare`: `pairs`, `scores`, or without a judge `judging reward model`, `reward
        model` or `scorer`."""
        if self.pair_judge is not None:
            return "pairs"
        if self.judge is not None:
            return "scores"
        if self.judging is not None:
            return JUDGING_MODEL
        return REWARD_MODEL_JUDGE if self.scorer_name == REWARD_MODEL_JUDGE else "scorer"

    @property
    def winner_named_by(self) -> str:
        """Name of the judge behind `compare`, for tables and pictures."""
        judge = self.pair_judge or self.judge
        if judge is not None:
            return judge.name
        return self.scorer_name if self.judging is None else JUDGING_MODEL

    @cached_property
    def prompts(self) -> list[Any]:
        """The conversations."""
        return [row["prompt"] for row in self.rows]

    def prompt_ids(self, candidate: CandidateModel) -> list[list[int]]:
        """The prompts in the candidate's tokens."""
        owner = self.reference if self.shares_tokenizer(candidate) else candidate
        if owner.name not in self._encoded:
            self._encoded[owner.name] = [encode_prompt(owner.tokenizer, prompt) for prompt in self.prompts]
        return self._encoded[owner.name]

    def shares_tokenizer(self, candidate: CandidateModel) -> bool:
        """Whether the candidate has the SFT model's vocabulary and chat template."""
        ours, theirs = self.reference.tokenizer, candidate.tokenizer
        if theirs is ours:
            return True
        return bool(theirs.get_vocab() == ours.get_vocab() and theirs.chat_template == ours.chat_template)

    def require_room(self, candidate: CandidateModel) -> None:
        """Raise UserError unless the candidate's context holds every prompt and an answer."""
        longest = max(len(ids) for ids in self.prompt_ids(candidate)) + self.max_new_tokens
        if longest > context_length(candidate.model):
            raise UserError(
                f"{candidate.name}: a prompt with {self.max_new_tokens} new tokens is {longest} tokens long, and its "
                f"context holds {context_length(candidate.model)}; lower max_new_tokens, or leave the model out"
            )

    def log_ratios(self, candidate: CandidateModel, columns: Sequence[ScoredAnswers]) -> list[list[float]]:
        """log π − log π_SFT of answers of any model with the SFT model's tokens, in nats; [columns][prompts]."""
        prompts, places = len(self.rows), list(range(len(self.rows))) * len(columns)
        found = self._diverge(candidate, places, [ids for column in columns for ids in column.responses]).log_ratio
        return [found[start : start + prompts] for start in range(0, len(found), prompts)]

    def _draw(
        self, candidate: CandidateModel, jobs: Sequence[tuple[int, int]], stops: frozenset[int]
    ) -> list[tuple[list[int], bool]]:
        """An answer for each (seed, index of the prompt). Prompts of similar length are in one batch; batches in the
        journal of an earlier process are not sampled again."""
        prompt_ids, name = self.prompt_ids(candidate), f"{self.purpose}{candidate.noise or candidate.name}"
        noise = int.from_bytes(sha256(name.encode()).digest()[:8], "big")

        def work(part: Sequence[tuple[int, int]]) -> list[tuple[list[int], bool]]:
            sampled = sample(
                candidate.model,
                [prompt_ids[i] for _, i in part],
                [(seed, noise, i) for seed, i in part],
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                stop_ids=stops,
                pad_id=int(candidate.tokenizer.pad_token_id),
                batch_size=self.batch_size,
            )
            return list(zip(sampled.responses, sampled.ended, strict=True))

        order = sorted(jobs, key=lambda job: (len(prompt_ids[job[1]]), job[1]))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        found = self.stage.resumed(f"answers-{candidate.name}", batches, work, unit=f"{candidate.name} answer")
        drawn = dict(zip(order, found, strict=True))
        return [drawn[job] for job in jobs]

    def judging_scores(
        self, places: Sequence[int], texts: Sequence[str], ids: Sequence[Sequence[int]]
    ) -> list[float] | None:
        """The judging reward model's scores of answers to the prompts at `places`, with their token ids of the SFT
        model; None in a run without one."""
        return None if self.judging is None else self._score(self.judging, self._judging, places, texts, ids).total

    def _score(
        self, scorer: Scorer, known: Known, places: Sequence[int], texts: Sequence[str], ids: Sequence[Sequence[int]]
    ) -> Scored:
        prompt_ids, extras = self.prompt_ids(self.reference), extras_of([self.rows[i] for i in places])
        answers = Answers([self.prompts[i] for i in places], texts, [prompt_ids[i] for i in places], ids, extras)
        keys = [(i, tuple(response)) for i, response in zip(places, ids, strict=True)]
        return Scored.joined(_once(known, keys, lambda rows: scorer(answers.at(rows)).by_answer()))

    def _judge(self, places: Sequence[int], texts: Sequence[str]) -> list[float]:
        judge = self.judge
        assert judge is not None
        return _once(
            self._gold,
            list(zip(places, texts, strict=True)),
            lambda rows: judge.score([self.prompts[places[r]] for r in rows], [texts[r] for r in rows]),
        )

    def _in_reference_tokens(self, texts: Sequence[str], ended: Sequence[bool]) -> list[list[int]]:
        """The texts in tokens of the SFT model, cut at `max_new_tokens`."""
        tokenizer = self.reference.tokenizer
        read = [encode_response(tokenizer, text, end) for text, end in zip(texts, ended, strict=True)]
        return [ids[: self.max_new_tokens] for ids in read]

    def _diverge(
        self, candidate: CandidateModel, places: Sequence[int], responses: Sequence[Sequence[int]]
    ) -> Divergence:
        """Equal answers to a prompt are computed once."""
        prompt_ids = self.prompt_ids(self.reference)
        known: dict[tuple[int, tuple[int, ...]], tuple[float, ...]] = {}

        def read(rows: list[int]) -> list[tuple[float, ...]]:
            found = measure_divergence(
                candidate.model,
                self.reference.model,
                [prompt_ids[places[r]] for r in rows],
                [responses[r] for r in rows],
                pad_id=int(self.reference.tokenizer.pad_token_id),
                temperature=self.temperature,
                batch_size=self.batch_size,
            )
            return list(zip(found.kl, found.log_ratio, strict=True))

        keys = [(i, tuple(response)) for i, response in zip(places, responses, strict=True)]
        return Divergence(*map(list, zip(*_once(known, keys, read), strict=True)))


def _once(known: dict[Key, Item], keys: Sequence[Key], work: Callable[[list[int]], list[Item]]) -> list[Item]:
    """The value of each key. `work` receives the indices of the keys that are not in `known`, each key once."""
    new: dict[Key, int] = {}
    for i, key in enumerate(keys):
        if key not in known:
            new.setdefault(key, i)
    if new:
        known.update(zip(new, work(list(new.values())), strict=True))
    return [known[key] for key in keys]


def _part(scored: ScoredAnswers, start: int, end: int) -> ScoredAnswers:
    """The answers from `start` to before `end`."""
    found = scored.divergence
    return ScoredAnswers(
        scored.responses[start:end],
        scored.ended[start:end],
        scored.texts[start:end],
        scored.rewards[start:end],
        None if scored.gold is None else scored.gold[start:end],
        scored.tokens[start:end],
        found and found.part(start, end),
        {name: values[start:end] for name, values in scored.terms.items()},
        None if scored.judging is None else scored.judging[start:end],
    )


def name_of(terms: Sequence[Term]) -> str:
    """The name of the score, for tables."""
    if is_reward_model(terms):
        return REWARD_MODEL_JUDGE
    first, *rest = [f"{term.weight:g} × {term.term}".replace("-", "−", 1 if term.weight < 0 else 0) for term in terms]
    return f"scorer ({' '.join([first, *(f'− {one[1:]}' if one[0] == '−' else f'+ {one}' for one in rest)])})"


def load_candidate(stage: Stage[Any], name: str, folder: Path) -> CandidateModel:
    """The model and tokenizer of a folder, for inference."""
    return CandidateModel(name, load_frozen(stage, folder), load_tokenizer(folder, trust_remote_code=trusts(stage)))


def build_evaluator(
    stage: Stage[Any],
    path: str,
    rows: list[Row],
    sft: CandidateModel,
    settings: SamplingSettings,
    judge: Judge | None,
    purpose: str = "",
    judging: Scorer | None = None,
) -> tuple[Evaluator, int]:
    """The evaluator for the rows of `path` whose prompt leaves room for an answer, and the number of the other rows."""
    limit, reserve = context_length(sft.model), settings.max_new_tokens
    kept, too_long = fitting(stage, path, rows, prompt_encoder(sft.tokenizer), limit, reserve=reserve)
    evaluator = Evaluator(
        stage=stage,
        rows=[row for row, _ in kept],
        reference=sft,
        scorer=scorer_of(stage, sft.tokenizer, settings.batch_size),
        scorer_name=name_of(terms_of(stage)),
        judge=judge,
        pair_judge=pair_judge_of(stage, [row["prompt"] for row, _ in kept], reserve, settings.batch_size),
        temperature=settings.temperature,
        max_new_tokens=reserve,
        batch_size=settings.batch_size,
        stop_tokens=settings.stop_tokens,
        purpose=purpose,
        judging=judging,
    )
    return evaluator, too_long
