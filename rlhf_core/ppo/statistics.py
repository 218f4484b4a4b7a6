"""Statistics of one update: sums over real tokens, over all its minibatches and processes."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from rlhf_core.ppo.processes import Processes


@dataclass
class UpdateStatistics:
    """Sums over real tokens of all minibatches; `means` turns them into masked means."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: float = 0.0
    ratio_max: float = 0.0
    optimizer_steps: int = 0
    skipped_minibatches: int = 0
    stopped_early: bool = False
    exploded: bool = False
    """A minibatch whose loss is not finite, and that `max_ratio` skips."""
    last_epoch: "UpdateStatistics | None" = None
    """The same of the last epoch that was begun, alone."""
    grad_norms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    text_losses: list[float] = field(default_factory=list)

    def add_up(self, processes: Processes) -> None:
        """Sum over the processes; `tokens` is the minibatch's already."""
        if processes.count == 1:
            return
        names = sorted(set().union(*processes.gather([list(self.sums)])))
        sums = torch.tensor([self.sums[name] for name in names], dtype=torch.float64, device=processes.device)
        processes.add_up([sums])
        self.sums.update(zip(names, sums.tolist(), strict=True))
        self.ratio_max = max(processes.gather([self.ratio_max]))

    def add(self, minibatch: "UpdateStatistics") -> None:
        """Count another minibatch in."""
        self.text_losses += minibatch.text_losses
        if self.last_epoch is not None:
            self.last_epoch.add(minibatch)
        for name, total in minibatch.sums.items():
            self.sums[name] += total
        self.tokens += minibatch.tokens
        self.ratio_max = max(self.ratio_max, minibatch.ratio_max)

    def mean(self, name: str) -> float:
        """One statistic, over real tokens."""
        return self.sums[name] / self.tokens

    def means(self) -> dict[str, float]:
        """Every statistic of the update, as means over real tokens (gradient norms: over optimiser steps)."""
        result = {name: self.mean(name) for name in self.sums if name != "ratio"}
        result |= {
            f"grad_norm_{name}": sum(norms) / len(norms) if norms else 0.0 for name, norms in self.grad_norms.items()
        }
        if self.text_losses:
            result["ptx_loss"] = sum(self.text_losses) / len(self.text_losses)
        late = self.last_epoch if self.last_epoch and self.last_epoch.tokens else self
        return result | {
            "clip_fraction_last_epoch": late.mean("clip_fraction"),
            "ratio_max": self.ratio_max,
            "optimizer_steps": float(self.optimizer_steps),
            "tokens_trained": self.tokens,
            "skipped_minibatches": float(self.skipped_minibatches),
            "stopped_early": float(self.stopped_early),
        }
