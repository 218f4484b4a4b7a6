"""The table of methods that are compared with the SFT model and PPO; docs/how-to/add-a-method.md explains how to add
one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    name: str
    """Of its stage tasks/<name>.py, its block of params.yaml and metrics/<name>.json; of models/<name> where it has a
    model."""
    label: str
    """In tables and pictures."""
    colour: str
    params: str
    """`module:class` of its parameters, imported when needed: the other stages must not depend on them."""
    meaning: str
    """In one line, for docs/parameters.md."""
    has_model: bool = True
    variant_of_ppo: bool = False
    """Whether it runs PPO's loop with other settings."""
    built_on: tuple[str, ...] = ()
    """Methods whose training cost is part of its own."""


VARIANT = "tasks.params.variant:VariantParams"
METHODS = (
    Method("best_of_n", "Best of n", "#1d7f4c", "tasks.params.best_of_n:BestOfNParams",
           "The best of n answers of the SFT model.", has_model=False),
    Method("rejection_sft", "Rejection SFT", "#c2338a", "tasks.params.rejection_sft:RejectionParams",
           "SFT on the best of many answers."),
    Method("dpo", "DPO", "#c8382e", "rlhf_core.config.dpo:DPOConfig", "Direct preference optimisation."),
    Method("ipo", "IPO", "#e07b00", "rlhf_core.config.ipo:IPOConfig", "Identity preference optimisation."),
    Method("hybrid", "Hybrid", "#6b7d00", VARIANT,
           "PPO from models/rejection_sft, with the SFT model as its reference.",
           variant_of_ppo=True, built_on=("rejection_sft",)),
    Method("reinforce", "REINFORCE", "#7d5a3c", VARIANT, "PPO's loop with `advantage: reinforce`.",
           variant_of_ppo=True),
    Method("rloo", "RLOO", "#0a8f9e", VARIANT, "PPO's loop with `advantage: rloo`.", variant_of_ppo=True),
    Method("grpo", "GRPO", "#5a4fcf", VARIANT, "PPO's loop with `advantage: grpo`.", variant_of_ppo=True),
)  # fmt: skip
"""In the order of the graph and of the tables."""
WITH_MODEL = tuple(method for method in METHODS if method.has_model)
VARIANTS = tuple(method.name for method in METHODS if method.variant_of_ppo)
BY_NAME = {method.name: method for method in METHODS}
