"""Judges that compare two answers. A judge may prefer the answer shown first: `both_orders` calls it with both orders,
averages the verdicts, and measures this position bias."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhf_core.data.chat import Conversation, canonical
from rlhf_core.data.scorer import Answers
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judges import NoisyAnnotators


class PairJudge(Protocol):
    """Says which of two answers to a prompt is better."""

    @property
    def name(self) -> str:
        """The name in tables and pictures."""
        ...

    def prefer(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
        """1 where the answer shown first is better, ½ for a tie, 0 where the second is, nan where the judge's answer
        cannot be read; [pairs]. Raises ValueError where the lengths differ."""
        ...


@dataclass(frozen=True)
class SimulatedAnnotators:
    """Simulated annotators as a pair judge with a known position bias.

    With probability 2·|position_bias| the verdict is the answer shown first (second, for a bias below 0); otherwise it
    is that of `annotators`. The share of wins of the first shown is then ½ + position_bias, over both orders. A verdict
    depends only on the annotators' seed, the prompt and the two texts in the order shown.
    """

    annotators: NoisyAnnotators
    position_bias: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.position_bias) and abs(self.position_bias) <= 0.5):
            raise UserError(f"the annotators' position bias must be between -0.5 and 0.5, not {self.position_bias}")

    @property
    def name(self) -> str:
        """The name in tables and pictures."""
        return f"simulated annotators ({self.annotators.judge.name})"

    def prefer(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
        """See `PairJudge`."""
        scores = (self.annotators.judge(Answers(prompts, texts)).total for texts in (firsts, seconds))
        rows = zip(prompts, firsts, seconds, *scores, strict=True)
        return [self._verdict(a, b, _digest(prompt, first, second)) for prompt, first, second, a, b in rows]

    def _verdict(self, score_first: float, score_second: float, digest: bytes) -> float:
        key = int.from_bytes(digest[:16], "big")
        noise = hashlib.sha256(b"%d," % self.annotators.seed + digest).digest()
        if (int.from_bytes(noise[:8], "big") >> 11) / 2**53 < 2 * abs(self.position_bias):
            return float(self.position_bias > 0)
        choice = self.annotators.choose(score_first, score_second, (key,))
        return 0.5 if choice is None else float(choice)


@dataclass(frozen=True)
class CachedPairJudge:
    """A pair judge that computes the verdict on each pair, in each order, once."""

    judge: PairJudge
    known: dict[tuple[bytes, str, str], float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name in tables and pictures."""
        return self.judge.name

    def prefer(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
        """See `PairJudge`."""
        keys = [(canonical(p), a, b) for p, a, b in zip(prompts, firsts, seconds, strict=True)]
        new = {key: i for i, key in enumerate(keys) if key not in self.known}
        if new:
            places = list(new.values())
            verdicts = self.judge.prefer(
                [prompts[i] for i in places], [firsts[i] for i in places], [seconds[i] for i in places]
            )
            self.known.update(zip(new, verdicts, strict=True))
        return [self.known[key] for key in keys]


@dataclass(frozen=True)
class BothOrders:
    """Verdicts on pairs (a, b), each shown as a–b and as b–a."""

    preference: list[float]
    """[pairs], how far b is preferred to a, averaged over both orders: 0, ¼, ½, ¾ or 1; ½ where one is unread."""
    unread: list[bool]
    """[pairs], where the judge's answer could not be read in one of the orders."""
    position_bias: float
    """Share of wins of the answer shown first, over both orders, minus ½. nan where nothing was read."""
    self_agreement: float
    """Share of pairs with the same verdict in both orders. nan where nothing was read."""

    @property
    def pairs(self) -> int:
        """How many pairs were judged, each twice."""
        return len(self.preference)


def both_orders(judge: PairJudge, prompts: Sequence[Conversation], a: Sequence[str], b: Sequence[str]) -> BothOrders:
    """Judge each pair twice, once in each order (Zheng et al. 2023). Raises ValueError without pairs."""
    if not prompts:
        raise ValueError("a judge needs at least one pair")
    a_first, b_first = judge.prefer(prompts, a, b), judge.prefer(prompts, b, a)
    verdicts = list(zip(a_first, b_first, strict=True))
    unread = [math.isnan(a_won + b_won) for a_won, b_won in verdicts]
    read = [verdict for verdict, missing in zip(verdicts, unread, strict=True) if not missing]
    return BothOrders(
        preference=[0.5 if math.isnan(a_won + b_won) else (1 - a_won + b_won) / 2 for a_won, b_won in verdicts],
        unread=unread,
        position_bias=sum(map(sum, read)) / (2 * len(read)) - 0.5 if read else math.nan,
        self_agreement=sum(a_won == 1 - b_won for a_won, b_won in read) / len(read) if read else math.nan,
    )


def _digest(prompt: Conversation, first: str, second: str) -> bytes:
    """The SHA-256 of a prompt and two answers in this order."""
    parts = (canonical(prompt), *(text.encode("utf-8", "surrogatepass") for text in (first, second)))
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
