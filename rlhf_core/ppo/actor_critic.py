"""The models of a PPO run. The critic is a separate model, a head on the policy's body (one pass for both), or absent;
the reference is a frozen copy, or the policy with its adapter switched off."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.batch import TokenBatch, response_logits, response_logits_and_hidden, state_values
from rlhf_core.models.hf import fresh_head, keep_float32, scalar_head
from rlhf_core.models.lora import Adapter, add_lora
from rlhf_core.models.sharded_files import as_divided
from rlhf_core.models.sharding import divide, rejoin, within

Logits = Float[Tensor, "tokens vocabulary"]
Values = Float[Tensor, "rows time"]


class ActorCritic:
    """Policy, critic and reference of a PPO run.

    Args:
        config: kind of critic, adapters, precision, and gradient checkpointing.
        policy: a causal language model, dropout off; trained.
        reference: the frozen reference; `None` only with `lora`: the policy with its adapter switched off.
        critic: a scalar model, for `advantage: gae` with `critic.kind: separate`; else `None`.
        seed: of the adapters' initial weights.

    Raises:
        ValueError: a model that the settings need is missing, one that they do not use is given, or policy and
            reference are one object.
    """

    def __init__(
        self,
        config: PPOConfig,
        policy: PreTrainedModel,
        reference: PreTrainedModel | None,
        critic: PreTrainedModel | None,
        seed: int = 0,
    ) -> None:
        _refuse_mismatch(config, policy, reference, critic)
        self.policy, self.reference, self.critic = policy.eval(), reference, critic
        self.head = fresh_head(policy) if config.has_critic and config.critic.kind == "shared" else None
        self.bfloat16 = config.precision == "bfloat16"
        self.checkpointing = config.gradient_checkpointing
        self.adapters: dict[str, Adapter] = {}
        if config.lora is not None:
            self.adapters = {name: add_lora(model, config.lora, seed) for name, model in self._bodies().items()}
        if reference is not None:
            reference.eval().requires_grad_(False)
        if self.bfloat16:
            for head in self._heads():
                keep_float32(head)

    def to(self, device: torch.device) -> "ActorCritic":
        """All models on one device."""
        for module in (self.policy, self.reference, self.critic, self.head):
            if module is not None:
                module.to(device)
        return self

    def divide(self) -> "ActorCritic":
        """Divide all models over the processes, see `sharding.divide`; a shared critic's head is whole in each."""
        for model in (self.policy, self.reference, self.critic):
            if model is not None:
                divide(model, self.bfloat16)
        if self.head is not None:
            self.head.to(next(self.policy.parameters()).device)
        return self

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.critic is not None or self.head is not None

    def forward(self, batch: TokenBatch, trains_policy: bool = True) -> tuple[Logits, Values]:
        """Logits that predict each response token, without padding; and V(s_t) at the position whose next token is
        action t, float32; 0 on padding and without a critic. Without `trains_policy` the policy gets no graph."""
        builds_graph = torch.is_grad_enabled() and trains_policy
        if self.head is not None:
            with self.autocast(), torch.set_grad_enabled(builds_graph):
                logits, hidden = within(self.policy, partial(response_logits_and_hidden, self.policy, batch))
            return logits, batch.spread(self.head(hidden.float())[..., 0])
        with self.autocast():
            values = torch.zeros_like(batch.mask)
            if self.critic is not None:
                values = within(self.critic, partial(state_values, self.critic, batch))
        with torch.set_grad_enabled(builds_graph):
            return self.policy_logits(batch), values

    def policy_logits(self, batch: TokenBatch) -> Logits:
        """The policy's logits alone."""
        with self.autocast():
            return within(self.policy, partial(response_logits, self.policy, batch))

    @torch.no_grad()
    def reference_logits(self, batch: TokenBatch) -> Logits:
        """The reference's logits."""
        with self.autocast(), self.as_reference() as model:
            return within(model, partial(response_logits, model, batch))

    @contextmanager
    def as_reference(self) -> Iterator[PreTrainedModel]:
        """The reference: the frozen model, or the policy with its adapter switched off in this context."""
        if self.reference is not None:
            yield self.reference
            return
        with self.adapters["policy"].off() as model:
            yield model

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Matrix products in bfloat16 with `precision: bfloat16`; weights, heads and losses stay float32 (rule 24)."""
        with torch.autocast(self.policy.device.type, dtype=torch.bfloat16, enabled=self.bfloat16):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """In this context activations are recomputed instead of kept, with `gradient_checkpointing`.

        Transformers does so in training mode only; dropout stays off, since its rates are 0.
        """
        bodies = list(self._bodies().values()) if self.checkpointing else []
        for model in bodies:
            model.activation_checkpointing_enable()
            model.train()
        try:
            yield
        finally:
            for model in bodies:
                model.activation_checkpointing_disable()
                model.eval()

    def trained(self) -> dict[str, list[nn.Parameter]]:
        """The trained parameters: `policy`, and `critic` where there is one."""
        modules: dict[str, nn.Module] = {"policy": self.policy}
        if (critic := self.critic or self.head) is not None:
            modules["critic"] = critic
        return {name: [p for p in module.parameters() if p.requires_grad] for name, module in modules.items()}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The trained weights, for a checkpoint."""
        return {name: part.state_dict() for name, part in self._stateful().items()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue from a `state_dict`."""
        for name, part in self._stateful().items():
            own = part.state_dict()
            part.load_state_dict({key: as_divided(saved, own.get(key, saved)) for key, saved in state[name].items()})

    def rejoin(self) -> None:
        """Before `finished`, where models are divided: policy and critic with whole weights in the main process. All
        processes call it. Training cannot continue."""
        for model in self._bodies().values():
            rejoin(model)

    def finished(self) -> tuple[PreTrainedModel, PreTrainedModel | nn.Linear | None]:
        """Policy and critic (the head alone of a shared one) on the CPU, adapters merged into the weights. Training
        cannot continue."""
        for adapter in self.adapters.values():
            adapter.merge()
        critic = self.critic or self.head
        return self.policy.cpu(), critic.cpu() if critic is not None else None

    def _heads(self) -> list[nn.Module]:
        """The output layers of the models."""
        models = [model for model in (self.policy, self.reference) if model is not None]
        heads = [model.get_output_embeddings() for model in models]
        return heads + ([scalar_head(self.critic)] if self.critic is not None else [])

    def _bodies(self) -> dict[str, PreTrainedModel]:
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic is not None else {})

    def _stateful(self) -> dict[str, PreTrainedModel | Adapter | nn.Linear]:
        parts: dict[str, PreTrainedModel | Adapter | nn.Linear] = {**self._bodies(), **self.adapters}
        return parts | ({"critic": self.head} if self.head is not None else {})


def _refuse_mismatch(
    config: PPOConfig,
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    critic: PreTrainedModel | None,
) -> None:
    if policy is reference:
        raise ValueError("policy and reference must be two models: the reference is frozen")
    if reference is None and config.lora is None:
        raise ValueError("a reference model is needed without lora; with it the policy without its adapter can be one")
    if (critic is not None) != config.needs_critic_model:
        raise ValueError("a critic model is needed for advantage: gae with critic.kind: separate, and only there")
