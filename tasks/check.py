"""Stage `check`: validates params.yaml before DVC removes any output. It writes a constant, on which all other stages
depend, and what params.yaml may lack (the blocks of the methods, `round`, `scorer`, `precision`, `deterministic`) or
what follows from it (the raw files that it names): DVC tracks it there."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from rlhf_core.config.block import Block
from rlhf_core.data.classifiers import require_classifier
from rlhf_core.data.scorer import Answers
from rlhf_core.errors import needs_bitsandbytes
from rlhf_core.functions.process import RewardFunction
from tasks.params.all import Params
from tasks.params.loader import ANSWERS, NUMERICS, RAW_FILES, SFT_ENABLED, parse, read_yaml, with_derived
from tasks.params.methods import METHODS
from tasks.params.scorer import FOLDER, JUDGES, REWARD_MODEL, TextModel, functions
from tasks.stage.stage import Stage

CONSTANT = "data/check.ok"
METHOD_BLOCKS = "data/methods.json"


def execute(stage: Stage[Block]) -> None:
    """Raise UserError for the first problem of params.yaml, or of a function or model that it names."""
    content = read_yaml()
    params, known = parse(Params, content), with_derived(content)
    require_libraries(content)
    for key in ("temperature", "max_new_tokens", "max_prompt_tokens"):
        trained, measured = ("null" if (v := getattr(b, key)) is None else v for b in (params.ppo, params.evaluate))
        if trained != measured:
            stage.log(
                f"remark: evaluate.{key} is {measured}, and ppo.{key} is {trained}: scores and KL of the report are "
                "then those of other answers than PPO was trained on"
            )
    ppo = params.ppo
    reach = ppo.lam**ppo.max_new_tokens
    if params.base.source == "pretrained" and ppo.has_critic and reach < 0.01 and not ppo.critic_warmup_steps:
        stage.log(
            f"remark: ppo.lam^ppo.max_new_tokens is {reach:.1e}: the score reaches the first tokens of long answers by "
            "the critic only, which is not trained yet; set ppo.critic.warmup_steps to 10 or more, or ppo.lam to 1"
        )
    limits = stage.runtime.functions
    files = [(file, "scorer") for file in functions(params.scorer)]
    files += [] if params.judge.function is None else [(params.judge.function, "judge.function")]
    for file, key in files:
        function = RewardFunction(stage.root / FOLDER, file, limits.timeout_seconds, limits.memory_mb, key)
        function(Answers([], []))
        function.close()
    models: list[tuple[str, TextModel, str]] = [(term.model, term, "scorer") for term in params.scorer if term.model]
    if params.judge.kind == "reward_model" and params.judge.model is not None:
        models.append((params.judge.model, params.judge, "judge.model"))
    for name, how, key in models:
        conversation = how.reads is None and params.base.format == "chat"
        require_classifier(stage.root / JUDGES / name, how.label, conversation, f"{key}: {JUDGES}/{name}")
    methods = (method.name for method in METHODS)
    tracked = ["round", *methods, "scorer", REWARD_MODEL, SFT_ENABLED, *NUMERICS, RAW_FILES, ANSWERS]
    stage.outputs.write_json(METHOD_BLOCKS, {name: known[name] for name in tracked})
    stage.out(CONSTANT).write_text("params.yaml is valid\n", encoding="utf-8")


def require_libraries(content: Any) -> None:
    """Raise UserError for a setting, in any block, whose optional library is not installed."""
    if not isinstance(content, Mapping) or find_spec("bitsandbytes") is not None:
        return
    for key, value in content.items():
        if (key, value) == ("quantize", "nf4"):
            raise needs_bitsandbytes("quantize: nf4", "none")
        require_libraries(value)
