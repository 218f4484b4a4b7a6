"""The models of a PPO run. The critic is a separate model, a head on the policy's body (one pass for both), or absent;
the reference is a frozen copy, or the policy with its adapter switched off; with `reference_ema` another one moves."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.errors import UserError
from rlhf_core.models.batch import TokenBatch, predict, state_values
from rlhf_core.models.head import Predictions, examine
from rlhf_core.models.hf import fresh_head, scalar_model_of
from rlhf_core.models.lora import Adapter, activate, active, active_adapters, add_lora
from rlhf_core.models.masked import masked_mean
from rlhf_core.models.packed import can_pack
from rlhf_core.models.precision import autocast, keep_float32, round_products
from rlhf_core.models.quantised import is_quantised
from rlhf_core.models.recompute import recomputing
from rlhf_core.models.sharded_files import as_divided
from rlhf_core.models.sharding import divide, is_divided, rejoin, within
from rlhf_core.models.shared_body import merged_scalar_model, recompute_with, shares_body
from rlhf_core.models.token_logprobs import Compared, compare_distributions

MOVING = "moving_reference"
"""The name of the moving reference, and of its adapter."""
START_KL = 1e-5
"""Largest exact KL of policy and reference with equal weights, in nats per token."""
Values = Float[Tensor, "rows time"]
Result = TypeVar("Result")


class ActorCritic:
    """Policy, critic and reference of a PPO run.

    Args:
        config: kind of critic, adapters, moving reference, and gradient checkpointing.
        policy: a causal language model, dropout off; trained.
        reference: the frozen reference, loaded as the policy, so that it computes as the policy does; `None` only with
            `lora`: the policy with its adapter switched off.
        critic: for `advantage: gae` with `critic.kind: separate` a scalar model, or a scalar model's adapter on the
            policy's body; else `None`.
        seed: of the adapters' initial weights.
        precision: of matrix products.

    Raises:
        ValueError: a model that the settings need is missing, one that they do not use is given, or policy and
            reference are one object.
    """

    def __init__(
        self,
        config: PPOConfig,
        policy: PreTrainedModel,
        reference: PreTrainedModel | None,
        critic: PreTrainedModel | Adapter | None,
        seed: int = 0,
        precision: Precision = "float32",
    ) -> None:
        _refuse_mismatch(config, policy, reference, critic)
        self.adapters = {"critic": critic} if isinstance(critic, Adapter) else {}
        self.policy, self.reference = policy.eval(), reference
        self.critic = critic.model if isinstance(critic, Adapter) else critic
        self.head = fresh_head(policy) if config.has_critic and config.critic.kind == "shared" else None
        self.precision: Precision = precision
        self.checkpointing = config.gradient_checkpointing
        if config.lora is not None:
            self.adapters |= {name: add_lora(model, config.lora, seed) for name, model in self._bodies().items()}
        if reference is not None:
            reference.eval().requires_grad_(False)
        self.moving: PreTrainedModel | Adapter | None = None
        if config.reference_ema is not None:
            self.moving = copy.deepcopy(reference) if config.lora is None else self._moving_adapter(config.lora, seed)
        moving = None if isinstance(self.moving, Adapter) else self.moving
        if reference is not None and precision == "bfloat16" and config.lora is None and not is_divided(reference):
            for model in (reference, moving):
                if model is not None:
                    can_pack(model)  # decided in float32
                    examine(model)
            round_products(reference)  # not the moving one: its changes are smaller than the steps of bfloat16
        if precision == "bfloat16":
            for model in (policy, reference, moving):
                if model is not None:
                    keep_float32(model.get_output_embeddings())

    def _moving_adapter(self, lora: LoraSettings, seed: int) -> Adapter:
        """A frozen adapter on the policy's body, equal to the policy's own; that one stays active."""
        before = active_adapters(self.policy)
        adapter = add_lora(self.policy, lora, seed, MOVING)
        activate(self.policy, before)
        for parameter in adapter.parameters():
            parameter.requires_grad_(False)
        return adapter

    def to(self, device: torch.device) -> "ActorCritic":
        """All models on one device."""
        for module in (self.policy, self.reference, self.critic, self.head, self.moving):
            if isinstance(module, nn.Module):
                module.to(device)
        return self

    def divide(self) -> "ActorCritic":
        """Divide all models over the processes, see `sharding.divide`; a shared critic's head is whole in each."""
        for model in (self.policy, self.reference, self.critic):
            if model is not None:
                divide(model, self.precision == "bfloat16")
        if self.head is not None:
            self.head.to(next(self.policy.parameters()).device)
        return self

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.critic is not None or self.head is not None

    def read(
        self,
        batch: TokenBatch,
        function: Callable[[Predictions], Result],
        trains_policy: bool = True,
        values: Values | None = None,
    ) -> tuple[Result, Values]:
        """A function of the policy's predictions of each response token, without padding; and V(s_t) at the position
        whose next token is action t, float32; 0 on padding and without a critic. Without `trains_policy` the policy
        gets no graph. `values`: those of a critic of its own, where they are known."""
        shared = self.head is not None
        if values is None and not shared:
            values = self.values(batch)

        def predicted() -> tuple[Result, Tensor | None]:
            with self.autocast():
                predictions = predict(self.policy, batch)
                if shared and predictions.states is None:
                    raise UserError(f"{type(self.policy).__name__}: no hidden states; set critic.kind to separate")
                return function(predictions), predictions.states if shared else None

        with torch.set_grad_enabled(torch.is_grad_enabled() and trains_policy):
            result, states = within(self.policy, predicted)
        if states is not None and self.head is not None:
            values = batch.spread(self.head(states.float())[..., 0])
        assert values is not None
        return result, values

    def values(self, batch: TokenBatch) -> Values:
        """V(s_t) of a critic of its own, as in `read`; 0 where there is none."""
        if self.critic is None:
            return torch.zeros_like(batch.mask)
        with self.autocast():
            return within(self.critic, partial(state_values, self.critic, batch))

    @torch.no_grad()
    def compare(self, batch: TokenBatch, temperature: float) -> tuple[Compared, Values, Compared | None]:
        """Log-probabilities of policy and reference, their exact KL, and V(s_t) as in `read`; without a graph. Last
        the same of policy and fixed reference, where the reference moves."""
        values = self.values(batch)

        def compared() -> tuple[list[Compared], Tensor | None]:
            predictions, found = predict(self.policy, batch), list[Compared]()
            for fixed in (False,) if self.moving is None else (False, True):
                with self.as_reference(fixed) as reference:
                    compare = partial(_compared, predictions, reference, batch, temperature)
                    found.append(within(reference, compare))
            return found, predictions.states

        with self.autocast():
            (found, *to_fixed), states = within(self.policy, compared)
        if self.head is not None and states is not None:
            values = batch.spread(self.head(states.float())[..., 0])
        return found, values, to_fixed[0] if to_fixed else None

    def read_policy(self, batch: TokenBatch, function: Callable[[Predictions], Result]) -> Result:
        """A function of the policy's predictions alone."""
        with self.autocast():
            return within(self.policy, lambda: function(predict(self.policy, batch)))

    def read_reference(self, batch: TokenBatch, function: Callable[[Predictions], Result]) -> Result:
        """A function of the reference's predictions, which have no gradient; it can be called in a function of the
        policy's."""

        def read(model: PreTrainedModel) -> Result:
            with torch.no_grad(), self.autocast():
                predictions = predict(model, batch)
            return function(predictions)

        with self.as_reference() as model:
            return within(model, partial(read, model))

    @contextmanager
    def as_reference(self, fixed: bool = False) -> Iterator[PreTrainedModel]:
        """The reference of the penalty, which moves with `reference_ema`; or the `fixed` one: the frozen model, or the
        policy with its adapter switched off in this context."""
        if isinstance(self.moving, Adapter) and not fixed:
            with active(self.policy, [MOVING]):
                yield self.policy
            return
        if isinstance(self.moving, PreTrainedModel) and not fixed:
            yield self.moving
            return
        if self.reference is not None:
            yield self.reference
            return
        with self.adapters["policy"].off() as model:
            yield model

    @torch.no_grad()
    def move_reference(self, rate: float) -> None:
        """ref ← (1 − rate)·ref + rate·policy for every weight, or every number of the adapters, of the moving
        reference."""
        assert self.moving is not None
        policy = self.adapters.get("policy", self.policy)
        for own, other in zip(self.moving.parameters(), policy.parameters(), strict=True):
            own.lerp_(other, rate)

    def is_at_start(self) -> bool:
        """Whether policy and reference have the same weights (in bfloat16 where the reference's are), as before the
        first step of a policy that starts as its reference."""
        if self.reference is None:
            adapter = self.adapters["policy"].state_dict()  # the body may carry others
            return all(not numbers.any() for name, numbers in adapter.items() if "lora_B" in name)
        if "policy" in self.adapters or is_quantised(self.policy):
            return False
        own_weights, others = dict(self.policy.named_parameters()), dict(self.reference.named_parameters())
        if own_weights.keys() != others.keys():
            return False
        pairs = ((_local(weight), _local(others[name])) for name, weight in own_weights.items())
        return all(own.shape == other.shape and torch.equal(own.to(other.dtype), other) for own, other in pairs)

    def autocast(self) -> AbstractContextManager[None]:
        """Matrix products in the run's precision; trained weights, heads and losses are float32 in all (rule 24)."""
        return autocast(self.precision, self.policy.device)

    def training(self) -> AbstractContextManager[None]:
        """In this context activations are recomputed instead of kept, with `gradient_checkpointing`."""
        several = self.critic is not None and shares_body(self.critic)  # another adapter is active at the repetition
        contexts = recompute_with if several else None
        return recomputing(list(self._bodies().values()), self.checkpointing, contexts)

    def trained(self) -> dict[str, list[nn.Parameter]]:
        """The trained parameters: `policy`, and `critic` where there is one."""
        parameters = {"policy": self.policy.parameters()}
        if (critic := self.critic or self.head) is not None:
            parameters["critic"] = critic.parameters()
        parameters |= {name: adapter.parameters() for name, adapter in self.adapters.items()}
        return {name: [p for p in found if p.requires_grad] for name, found in parameters.items()}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The trained weights, and those of a moving reference, for a checkpoint."""
        return {name: part.state_dict() for name, part in self._stateful().items()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue from a `state_dict`."""
        for name, part in self._stateful().items():
            own = part.state_dict()
            part.load_state_dict({key: as_divided(saved, own.get(key, saved)) for key, saved in state[name].items()})

    def rejoin(self) -> None:
        """Where models are divided, before `finished_policy` or `finished_critic`: policy and critic with whole
        weights in the main process. All processes call it. Training cannot continue."""
        for model in self._bodies().values():
            rejoin(model)

    def finished_policy(self) -> PreTrainedModel:
        """The policy on the CPU, adapters merged into the weights, in float32. No model of the run can be used
        afterwards."""
        policy = self.policy.cpu()
        return self.adapters["policy"].merge() if "policy" in self.adapters else policy

    def finished_critic(self) -> PreTrainedModel | None:
        """The critic as `finished_policy`, a scalar model also where it is a head on the policy's body; None without a
        critic. No model of the run can be used afterwards, not even for `finished_policy`: a body is not copied."""
        if self.head is not None:
            return scalar_model_of(self.finished_policy(), self.head.cpu())
        critic = self.critic.cpu() if self.critic is not None else None
        return merged_scalar_model(self.adapters["critic"]) if "critic" in self.adapters else critic

    def _bodies(self) -> dict[str, PreTrainedModel]:
        """The models with a body of their own."""
        own = self.critic is not None and not shares_body(self.critic)
        return {"policy": self.policy} | ({"critic": self.critic} if own else {})

    def _stateful(self) -> dict[str, PreTrainedModel | Adapter | nn.Linear]:
        parts: dict[str, PreTrainedModel | Adapter | nn.Linear] = {**self._bodies(), **self.adapters}
        parts |= {MOVING: self.moving} if self.moving is not None else {}
        return parts | ({"critic": self.head} if self.head is not None else {})


