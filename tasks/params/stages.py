"""The stages in the order of the graph, with the class of each one's parameters."""

from importlib import import_module

from rlhf_core.config.block import Block
from tasks.params.methods import METHODS

STAGES = {
    "check": "rlhf_core.config.block:Block",
    "check_data": "rlhf_core.config.block:Block",
    "ingest": "tasks.params.ingest:IngestParams",
    "base": "tasks.params.base:BaseParams",
    "sft": "rlhf_core.config.sft:SFTConfig",
    "preferences": "tasks.params.preferences:PreferencesParams",
    "reward": "rlhf_core.config.reward:RewardConfig",
    "ppo": "rlhf_core.config.ppo:PPOConfig",
    "select": "tasks.params.select:SelectParams",
    **{method.name: method.params for method in METHODS},
    "evaluate": "tasks.params.evaluate:EvaluateParams",
    "report": "tasks.params.report:ReportParams",
}
"""Stage -> `module:class`, imported when needed: no stage depends on the parameters of another one."""


def params_model(stage: str) -> type[Block]:
    """The class of the parameters of a stage."""
    module, name = STAGES[stage].split(":")
    found: type[Block] = getattr(import_module(module), name)
    return found
