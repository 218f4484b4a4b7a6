"""The Trainer that base, SFT, reward model and DPO share: a micro-batch that does not fit is halved, and nothing that
is NaN or infinite becomes a step or a checkpoint. Losses stand with those who subclass it, arguments in `training`."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from rlhf_core.errors import NonFiniteError
from rlhf_core.finite import at_step, require_finite
from rlhf_core.training.memory import Halving, attempt
from rlhf_core.training.run import Run

Inputs = dict[str, Tensor]
IGNORED = -100
"""The label of a token that is not learnt."""


class GuardedTrainer(Trainer):
    """A Trainer that is told by `keys` what a user can lower where memory is short."""

    def __init__(self, run: Run, keys: str, **options: Any) -> None:
        self.halving = Halving("a training step", keys, run.exempt, run.state_dir / "halved")
        self.share = 1.0
        """What the mean loss of the present pass counts in its micro-batch."""
        self._accumulated: list[Inputs] = []
        super().__init__(**options)

    def training_step(self, model: PreTrainedModel, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """Add the gradient of a micro-batch, and return its loss. Raises UserError when half of it does not fit.

        What a pass leaves in the gradients when it fails cannot be told from what the micro-batches before it have
        left: all of the optimiser step so far is undone and computed again, which costs no memory until then.
        """
        begun = self.halving.done

        def work() -> Tensor:
            for earlier in self._accumulated if self.halving.done and not begun else []:
                self._pass(model, earlier, num_items_in_batch)
            return self._pass(model, inputs, num_items_in_batch)

        loss = self.halving.until_it_fits(work, undo=model.zero_grad)
        self._accumulated = [] if self.accelerator.sync_gradients else [*self._accumulated, inputs]
        return loss

    def _pass(self, model: PreTrainedModel, inputs: Inputs, num_items: Any) -> Tensor:
        """Forward and backward over a micro-batch, in as many parts as memory asks for."""
        parts = list(self.halves(inputs, num_items)) if self.halving.done else [(inputs, 1.0)]
        step, losses = super().training_step, []
        for part, self.share in parts:
            losses.append(attempt(partial(step, model, part, num_items), partial(self.rows, part)))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def rows(self, inputs: Inputs) -> int:
        """How many rows there are to halve."""
        return len(inputs["input_ids"])

    def halves(self, inputs: Inputs, num_items: Any) -> Iterator[tuple[Inputs, float]]:
        """The two halves of a micro-batch, each with the share of its mean loss; one row stays one. With `num_items`
        the loss is a sum over all tokens of the optimiser step already, and the shares are 1."""
        tokens = (inputs["labels"][:, 1:] != IGNORED).sum(dim=1)
        for rows in torch.arange(len(tokens), device=tokens.device).tensor_split(min(2, len(tokens))):
            share = 1.0 if num_items is not None else (tokens[rows].sum() / tokens.sum()).item()
            yield {name: tensor[rows] for name, tensor in inputs.items()}, share

    def compute_loss(self, model: PreTrainedModel, inputs: Inputs, return_outputs: bool = False, **options: Any) -> Any:
        """The Trainer's loss, as far as it counts."""
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, **options)
        if self.share == 1.0:
            return found
        return (found[0] * self.share, found[1]) if return_outputs else found * self.share

    def _clip_grad_norm(self, model: PreTrainedModel) -> Any:
        """Clip. Raises NonFiniteError, before the optimiser moves, when loss or gradient is NaN or infinite."""
        norm = super()._clip_grad_norm(model)
        if not math.isfinite(norm):
            loss = self._tr_loss.item()
            met = f"the gradient norm is {float(norm)}" if math.isfinite(loss) else f"the loss is {loss}"
            raise NonFiniteError(f"step {self.state.global_step + 1}: {met}; lower the learning rate")
        return norm

    def _save_checkpoint(self, model: PreTrainedModel, trial: Any) -> None:
        """Write a checkpoint. Raises NonFiniteError instead when weights or optimiser hold NaN or infinity."""
        with at_step(self.state.global_step):
            require_finite(dict(model.named_parameters()), "weights")
            require_finite(self.optimizer.state_dict(), "optimizer")
        super()._save_checkpoint(model, trial)
