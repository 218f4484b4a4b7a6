"""Log-probabilities of actions, entropies and the exact KL of two models, from predictions. Logits are computed in
chunks of tokens, and each chunk is processed in pieces that fit the cache."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rlhf_core.models.head import Head, LastStep, Predictions
from rlhf_core.models.masked import entropy_of, kl_of, masked_log_softmax

PIECE_ON_CPU = 2**18
"""Logits of a piece; no result depends on it."""
PIECE_ON_ACCELERATOR = 2**26


def logprobs_and_entropy(
    predictions: Predictions, actions: Int[Tensor, "tokens"], temperature: float = 1.0
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Log-probability of each action and entropy of each distribution, under `softmax(logits / temperature)`.

    Args:
        predictions: at the positions whose next token is the action.
        actions: sampled token ids.
        temperature: of the sampling, the same for π_old, π_ref and π_θ (rule 5).

    Returns:
        logprobs and entropy, in nats, float32 (float64 for float64 weights); both with gradient.

    Raises:
        ValueError: a temperature that is not above 0.
    """
    return _of_actions(predictions, actions, temperature, with_entropy=True)


def action_logprobs(
    predictions: Predictions, actions: Int[Tensor, "tokens"], temperature: float = 1.0
) -> Float[Tensor, "tokens"]:
    """The log-probabilities of `logprobs_and_entropy`, to the bit, without the entropy, which takes time."""
    return _of_actions(predictions, actions, temperature, with_entropy=False)[0]


