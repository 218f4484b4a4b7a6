"""Settings of LoRA adapters."""

from typing import Any, Literal

from pydantic import model_validator

from rlhf_core.config.block import Block, Positive, PositiveNumber


class LoraSettings(Block):
    """Train low-rank adapters, which need a larger learning rate. Without this block: all weights."""

    rank: Positive = 16
    """Rank of each adapter."""
    alpha: PositiveNumber = 32.0
    """Weight changes are multiplied by alpha / rank."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Layers with an adapter: all linear ones except output layer and scalar head, or names such as [q_proj,
    v_proj]."""

    quantize: Literal["none", "nf4"] = "none"
    """`nf4`: frozen weights in 4 bits (QLoRA); needs bitsandbytes and `precision: bfloat16`."""

    @model_validator(mode="before")
    @classmethod
    def _no_dropout(cls, values: Any) -> Any:
        for key in ("dropout", "lora_dropout"):
            if isinstance(values, dict) and key in values:
                raise ValueError(
                    f"{key} is refused: with dropout the ratio of PPO would not be 1 at the first update; remove it"
                )
        return values

    @model_validator(mode="after")
    def _some_target(self) -> "LoraSettings":
        if not self.target_modules:
            raise ValueError("target_modules is empty; name linear layers, or give all-linear")
        return self


def require_divisible(processes: int, lora: LoraSettings | None) -> None:
    """Raise ValueError for a model in 4 bits that several processes would divide."""
    if processes > 1 and lora is not None and lora.quantize != "none":
        raise ValueError("processes above 1 divide float32 and bfloat16 weights; set lora.quantize to none")
