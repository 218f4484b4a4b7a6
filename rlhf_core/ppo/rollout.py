"""The experience of one PPO step: responses, their scores, and the credit of each token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_core.data.chat import Conversation
from rlhf_core.models.batch import TokenBatch, pad_batch


@dataclass(frozen=True)
class Rollout:
    """B responses of at most T tokens. Tensors of [B, T] are 0 on padding."""

    # prompts and responses
    prompts: list[Conversation]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    texts: list[str]
    ended: Bool[Tensor, "batch"]
    mask: Float[Tensor, "batch time"]

    # log-probabilities of the sampled tokens at the sampling temperature, nats
    engine_logprobs: Float[Tensor, "batch time"]
    old_logprobs: Float[Tensor, "batch time"]
    ref_logprobs: Float[Tensor, "batch time"]
    ref_kl: Float[Tensor, "batch time"]
    """Exact KL(π_old ‖ π_ref) of each token's distribution, nats; π_ref is the reference of the penalty."""
    old_entropy: Float[Tensor, "batch time"]
    """Entropy of π_old's distribution of each token, nats."""
    old_values: Float[Tensor, "batch time"]

    rows: list[Mapping[str, object]] | None = None
    """The rows of the data behind the prompts, for scorers that read them."""
    fixed_logprobs: Float[Tensor, "batch time"] | None = None
    """log π of the start of the reference, which only diagnostics use; None where the reference does not move."""
    fixed_kl: Float[Tensor, "batch time"] | None = None
    """Exact KL of π_old to it, as `ref_kl`."""

    def batch(self, rows: Sequence[int], pad_id: int) -> TokenBatch:
        """The given rows as one padded batch on the rollout's device."""
        return pad_batch(
            [self.prompt_ids[i] for i in rows], [self.response_ids[i] for i in rows], pad_id, self.mask.device
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens of each response."""
        return [len(response) for response in self.response_ids]

    @cached_property
    def sequences(self) -> list[list[int]]:
        """The token ids of each prompt and its response."""
        return [[*p, *r] for p, r in zip(self.prompt_ids, self.response_ids, strict=True)]

    @property
    def widths(self) -> list[tuple[int, int]]:
        """Tokens of each prompt and of each response."""
        return [(len(p), len(r)) for p, r in zip(self.prompt_ids, self.response_ids, strict=True)]


@dataclass(frozen=True)
class Scores:
    """One number for each response: by the scorer, as PPO uses it, and by the judge."""

    raw: Float[Tensor, "batch"]
    used: Float[Tensor, "batch"]
    """Normalised, clipped, lowered where the end-of-sequence token is missing (rule 12)."""
    gold: list[float] | None
    """Logged, never trained on; None where the data have no judge."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """What the raw score was made from, by name; logged."""
    terms: dict[str, tuple[float, Float[Tensor, "batch"]]] = field(default_factory=dict)
    """Weight and raw values of each term of the score, by name; the penalty for a missing end is one. For `gdpo`."""


@dataclass(frozen=True)
class Credit:
    """Rewards and advantages of each token."""

    kl: Float[Tensor, "batch time"]
    """k1 = log π_old − log π_ref, nats."""
    rewards: Float[Tensor, "batch time"]
    advantages: Float[Tensor, "batch time"]
    """Before whitening."""
    returns: Float[Tensor, "batch time"]
    weights: Float[Tensor, "batch time"]
    """The advantages that the policy loss uses: whitened over all real tokens of the answers that are trained on, or as
    they are; 0 for the other answers."""
    scale: float
    """The deviation by which whitening divided the advantages; a KL term in the loss is divided by it too. 1 without
    whitening, and where all advantages are equal."""
    trained: Bool[Tensor, "batch"]
    """Whether policy and critic learn from the answer; the others are in no minibatch, and in no average of a loss."""
    equal_groups: dict[str, float] = field(default_factory=dict)
    """The share of groups whose scores are all equal (`equal_groups_share`), and of `gdpo` that of each term; empty for
    methods that compare no groups."""


def to_rows(values: Sequence[Sequence[float]], time: int, device: torch.device) -> Float[Tensor, "batch time"]:
    """Ragged rows as a tensor, 0 on padding."""
    table = torch.zeros(len(values), time)
    for row, numbers in enumerate(values):
        table[row, : len(numbers)] = torch.tensor(numbers)
    return table.to(device)
