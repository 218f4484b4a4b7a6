"""Parameters of the stages that run PPO's loop with something changed: `hybrid`, `reinforce`, `rloo`, `grpo`."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from rlhf_core.config.block import Block
from rlhf_core.config.ppo import PPOConfig

Recipe = Literal["published", "dr_grpo", "gdpo", "ppo_style"]

NO_CRITIC: dict[str, Any] = {"critic": {"warmup_steps": 0}}
ON_POLICY: dict[str, Any] = NO_CRITIC | {
    "ppo_epochs": 1,  # the ratio is then 1, and the clip does nothing
    "minibatches": 1,
    "policy_gradient_steps": 0,
    "whiten_advantages": False,
    "entropy_coef": 0.0,
    "ptx": {"coef": 0.0},
    "clip_ratio_high": None,
    "ratio": "token",
    "dual_clip": None,
    "importance_cap": None,
    "stop_kl": None,
    "skip_equal_groups": False,
    "truncated": "keep",
}
KL_IN_REWARD: dict[str, Any] = {"kl": {"penalty": "reward", "estimator": "k1"}}
KL_IN_LOSS: dict[str, Any] = {"kl": {"penalty": "loss", "estimator": "k3"}}
PUBLISHED: dict[str, dict[str, Any]] = {
    "reinforce": ON_POLICY | KL_IN_REWARD | {"advantage": "reinforce", "loss_average": "answer_sums"},
    "rloo": ON_POLICY | KL_IN_REWARD | {"advantage": "rloo", "loss_average": "answer_sums"},
    "grpo": ON_POLICY | KL_IN_LOSS | {"advantage": "grpo", "loss_average": "answer_means"},
}
"""The settings that define each method: Williams 1992; Ahmadian et al. 2024 (RLOO); Shao et al. 2024 (GRPO)."""
OF_GRPO: dict[str, dict[str, Any]] = {
    "dr_grpo": {"advantage": "dr_grpo", "loss_average": "answer_sums"},
    "gdpo": {"advantage": "gdpo", "whiten_advantages": True},
}
"""What the other recipes of `grpo` change: Liu et al. 2025 (Dr. GRPO); Liu et al. 2026 (GDPO)."""


def fixed_settings(name: str, recipe: Recipe) -> dict[str, Any]:
    """The settings that define the stage `name` under a recipe. Raises ValueError for a recipe that it does not
    have."""
    if name not in PUBLISHED:
        if recipe != "published":
            raise ValueError(f"{name}.recipe is {recipe}: {name} has no recipes; remove it")
        return {}
    if recipe == "ppo_style":
        return NO_CRITIC | {"advantage": name}
    if recipe == "published":
        return PUBLISHED[name]
    if name != "grpo":
        raise ValueError(f"{name}.recipe is {recipe}, which is a recipe of grpo; use published or ppo_style")
    return PUBLISHED[name] | OF_GRPO[recipe]


def keys_of(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all values."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        yield from keys_of(value, f"{name}.") if isinstance(value, Mapping) else (name,)


class VariantParams(Block):
    """Settings as in `ppo`, with changes."""

    enabled: bool
    """Run and evaluate this method."""
    recipe: Recipe = "published"
    """`published`: as in the paper, one optimizer step per rollout. `ppo_style`: only the baseline differs from `ppo`.
    Only for `grpo`: `dr_grpo`, without length and deviation bias (Liu et al. 2025); `gdpo`, each term of `scorer`
    normalised separately (Liu et al. 2026). `hybrid` has no recipes."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Changes to `ppo`, nested as there. Keys that the recipe fixes are refused."""

    def applied_to(self, ppo: PPOConfig, name: str) -> PPOConfig:
        """The settings of PPO's loop for this variant. Raises ValueError, naming the key, for what is no setting of
        PPO, or does not fit the others."""
        fixed = fixed_settings(name, self.recipe)
        if clash := sorted(set(keys_of(fixed)) & set(keys_of(self.settings))):
            other = "" if self.recipe == "ppo_style" or clash[0] == "advantage" else ", or set recipe: ppo_style"
            raise ValueError(f"{name}.settings.{clash[0]} is fixed by recipe: {self.recipe}; remove it{other}")
        try:
            config = PPOConfig.model_validate(
                merged(merged(ppo.model_dump() | {"snapshot_every": None}, self.settings), fixed)
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
