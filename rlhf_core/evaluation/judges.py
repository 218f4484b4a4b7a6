"""The judge of the demo, and simulated annotators, who choose by the scores of a judge."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scored, Scorer
from rlhf_core.demo.rubric import gold_score

TIE = 1e-9


@dataclass(frozen=True)
class RubricJudge:
    """The demo world's rubric, on the last user message of the conversation, as a `Scorer`."""

    name: str = "gold rubric (simulated)"

    def __call__(self, answers: Answers) -> Scored:
        """The gold score of each response, from -3 to 6."""
        scores = []
        for prompt, response in zip(answers.prompts, answers.texts, strict=True):
            users = [message["content"] for message in prompt if message["role"] == "user"]
            scores.append(gold_score(users[-1] if users else "", response))
        return Scored(scores)


@dataclass(frozen=True)
class PairChoice:
    """The chosen and the rejected one of two responses (indexes), and whether the scores order them alike."""

    chosen: int
    rejected: int
    agrees: bool


@dataclass(frozen=True)
class RankedPairs:
    """The pairs of one prompt's responses with a preference, and the numbers of those without, by cause."""

    pairs: list[PairChoice]
    ties: int
    identical: int


@dataclass(frozen=True)
class NoisyAnnotators:
    """Simulated annotators: Bradley-Terry choices by a judge's scores, some of them flipped by mistake.

    P(a over b) = sigmoid((score_a - score_b) / temperature); temperature 0 always takes the higher score. Then the
    choice is reversed with probability `flip_rate`. It depends on the seed and its key, not on the order of calls.
    """

    judge: Scorer
    temperature: float
    flip_rate: float
    seed: int

    def choose(self, score_a: float, score_b: float, key: tuple[int, ...]) -> bool | None:
        """True where the first is chosen, False where the second is, None for a tie (scores within 1e-9)."""
        if abs(score_a - score_b) <= TIE:
            return None
        choice, mistake = _uniforms(self.seed, key)
        if self.temperature == 0:
            prefers_a = score_a > score_b
        else:
            prefers_a = choice < _sigmoid((score_a - score_b) / self.temperature)
        return prefers_a != (mistake < self.flip_rate)


def all_pairs(
    prompt: Conversation, responses: Sequence[str], annotators: NoisyAnnotators, key: tuple[int, ...]
) -> RankedPairs:
    """The annotators' choice between every two of k responses to one prompt: at most k(k-1)/2 pairs, in index order.

    `key` must differ between prompts; the indexes of a pair are added to it. Equal texts and equal scores give no pair.
    """
    scores = annotators.judge(Answers([prompt] * len(responses), responses)).total
    pairs: list[PairChoice] = []
    ties = identical = 0
    for i, j in combinations(range(len(responses)), 2):
        if responses[i] == responses[j]:
            identical += 1
            continue
        first = annotators.choose(scores[i], scores[j], (*key, i, j))
        if first is None:
            ties += 1
            continue
        chosen, rejected = (i, j) if first else (j, i)
        pairs.append(PairChoice(chosen, rejected, agrees=scores[chosen] > scores[rejected]))
    return RankedPairs(pairs, ties, identical)


def _uniforms(seed: int, key: tuple[int, ...]) -> tuple[float, float]:
    """Two independent numbers in [0, 1) that are a function of seed and key (53 bits each of a SHA-256)."""
    digest = hashlib.sha256(",".join(map(str, (seed, *key))).encode()).digest()
    first, second = (int.from_bytes(digest[at : at + 8], "big") >> 11 for at in (0, 8))
    return first / 2**53, second / 2**53


def _sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))
