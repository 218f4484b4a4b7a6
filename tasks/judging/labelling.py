"""Pairs of sampled answers, labelled by a language model. Each pair is judged in both orders; a verdict that changes
with the order is a tie, and ties make no pair."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scorer
from rlhf_core.evaluation.agreement import Agreement
from rlhf_core.evaluation.intervals import clustered_interval
from rlhf_core.evaluation.judge_model import LanguageModelJudge
from rlhf_core.evaluation.judges import TIE
from rlhf_core.evaluation.pair_judges import BothOrders, CachedPairJudge, PairJudge, both_orders
from tasks.datasets.jsonl import Row

RESAMPLES = 1000


@dataclass(frozen=True)
class Candidates:
    """Pairs (a, b) of answers to prompts."""

    prompt_ids: list[str]
    prompts: list[Conversation]
    a: list[str]
    b: list[str]

    def judged_by(self, judge: PairJudge) -> BothOrders:
        """See `both_orders`."""
        return both_orders(judge, self.prompts, self.a, self.b)


@dataclass(frozen=True)
class KnownPairs:
    """Pairs whose better answer is known."""

    pairs: Candidates
    b_better: list[float]
    """[pairs], 1 where b is better, 0 where a is."""
    source: str
    """Who knows it, for messages."""


@dataclass(frozen=True)
class Labelled:
    """Indices (better, worse) of rows of the samples, and how the judge came to them."""

    pairs: list[tuple[int, int]]
    identical: int
    verdicts: BothOrders

    def figures(self) -> dict[str, Any]:
        """For metrics/preferences.json."""
        read = len(self.verdicts.unread) - sum(self.verdicts.unread)
        changed = sum(0 < value < 1 for value in self.verdicts.preference) - sum(self.verdicts.unread)
        return {
            "judged": len(self.verdicts.unread),
            "unread": sum(self.verdicts.unread),
            "ties": changed,
            "tie_share": changed / read if read else None,
            "position_bias": self.verdicts.position_bias if read else None,
        }


def label(samples: Sequence[Row], judge: PairJudge) -> Labelled:
    """The judge's choice between every two different answers to a prompt."""
    places = list(_pairs(samples))
    different = _different(samples, places)
    if not different:
        return Labelled([], len(places), BothOrders([], [], math.nan, math.nan))
    verdicts = _candidates(samples, different).judged_by(judge)
    chosen = [
        (j, i) if preference == 1 else (i, j)
        for (i, j), preference in zip(different, verdicts.preference, strict=True)
        if preference in (0, 1)
    ]
    return Labelled(chosen, len(places) - len(different), verdicts)


def different_pairs(samples: Sequence[Row]) -> Candidates:
    """The pairs that `label` judges."""
    return _candidates(samples, _different(samples, list(_pairs(samples))))


def of_dataset(rows: Sequence[Row]) -> KnownPairs:
    """Pairs of the data, the chosen answer as a."""
    pairs = Candidates(*([row[name] for row in rows] for name in ("prompt_id", "prompt", "chosen", "rejected")))
    return KnownPairs(pairs, [0.0] * len(rows), "pairs of the data")


def with_known_order(samples: Sequence[Row], scorer: Scorer, most: int) -> KnownPairs:
    """At most `most` pairs of sampled answers that a scorer does not hold for equal."""
    places = list(_pairs(samples))[: 4 * most]
    found = _candidates(samples, places)
    of_a, of_b = (scorer(Answers(found.prompts, texts)).total for texts in (found.a, found.b))
    kept = [k for k, (a, b) in enumerate(zip(of_a, of_b, strict=True)) if abs(a - b) > TIE][:most]
    pairs = _candidates(samples, [places[k] for k in kept])
    return KnownPairs(pairs, [float(of_b[k] > of_a[k]) for k in kept], scorer.name)


def fitting_pairs(rows: Sequence[Row], judge: PairJudge) -> list[Row]:
    """The pairs of the data whose question fits into the context of a local model. The context of a model behind an
    endpoint is not known here."""
    if not isinstance(judge, CachedPairJudge) or not isinstance(judge.judge, LanguageModelJudge):
        return list(rows)
    model = judge.judge
    return [row for row in rows if model.fits(row["prompt"], row["chosen"], row["rejected"])]


def plan(judge: PairJudge, *parts: Candidates) -> None:
    """Print what a judge behind an endpoint will cost for all these pairs. Raises UserError where that is more than
    its budget."""
    from tasks.judging.endpoint import EndpointJudge

    if isinstance(judge, EndpointJudge):
        judge.plan(*([value for part in parts for value in getattr(part, name)] for name in ("prompts", "a", "b")))


def agreement(judge: PairJudge, known: KnownPairs, seed: int) -> tuple[Agreement | None, int]:
    """How often the judge prefers what is known to be better (a tie counts ½), with an interval over prompts, and the
    number of pairs that it gave no readable verdict on, which are left out."""
    pairs, verdicts = known.pairs, known.pairs.judged_by(judge)
    kept = [k for k, missing in enumerate(verdicts.unread) if not missing]
    if not kept:
        return None, len(verdicts.unread)
    alike = [1 - abs(verdicts.preference[k] - known.b_better[k]) for k in kept]
    owners = {prompt: place for place, prompt in enumerate(dict.fromkeys(pairs.prompt_ids))}
    low, high = clustered_interval(alike, [owners[pairs.prompt_ids[k]] for k in kept], RESAMPLES, seed)
    return Agreement(sum(alike) / len(alike), low, high, len(alike)), len(verdicts.unread) - len(kept)


def _candidates(samples: Sequence[Row], places: Sequence[tuple[int, int]]) -> Candidates:
    """The pairs at these places of the samples."""
    firsts, seconds = [samples[i] for i, _ in places], [samples[j] for _, j in places]
    return Candidates(
        [row["prompt_id"] for row in firsts],
        [row["prompt"] for row in firsts],
        [row["response"] for row in firsts],
        [row["response"] for row in seconds],
    )


def _different(samples: Sequence[Row], places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(i, j) for i, j in places if samples[i]["response"] != samples[j]["response"]]


def _pairs(samples: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """The places of every two answers to one prompt."""
    by_prompt: dict[str, list[int]] = {}
    for place, row in enumerate(samples):
        by_prompt.setdefault(row["prompt_id"], []).append(place)
    for places in by_prompt.values():
        yield from combinations(places, 2)
