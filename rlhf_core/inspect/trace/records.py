"""The records of a trace: the PPO step, the response, and each of its tokens."""

from dataclasses import dataclass

from rlhf_core.data.chat import Conversation


@dataclass(frozen=True)
class Reading:
    """One token in a forward pass and in the losses. None for terms that the settings do not have."""

    logprob: float
    """log π_θ, nats."""
    ratio: float
    """ρ = π_θ/π_old."""
    clipped: bool | None
    """Whether ρ lies outside [1−ε, 1+ε]."""
    pull: float
    """−∂(policy loss)/∂log π_θ of this token; 0 where it is clipped."""
    policy_loss: float
    value: float | None
    value_clipped: bool | None
    """Whether V moved by more than the value clip."""
    value_loss: float | None
    """Without its weight `vf_coef`."""
    entropy: float
    """Of the token's distribution, nats."""
    kl_loss: float | None
    """KL to the reference as a loss, nats, without its weight; None where the KL penalty is in the reward."""


@dataclass(frozen=True)
class Choice:
    """A likely token under π_old at one position, and its probability before and after the update."""

    text: str
    before: float
    after: float


@dataclass(frozen=True)
class Token:
    """One token of the response in a PPO step. Scores, rewards and values in units of the score."""

    id: int
    text: str
    old_logprob: float
    ref_logprob: float
    kl: float
    """k1 = log π_old − log π_ref, nats."""
    reward: float
    value: float | None
    next_value: float | None
    """V(s_{t+1}); 0 after the last token."""
    delta: float | None
    advantage: float
    weight: float
    """The advantage in the loss, whitened over the batch if the settings say so."""
    return_: float
    choices: list[Choice]
    passes: list[Reading]
    """At each pass of the update over this response: one an epoch, each before its optimiser step."""
    after: Reading
    """After the last optimiser step."""


@dataclass(frozen=True)
class Minibatch:
    """The losses of one minibatch, as means over its real tokens, and its rows of the batch."""

    epoch: int
    """From 1."""
    rows: list[int]
    tokens: int
    policy_loss: float
    value_loss: float
    entropy: float
    kl_loss: float | None
    total_loss: float


@dataclass(frozen=True)
class Step:
    """The PPO step of the response."""

    number: int
    """From 1."""
    trains_policy: bool
    """False while only the critic warms up."""
    kl_coef: float
    """β, units of the score per nat."""
    advantage_mean: float
    """Over all real tokens of the batch; whitening subtracts it."""
    advantage_scale: float
    """Whitening divides by it; 1 without whitening."""
    learning_rates: dict[str, float]
    """Of `policy`, and of `critic` where there is one."""
    grad_norms: dict[str, list[float]]
    """Of each optimiser step, before clipping."""
    minibatches: list[Minibatch]
    stopped_early: bool
    diagnostics: dict[str, float | None]
    """The step's row in plots/ppo.csv."""


@dataclass(frozen=True)
class Trace:
    """One response in one PPO step."""

    step: Step
    row: int
    """Its place in the batch, from 0."""
    prompt: Conversation
    prompt_tokens: int
    text: str
    ended: bool
    score_raw: float
    score_normalised: float
    """Normalised or scaled, and clipped; before the penalty for a response without an end."""
    score: float
    """The score in the reward."""
    gold: float | None
    rivals: list[float]
    """Without a critic, the returns in the baseline: of the other responses to the prompt, or (`reinforce`) of the
    whole batch."""
    tokens: list[Token]

    @property
    def kl(self) -> float:
        """Summed k1 of the response, nats."""
        return sum(token.kl for token in self.tokens)

    @property
    def return_(self) -> float:
        """Σ r_t of the response."""
        return sum(token.reward for token in self.tokens)

    @property
    def logprob_before(self) -> float:
        """log π_old of the whole response, nats."""
        return sum(token.old_logprob for token in self.tokens)

    @property
    def logprob_after(self) -> float:
        """log π_θ of the whole response after the update, nats."""
        return sum(token.after.logprob for token in self.tokens)

    @property
    def minibatches(self) -> list[int]:
        """The places of its minibatches among those of the step, one for each pass."""
        return [place for place, minibatch in enumerate(self.step.minibatches) if self.row in minibatch.rows]
