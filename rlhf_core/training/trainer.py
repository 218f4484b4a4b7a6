"""The Trainer of base, SFT, reward model and DPO: a micro-batch that does not fit into memory is halved, and a loss or
gradient that is NaN or infinite stops the run before the optimiser's step. Its model may be divided over processes."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback

from rlhf_core.errors import NonFiniteError, UserError, is_out_of_memory
from rlhf_core.models.batch import TokenBatch, predict
from rlhf_core.models.batching import micro_batches, tokens_per_pass
from rlhf_core.models.precision import autocast
from rlhf_core.models.sharding import clip_gradients, within
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.training.divided import DividedTrainer, require_hooks
from rlhf_core.training.memory import Halving, attempt
from rlhf_core.training.run import Run

Inputs = dict[str, Tensor]
IGNORED = -100
"""The label of a token that is not learnt."""


require_hooks(Trainer, ("training_step", "compute_loss_context_manager", "compute_loss", "evaluate", "log"))
require_hooks(TrainerCallback, ("on_log", "on_step_end", "on_evaluate", "on_save"))


class GuardedTrainer(DividedTrainer):
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
        self.in_backward = False
        """Whether the current pass has computed its loss."""
        super().__init__(run.processes, **options)

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

        gather = list if self.processes is None else self.processes.gather
        loss = self.sum_over_processes(self.halving.until_it_fits(work, undo=model.zero_grad, gather=gather))
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
        norm = clip_gradients(list(model.parameters()), math.inf)
        self._require_finite(f"the gradient norm is {norm}", norm)

    def _require_finite(self, problem: str, value: Tensor | float) -> None:
        if not math.isfinite(value):
            raise NonFiniteError(f"step {self.state.global_step + 1}: {problem}; lower the learning rate")

    def _passes(self, model: PreTrainedModel, inputs: Inputs, num_items: Any) -> Tensor:
        """Forward and backward over a micro-batch, part by part; its loss. Where the model is divided, the parts are
        divided, too, and this is the loss of this process' parts."""
        step = super().training_step
        losses: list[Tensor] = []
        for (part, share), counts in self.shared_evenly(list(self.parts(inputs, num_items))):
            self.first, self.share, self.in_backward = not losses, share if counts else 0.0, False
            one_pass = partial(self._one_pass, partial(step, model, part, num_items))
            losses.append(attempt(one_pass, partial(self.rows, part)))
        return torch.stack(losses).sum()

    def _one_pass(self, step: Callable[[], Tensor]) -> Tensor:
        """`step()`. Raises UserError where memory is short in the backward pass of a divided model: the other processes
        wait for this one's part of the gradients, and cannot repeat the pass."""
        try:
            return step()
        except (RuntimeError, MemoryError) as error:
            if self.processes is None or not self.in_backward or not is_out_of_memory(error):
                raise
        raise UserError(
            f"out of memory in a backward pass of a divided model; lower {self.halving.keys}; "
            "the last checkpoint is kept"
        )

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
        rows = -(-len(ids) // self.process_count)
        groups = micro_batches(range(len(ids)), [(0, width) for width in widths], rows, tokens_per_pass(ids.device))
        for group in groups:
            halves = min(2, len(group)) if self.halving.done else 1
            for places in torch.tensor(group, device=ids.device).tensor_split(halves):
                share = 1.0 if num_items is not None else (tokens[places].sum() / tokens.sum()).item()
                yield {name: tensor[places, : widths[group[-1]]] for name, tensor in inputs.items()}, share

    def compute_loss(self, model: PreTrainedModel, inputs: Inputs, return_outputs: bool = False, **options: Any) -> Any:
        """The part's loss, see `loss`."""
        loss, outputs = self.loss(model, inputs, options.get("num_items_in_batch"))
        self.in_backward = True
        return (loss, outputs) if return_outputs else loss

    def loss(self, model: PreTrainedModel, inputs: Inputs, items: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss over the `items` labelled tokens of the optimiser step, in nats, or without `items` of the part
        times its weight; and what it is made of. A Trainer adds up the items of all processes, which have the same
        rows."""
        ids, learnt = inputs["input_ids"], inputs["labels"][:, 1:] != IGNORED
        batch = TokenBatch(ids, inputs.get("attention_mask", torch.ones_like(ids)), learnt.float())
        read = partial(logprobs_and_entropy, actions=batch.response_tokens)
        logprobs = within(model, lambda: read(predict(model, batch))[0])
        scale = self.share / max(1, len(logprobs))
        if items is not None:
            scale = self.share * self.accelerator.num_processes / items
        return -logprobs.sum() * scale, {"logprobs": logprobs}
