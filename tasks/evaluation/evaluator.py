"""The evaluator samples every model's answers to the same prompts and scores them."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.scorer import Answers, Scored, Scorer
from rlhf_core.data.tokenizer import (
    closed,
    continues_text,
    decode_response,
    encode_prompt,
    encode_response,
    load_tokenizer,
    same_tokens,
    stop_ids,
)
from rlhf_core.errors import UserError
from rlhf_core.evaluation.divergence import Divergence, measure_divergence
from rlhf_core.evaluation.pair_judges import PairJudge, both_orders
from rlhf_core.evaluation.wins import wins
from rlhf_core.functions.process import RewardFunction
from rlhf_core.models.hf import context_length
from rlhf_core.models.sampling import SamplingSettings, sample
from rlhf_core.models.scorers import REWARD_MODEL_NAME, RewardModelScorer, parts_of, require_room
from tasks.datasets.jsonl import Row
from tasks.judging.pair_judge import pair_judge_of
from tasks.params.judge import JudgeParams
from tasks.params.scorer import FOLDER
from tasks.stage.long_rows import fitting_prompts
from tasks.stage.models import load_frozen
from tasks.stage.progress import Progress
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import JUDGING_MODEL, extras_of, scorer_of, text_scorer

ScoresOf = Literal["rewards", "judging"]
"""Scores of a reward model: PPO's, or the judging one's."""
PROXIES = (REWARD_MODEL_NAME, "scorer")
"""Kinds of judge where there is no other: the score that the models were trained by."""

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Known = dict[tuple[int, str, tuple[int, ...]], tuple[float, dict[str, float]]]
"""Scores with their terms by prompt, text and token ids."""


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
    judge: Scorer | None
    """Scores single answers; None if the data have no judge."""
    pair_judge: PairJudge | None
    """Compares two answers; None if scores are compared instead."""
    temperature: float
    max_new_tokens: int
    batch_size: int
    stop_tokens: Sequence[str]
    purpose: str = ""
    """Evaluators of different purposes use different random numbers."""
    judging: Scorer | None = None
    """The reward model that PPO is not trained on; None in a run without one."""
    progress: Progress | None = None
    """Counts the answers of all models together; None: each model's on its own."""
    _known: dict[int, Known] = field(default_factory=dict)
    """Cache of the scores of each scorer, by its `id`; shared by all models."""
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
        if shared:  # token ids of the SFT model
            read = closed(responses, ended, int(candidate.tokenizer.eos_token_id))
        else:
            read = self._as_reference_tokens(places, texts, ended)
        scored = self.scores(self.scorer, places, texts, read)
        gold, judging = (self.totals(one, places, texts, read) for one in (self.judge, self.judging))
        divergence = self._diverge(candidate, places, responses) if shared else None
        columns = []
        for start in range(0, len(places), len(self.rows)):
            part = slice(start, start + len(self.rows))
            columns.append(
                ScoredAnswers(
                    responses=responses[part],
                    ended=ended[part],
                    texts=texts[part],
                    rewards=scored.total[part],
                    gold=gold and gold[part],
                    tokens=[len(ids) for ids in read[part]],
                    divergence=divergence and Divergence(divergence.kl[part], divergence.log_ratio[part]),
                    terms={name: values[part] for name, values in scored.parts.items()},
                    judging=judging and judging[part],
                )
            )
        return columns

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
        return REWARD_MODEL_NAME if self.scorer.name == REWARD_MODEL_NAME else "scorer"

    @property
    def winner_named_by(self) -> str:
        """Name of the judge behind `compare`, for tables and pictures."""
        return (self.pair_judge or self.judge or self.judging or self.scorer).name

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
        return same_tokens(candidate.tokenizer, self.reference.tokenizer)

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

    def _as_reference_tokens(
        self, places: Sequence[int], texts: Sequence[str], ended: Sequence[bool]
    ) -> list[list[int]]:
        """Answers of a model with another tokenizer, in the SFT model's tokens: as many as all models that read them
        hold."""
        models = parts_of((self.scorer, self.judging), RewardModelScorer)
        readers = [self.reference.model, *(one.model for one in models if one.own is None)]
        context, prompts = min(map(context_length, readers)), self.prompt_ids(self.reference)
        return [
            encode_response(self.reference.tokenizer, text, end)[: context - len(prompts[i])]
            for i, text, end in zip(places, texts, ended, strict=True)
        ]

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
        unit = f"{candidate.name} answer"
        found = self.stage.resumed(f"answers-{candidate.name}", batches, work, unit=unit, progress=self.progress)
        drawn = dict(zip(order, found, strict=True))
        return [drawn[job] for job in jobs]

    def scores(
        self, scorer: Scorer, places: Sequence[int], texts: Sequence[str], ids: Sequence[Sequence[int]]
    ) -> Scored:
        """Scores of answers to the prompts at `places`, with their token ids of the SFT model. Equal answers to a
        prompt are scored once."""
        prompt_ids, extras = self.prompt_ids(self.reference), extras_of([self.rows[i] for i in places])
        answers = Answers([self.prompts[i] for i in places], texts, [prompt_ids[i] for i in places], ids, extras)
        keys = [(i, text, tuple(response)) for i, text, response in zip(places, texts, ids, strict=True)]
        known = self._known.setdefault(id(scorer), {})
        return Scored.joined(_once(known, keys, lambda rows: scorer(answers.at(rows)).by_answer()))

    def totals(
        self, scorer: Scorer | None, places: Sequence[int], texts: Sequence[str], ids: Sequence[Sequence[int]]
    ) -> list[float] | None:
        """As `scores`, without their parts; None without a scorer."""
        return None if scorer is None else self.scores(scorer, places, texts, ids).total

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


