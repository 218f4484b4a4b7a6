"""Parameters of the stages that run PPO's loop with something changed: `hybrid`, `reinforce`, `rloo`, `grpo`."""

from typing import Any, get_args

from pydantic import Field, ValidationError

from rlhf_core.config.block import Block
from rlhf_core.config.ppo import PPOConfig

ADVANTAGES: tuple[str, ...] = get_args(PPOConfig.model_fields["advantage"].annotation)


def fixed_settings(name: str) -> dict[str, Any]:
    """The settings that define the variant `name`: the estimator of the advantage that it is named after."""
    return {"advantage": name} if name in ADVANTAGES else {}


class VariantParams(Block):
    """The settings of `ppo`, with the changes in `settings`."""

    enabled: bool
    """`false`: the stage writes empty outputs, and `evaluate` leaves the model out."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keys of `ppo` with other values, nested as in `ppo`."""

    def applied_to(self, ppo: PPOConfig, name: str) -> PPOConfig:
        """The settings of PPO's loop for this variant. Raises ValueError, naming the key, for what is no setting of
        PPO, or does not fit the others."""
        fixed = fixed_settings(name)
        if clash := sorted(set(fixed) & set(self.settings)):
            raise ValueError(f"{name}.settings.{clash[0]} is what makes {name}; remove it")
        try:
            config = PPOConfig.model_validate(
                merged(ppo.model_dump() | {"snapshot_every": None}, self.settings | fixed)
            )
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join([name, "settings", *map(str, problem["loc"])])
            message = "unknown parameter" if problem["type"] == "extra_forbidden" else problem["msg"]
            raise ValueError(f"{key}: {message.removeprefix('Value error, ')}") from None
        if "snapshot_every" in self.settings:
            raise ValueError(f"{name}.settings.snapshot_every: only `ppo` keeps snapshots; remove it")
        if set(config.stop_tokens) != set(ppo.stop_tokens):
            raise ValueError(f"{name}.settings.stop_tokens: answers must end as those of `ppo` do; remove it")
        if name == "hybrid" and config.lora is not None:
            raise ValueError(
                "hybrid: with lora the reference is the start with its adapter off, which is models/rejection_sft "
                "here and not the SFT model; put `lora: null` into hybrid.settings"
            )
        return config


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above`, block by block."""
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result