def _compared(predictions: Predictions, reference: PreTrainedModel, batch: TokenBatch, temperature: float) -> Compared:
    return compare_distributions(predictions, predict(reference, batch), batch.response_tokens, temperature)


def require_equal_start(
    models: ActorCritic, kl: Float[Tensor, "batch time"], mask: Float[Tensor, "batch time"]
) -> None:
    """Before the first update: with equal weights policy and reference must be equal functions in every precision
    (rule 27). `kl`: exact KL(π ‖ π_ref) of each token, nats. Raises RuntimeError where its mean is not below 1e-5."""
    mean = float(masked_mean(kl, mask))
    if not mean < START_KL and models.is_at_start():
        raise RuntimeError(
            f"policy and reference have the same weights, and their exact KL is {mean:.1e} nats per token, not below "
            f"{START_KL:.0e}: their passes differ; set precision to float32, and report this"
        )


def _local(weight: Tensor) -> Tensor:
    """This process's part of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _refuse_mismatch(
    config: PPOConfig,
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    critic: PreTrainedModel | Adapter | None,
) -> None:
    if policy is reference:
        raise ValueError("policy and reference must be two models: the reference is frozen")
    if reference is None and config.lora is None:
        raise ValueError("a reference model is needed without lora; with it the policy without its adapter can be one")
    if reference is not None and config.lora is None:
        trained, frozen = (model.get_input_embeddings().weight.dtype for model in (policy, reference))
        if trained != frozen:
            raise ValueError(f"the policy's embeddings are {trained}, the reference's {frozen}: load both in {trained}")
    if reference is not None and config.lora is not None and config.reference_ema is not None:
        raise ValueError(
            "reference_ema with lora moves an adapter on the policy's start: no other reference can be given"
        )
    if (critic is not None) != config.needs_critic_model:
        raise ValueError("a critic model is needed for advantage: gae with critic.kind: separate, and only there")