def load_candidate(stage: Stage[Any], name: str, folder: Path) -> CandidateModel:
    """The model and tokenizer of a folder, for inference."""
    return CandidateModel(name, load_frozen(stage, folder), load_tokenizer(folder, trust_remote_code=trusts(stage)))


def build_evaluator(
    stage: Stage[Any],
    path: str,
    rows: list[Row],
    sft: CandidateModel,
    settings: SamplingSettings,
    judge: Scorer | None,
    purpose: str = "",
    judging: Scorer | None = None,
    max_prompt_tokens: int | None = None,
) -> tuple[Evaluator, int]:
    """The evaluator for the rows of `path` whose prompt is not too long, and the number of the other rows.
    `judge`: that of the data; a function, or a model that scores answers, judges in its place (`judge.kind`)."""
    context, reserve = context_length(sft.model), settings.max_new_tokens
    kept, too_long = fitting_prompts(stage, path, rows, sft.tokenizer, context, reserve, max_prompt_tokens)
    prompts = [row["prompt"] for row, _ in kept]
    named, limits = stage.block("judge", JudgeParams), stage.runtime.functions
    if named.function is not None:
        judge = RewardFunction(
            stage.root / FOLDER, named.function, limits.timeout_seconds, limits.memory_mb, key="judge.function"
        )
    elif named.kind == "reward_model" and named.model is not None:
        models = ScalarModels(trusts(stage), stage.precision, log=stage.log)
        continues = continues_text(sft.tokenizer)
        judge = text_scorer(stage.root, named.model, named, "judge.model", models, settings.batch_size, continues)
    evaluator = Evaluator(
        stage=stage,
        rows=[row for row, _ in kept],
        reference=sft,
        scorer=scorer_of(stage, sft.tokenizer, settings.batch_size),
        judge=judge,
        pair_judge=pair_judge_of(stage, prompts, reserve, settings.batch_size),
        temperature=settings.temperature,
        max_new_tokens=reserve,
        batch_size=settings.batch_size,
        stop_tokens=settings.stop_tokens,
        purpose=purpose,
        judging=judging,
    )
    require_room((evaluator.scorer, judge, judging), prompts, reserve)
    return evaluator, too_long