def _of_actions(
    predictions: Predictions, actions: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    head, apply = predictions.head, _LogProbsAndEntropy.apply
    found: tuple[Tensor, Tensor] = apply(  # type: ignore[no-untyped-call]
        predictions.hidden, head.weight, head.bias, head.step, actions, temperature, with_entropy
    )
    return found


class Compared(NamedTuple):
    """Two models on the same tokens, in nats, without gradient."""

    logprobs: Float[Tensor, "tokens"]
    """log π of the actions."""
    ref_logprobs: Float[Tensor, "tokens"]
    """log π_ref of the actions."""
    kl: Float[Tensor, "tokens"]
    """The exact KL(π ‖ π_ref) = Σ_v π(v)·(log π(v) − log π_ref(v)) of each position's distribution."""
    entropy: Float[Tensor, "tokens"]
    """Of π."""


@torch.no_grad()
def compare_distributions(
    predictions: Predictions, reference: Predictions, actions: Int[Tensor, "tokens"], temperature: float
) -> Compared:
    """Log-probabilities, exact KL and entropy; arguments as in `logprobs_and_entropy`."""
    precision = predictions.head.precision(predictions.hidden)
    found = torch.zeros(4, len(actions), dtype=precision, device=actions.device)
    models = list(zip(_exact_heads(predictions, reference), (predictions.hidden, reference.hidden), strict=True))
    for rows in predictions.head.chunks(predictions.hidden):
        logits = [head.logits(hidden[rows]) for head, hidden in models]
        for part in _pieces(logits[0]):
            place = slice(rows.start + part.start, rows.start + min(part.stop, len(logits[0])))
            log_p, log_q = (masked_log_softmax(each[part], temperature=temperature) for each in logits)
            p, chosen = log_p.exp(), actions[place, None]
            found[0, place] = log_p.gather(1, chosen)[:, 0]
            found[1, place] = log_q.gather(1, chosen)[:, 0]
            found[2, place] = kl_of(log_p, log_q, p)
            found[3, place] = entropy_of(log_p, p)
    return Compared(*found)


def exact_kl(predictions: Predictions, reference: Predictions, temperature: float) -> Float[Tensor, "tokens"]:
    """KL(π ‖ π_ref) of each position's distribution at the temperature, in nats, with gradient. The logits of several
    chunks are computed again in the backward pass."""

    heads = _exact_heads(predictions, reference)

    def kl(hidden: Tensor, ref_hidden: Tensor) -> Tensor:
        log_p, log_q = (
            masked_log_softmax(head.logits(part), temperature=temperature)
            for head, part in zip(heads, (hidden, ref_hidden), strict=True)
        )
        return kl_of(log_p, log_q)

    chunks = predictions.head.chunks(predictions.hidden)
    parts = [(predictions.hidden[rows], reference.hidden[rows]) for rows in chunks]
    if len(parts) == 1:
        return kl(*parts[0])
    return torch.cat([checkpoint(kl, *part, use_reentrant=False) for part in parts])


def _exact_heads(predictions: Predictions, reference: Predictions) -> tuple[Head, Head]:
    """The heads in the precision of their logits, cast once; one where both models have the same output layer."""
    head, other = predictions.head, reference.head
    exact = head.exact(predictions.hidden)
    is_same = head.weight is other.weight and head.bias is other.bias
    if is_same and head.precision(predictions.hidden) == other.precision(reference.hidden):
        return exact, replace(exact, step=other.step)
    return exact, other.exact(reference.hidden)


class _LogProbsAndEntropy(torch.autograd.Function):
    """∂ log p_a / ∂y_j = (1[j = a] − p_j) / temperature;  ∂H / ∂y_j = −p_j·(log p_j + H) / temperature;  y the
    logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        step: LastStep,
        actions: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """log p_a and H of each token, in nats, chunk by chunk. The logits of a single chunk are kept."""
        head = Head(weight, bias, step).exact(hidden)
        logprobs = torch.empty(len(actions), dtype=head.precision(hidden), device=hidden.device)
        entropy, chunks = torch.empty_like(logprobs) if with_entropy else None, head.chunks(hidden)
        logits = None
        for rows in chunks:
            logits = head.logits(hidden[rows])
            for part in _pieces(logits):
                place = slice(rows.start + part.start, rows.start + min(part.stop, len(logits)))
                log_p = masked_log_softmax(logits[part], temperature=temperature)
                logprobs[place] = log_p.gather(1, actions[place, None])[:, 0]
                if entropy is not None:
                    entropy[place] = entropy_of(log_p)
        ctx.save_for_backward(hidden, weight, bias, actions, entropy, logits if len(chunks) == 1 else None)
        ctx.step, ctx.temperature = step, temperature
        ctx.rounds = torch.is_autocast_enabled(hidden.device.type)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of hidden states, weight and bias."""
        hidden, weight, bias, actions, entropy, kept = ctx.saved_tensors
        if to_logprobs is None and to_entropy is None:
            return (None,) * 7
        head = Head(weight, bias, ctx.step).exact(hidden)
        towards = torch.zeros_like(entropy) if to_logprobs is None else to_logprobs
        gradients = _Gradients(head, hidden, ctx.needs_input_grad[:3], ctx.rounds)
        for rows in head.chunks(hidden):
            logits = head.logits(hidden[rows]) if kept is None else kept
            slopes = torch.empty_like(logits)
            for part in _pieces(logits):
                place = slice(rows.start + part.start, rows.start + min(part.stop, len(logits)))
                log_p = masked_log_softmax(logits[part], temperature=ctx.temperature)
                wanted = towards[place, None]
                piece = torch.exp(log_p, out=slopes[part])
                if to_entropy is None:
                    piece.mul_(-wanted)
                else:
                    spread = log_p.add_(entropy[place, None]).mul_(to_entropy[place, None])
                    piece.mul_(spread.add_(wanted).neg_())
                piece.scatter_add_(1, actions[place, None], wanted)
                if ctx.temperature != 1:
                    piece.div_(ctx.temperature)
            gradients.add(rows, logits, slopes)
        return (*gradients.found(weight, bias), None, None, None, None)


class _Gradients:
    """Adds up the gradients of a head's inputs, chunk by chunk, from those of the logits. With `rounds`, under
    autocast, their products are in bfloat16, as those of every other layer; the logits, their own gradients, and the
    sum over chunks are float32."""

    def __init__(self, head: Head, hidden: Tensor, needed: tuple[bool, bool, bool], rounds: bool) -> None:
        self.head, self.inputs, self.needed = head, hidden, needed
        self.rounds = rounds
        self.factor = head.weight.bfloat16() if rounds and head.weight is not None else head.weight
        self.hidden: list[Tensor] = []
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, rows: slice, logits: Tensor, slopes: Tensor) -> None:
        """`slopes`, the gradient of the logits of some tokens, is overwritten."""
        if self.factor is None:
            self.hidden.append(slopes)
            return
        if self.head.step != LastStep():
            slopes.mul_(self.head.step.slope(logits))
        to_hidden, to_weight, to_bias = self.needed
        if to_bias:
            self.bias = slopes.sum(dim=0) if self.bias is None else self.bias.add_(slopes.sum(dim=0))
        with torch.autocast(slopes.device.type, enabled=False):
            exact, slopes, hidden = slopes.dtype, slopes.to(self.factor.dtype), self.inputs[rows].to(self.factor.dtype)
            if to_hidden:
                self.hidden.append((slopes @ self.factor).to(exact))
            if self.weight is None and to_weight:
                self.weight = (slopes.t() @ hidden).to(exact)
            elif self.weight is not None and self.rounds:
                self.weight = self.weight.add_(slopes.t() @ hidden)
            elif self.weight is not None:
                self.weight = self.weight.addmm_(slopes.t(), hidden)

    def found(self, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden states, weight and bias, in their precision; None where none is needed."""
        hidden = torch.cat(self.hidden) if len(self.hidden) > 1 else next(iter(self.hidden), None)
        pairs = ((hidden, self.inputs), (self.weight, weight), (self.bias, bias))
        found = [None if slope is None or value is None else slope.to(value.dtype) for slope, value in pairs]
        return found[0], found[1], found[2]


def _pieces(logits: Tensor) -> Iterator[slice]:
    size = max(1, (PIECE_ON_CPU if logits.device.type == "cpu" else PIECE_ON_ACCELERATOR) // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], size):
        yield slice(start, start + size)
