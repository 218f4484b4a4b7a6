"""The Trainer of base, SFT, reward model and DPO: a micro-batch that does not fit into memory is halved, and a loss or
gradient that is NaN or infinite stops the run before the optimiser's step."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback

from rlhf_core.errors import NonFiniteError
from rlhf_core.models.batch import TokenBatch, predict
from rlhf_core.models.batching import micro_batches, tokens_per_pass
from rlhf_core.models.precision import autocast
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.training.memory import Halving, attempt
from rlhf_core.training.run import Run

Inputs = dict[str, Tensor]
IGNORED = -100
"""The label of a token that is not learnt."""


def require_hooks(kind: type, names: Sequence[str]) -> None:
    """Raise ImportError unless `kind` has every method of `names`: a guard in a renamed method would never be
    called."""
    if missing := [name for name in names if not hasattr(kind, name)]:
        raise ImportError(
            f"transformers {transformers.__version__}: {kind.__name__} has no {', '.join(missing)}, which guards "
            "training against NaN and lost checkpoints here; install a version that pyproject.toml allows"
        )


require_hooks(Trainer, ("training_step", "compute_loss_context_manager", "compute_loss", "evaluate", "log"))
require_hooks(TrainerCallback, ("on_log", "on_step_end", "on_evaluate", "on_save"))


class GuardedTrainer(Trainer):
    """A Trainer whose passes fit memory and whose steps are finite. `keys` are the parameters to lower where memory is
    short."""

    def __init__(self, run: Run, keys: str, **options: Any) -> None:
        self.halving = Halving("a training step", keys, run.exempt, run.state_dir / "halved")
        self.share = 1.0
        """The weight of the current pass's mean loss in its micro-batch."""
        self.first = True
        """Whether the current pass is the first of its micro-batch."""
        self._accumulated: list[Inputs] = []
        self.precision = run.precision
        super().__init__(**options)

    def training_step(self, model: PreTrainedModel, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """Add the gradient of a micro-batch, and return its loss. Raises UserError when half of it does not fit, and
        NonFiniteError for a loss or, at the end of an optimiser step's micro-batches, a gradient that is not finite.

        A failed pass may have added a part of its gradient: the whole optimiser step so far is undone and repeated.
        """
        begun = self.halving.done

        def work() -> Tensor:
            for earlier in self._accumulated if self.halving.done and not begun else []:
                self._passes(model, earlier, num_items_in_batch)
            return self._passes(model, inputs, num_items_in_batch)

        loss = self.halving.until_it_fits(work, undo=model.zero_grad)
        self._accumulated = [] if self.accelerator.sync_gradients else [*self._accumulated, inputs]
        self._require_finite(f"the loss is {loss.item()}", loss)
        if self.accelerator.sync_gradients:
            self.check_gradients(model)
        return loss

    def compute_loss_context_manager(self) -> ExitStack:
        """The Trainer's context of a forward pass, and the run's precision; `bf16=True` of the Trainer has no effect on
        a loss that calls a part of the model."""
        stack: ExitStack = super().compute_loss_context_manager()
        stack.enter_context(self.autocast())
        return stack

    def autocast(self) -> AbstractContextManager[None]:
        """Matrix products in the run's precision."""
        return autocast(self.precision, self.args.device)

    def check_gradients(self, model: PreTrainedModel) -> None:
        """Raise NonFiniteError when the norm of all gradients is not finite."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        self._require_finite(f"the gradient norm is {norm.item()}", norm)

    def _require_finite(self, problem: str, value: Tensor) -> None:
        if not math.isfinite(value):
            raise NonFiniteError(f"step {self.state.global_step + 1}: {problem}; lower the learning rate")

    def _passes(self, model: PreTrainedModel, inputs: Inputs, num_items: Any) -> Tensor:
        """Forward and backward over a micro-batch, part by part; its loss."""
        step = super().training_step
        losses: list[Tensor] = []
        for part, share in self.parts(inputs, num_items):
            self.first, self.share = not losses, share
            losses.append(attempt(partial(step, model, part, num_items), partial(self.rows, part)))
        return torch.stack(losses).sum()

    def rows(self, inputs: Inputs) -> int:
        """The number of rows."""
        return len(inputs["input_ids"])

    def parts(self, inputs: Inputs, num_items: Any) -> Iterator[tuple[Inputs, float]]:
        """Parts of rows of similar length, without superfluous padding, with the weights of their mean losses; once
        halved, each part in two.

        With `num_items` the loss is a sum over all tokens of the optimiser step already, and the weights are 1.
        """
        ids, labels = inputs["input_ids"], inputs["labels"]
        widths = inputs.get("attention_mask", torch.ones_like(ids)).sum(dim=1).tolist()
        tokens = (labels[:, 1:] != IGNORED).sum(dim=1)
        groups = micro_batches(range(len(ids)), [(0, width) for width in widths], len(ids), tokens_per_pass(ids.device))
        for group in groups:
            halves = min(2, len(group)) if self.halving.done else 1
            for rows in torch.tensor(group, device=ids.device).tensor_split(halves):
                share = 1.0 if num_items is not None else (tokens[rows].sum() / tokens.sum()).item()
                yield {name: tensor[rows, : widths[group[-1]]] for name, tensor in inputs.items()}, share

    def compute_loss(self, model: PreTrainedModel, inputs: Inputs, return_outputs: bool = False, **options: Any) -> Any:
        """The mean loss over the labelled tokens of the optimiser step, or of the part times its weight, in nats."""
        ids, learnt = inputs["input_ids"], inputs["labels"][:, 1:] != IGNORED
        batch = TokenBatch(ids, inputs.get("attention_mask", torch.ones_like(ids)), learnt.float())
        logprobs, _ = logprobs_and_entropy(predict(model, batch), batch.response_tokens)
        scale, items = self.share / max(1, len(logprobs)), options.get("num_items_in_batch")
        if items is not None:
            scale = self.accelerator.num_processes / items
        loss = -logprobs.sum() * scale
        return (loss, {"logprobs": logprobs}) if return_outputs else loss
