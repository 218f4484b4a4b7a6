"""The whole of `params.yaml`, with the rules that span stages. For `check` and the command line only: a stage that
imports it depends on every other stage's parameters."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, create_model, model_validator

from rlhf_core.config.block import Block
from rlhf_core.config.dpo import PairConfig
from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.demo.world import all_prompts
from tasks.params.base import BaseParams
from tasks.params.evaluate import EvaluateParams
from tasks.params.ingest import IngestParams
from tasks.params.judge import LANGUAGE_MODELS, JudgeParams
from tasks.params.methods import BY_NAME, METHODS, VARIANTS, Method
from tasks.params.preferences import PreferencesParams
from tasks.params.promote import PromoteParams
from tasks.params.report import ReportParams
from tasks.params.round import RoundParams
from tasks.params.runtime import RuntimeParams
from tasks.params.scorer import Terms, default_terms, is_reward_model, uses_reward_model
from tasks.params.select import SelectParams
from tasks.params.stages import params_model

RESERVED = ("sft", "policy", "ppo", "prompt", *BY_NAME)
"""Names that no model of a user may have: the comparison uses them."""
RESERVED_BEGINNINGS = ("best_of_", "step-", "round_")


class _Params(Block):
    """Keys that all stages share; then one block for each stage."""

    threads: Annotated[int, Field(ge=1, le=256)]
    """CPU threads of PyTorch. Another number changes the last bits of results, so the stages run again."""
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Seed of training and sampling. The data have their own: `ingest.seed`."""
    long_rows: Literal["refuse", "drop"]
    """Prompts and rows with too many tokens: stop with an error, or leave them out and count them."""
    trust_remote_code: bool
    """Run Python code that comes with a pretrained model. It has your rights: it can read your files and use your
    network."""
    precision: Precision = "float32"
    """Of matrix products. With `bfloat16`, models that are not trained also have bfloat16 weights, and a GPU computes
    float32 products in TensorFloat-32 (10-bit mantissa). Trained weights, heads, log-probabilities and losses stay
    float32."""
    deterministic: bool = True
    """`false`: the fastest kernels on a GPU. Two runs may then differ, and outputs are exempt from byte identity."""
    runtime: RuntimeParams = RuntimeParams()
    promote: PromoteParams = PromoteParams()
    round: RoundParams = RoundParams()
    ingest: IngestParams
    base: BaseParams
    sft: SFTConfig
    preferences: PreferencesParams
    reward: RewardConfig
    scorer: Terms = Field(default_factory=default_terms)
    ppo: PPOConfig
    select: SelectParams
    judge: JudgeParams
    evaluate: EvaluateParams
    report: ReportParams

    @model_validator(mode="after")
    def _fits_together(self) -> "_Params":
        if self.preferences.source in {"judge", "both"} and self.ingest.source != "demo":
            raise ValueError(
                f"preferences.source is {self.preferences.source}, but only the demo data have a judge; "
                "use source: dataset"
            )
        has_pairs = self.ingest.source != "demo" or self.ingest.labels is not None
        if self.preferences.source in {"dataset", "both"} and not has_pairs:
            raise ValueError(
                f"preferences.source is {self.preferences.source}, but the demo data have no pairs; use source: judge, "
                "or name labels in ingest.labels"
            )
        if self.preferences.source == "judge" and self.ingest.labels is not None:
            raise ValueError(
                "preferences.source is judge, so the labels of ingest.labels would not be used; use source: dataset or "
                "both, or remove ingest.labels"
            )
        if self.preferences.source == "model" and self.judge.kind not in LANGUAGE_MODELS:
            raise ValueError(
                f"preferences.source is model, but judge.kind is {self.judge.kind}; name a language model in `judge`"
            )
        self._check_ratings()
        self._check_judge()
        self._check_sft()
        self._check_world()
        self._check_methods()
        self._check_scorer()
        self._check_extra_models()
        self._check_context()
        self._check_reward_length()
        self._check_stop_tokens()
        self._check_quantize()
        return self

    def _check_quantize(self) -> None:
        blocks = {"sft": self.sft, "reward": self.reward, "ppo": self.ppo, **dict(self.enabled_methods())}
        if not self.sft.enabled:
            del blocks["sft"]
        for name, block in blocks.items():
            lora: LoraSettings | None = getattr(block, "lora", None)
            if lora is not None and lora.quantize != "none" and self.precision != "bfloat16":
                raise ValueError(
                    f"{name}.lora.quantize is {lora.quantize}, which computes in bfloat16; set precision: bfloat16"
                )

    def _check_ratings(self) -> None:
        rated = self.preferences.source == "ratings"
        if rated != (self.ingest.rating_column is not None):
            raise ValueError(
                "preferences.source: ratings and the name of their column in ingest.rating_column need each other; "
                "set both, or remove both"
            )
        if rated and (self.ingest.source == "demo" or self.ingest.labels is not None):
            raise ValueError(
                "preferences.source is ratings: the reward model learns from the column ingest.rating_column of your "
                "own data, without ingest.labels; set ingest.source: files or huggingface, and remove ingest.labels"
            )
        if rated and self.reward.max_pairs is not None:
            raise ValueError(
                "reward.max_pairs counts pairs, and preferences.source is ratings: its pairs are made of groups of "
                "answers; set reward.max_pairs: null, and give fewer rows"
            )
        for name, params in self.enabled_methods():
            if isinstance(params, PairConfig) and rated and self.base.format == "chat":
                raise ValueError(
                    f"{name} trains on pairs of answers to the same prompt, which ratings of chat answers do not give; "
                    f"set {name}.enabled: false, or base.format: text where the rows are texts"
                )

    def _check_world(self) -> None:
        demo = self.ingest.demo
        if self.ingest.source != "demo" or demo is None:
            return
        available = len(all_prompts(demo.domains, demo.needs))
        if demo.prompts > available:
            raise ValueError(
                f"ingest.demo.prompts is {demo.prompts}, but {demo.domains} domains and {demo.needs} needs have "
                f"{available} distinct prompts"
            )

    def _check_judge(self) -> None:
        named = {"function": self.judge.function, "reward_model": self.judge.model}.get(self.judge.kind)
        if named in {term.name for term in self.scorer if term.weight}:
            key, other = ("function", "file") if self.judge.kind == "function" else ("model", "folder")
            raise ValueError(
                f"judge.{key} is {named}, a term of scorer: a judge must not be what PPO maximises. "
                f"Name another {other}, or set judge.kind: data: without a judge the scorer compares the answers"
            )
        if self.select.rule == "best_judge" and self.judge.kind == "data" and self.ingest.source != "demo":
            raise ValueError(
                "select.rule is best_judge, but only the demo data have a judge; name a judge model in `judge`, or "
                "use best_proxy"
            )

    def enabled_methods(self) -> Iterator[tuple[str, Any]]:
        """Name and parameters of each method that is switched on."""
        for method in METHODS:
            params: Any = getattr(self, method.name)
            if params.enabled:
                yield method.name, params

    def _check_sft(self) -> None:
        pretrained = self.base.source == "pretrained" or (self.base.pretrain is not None and self.base.pretrain.steps)
        if not self.sft.enabled and not pretrained:
            raise ValueError(
                "sft.enabled is false, so the policy would start from the random weights of base.source: scratch; set "
                "base.source: pretrained, or base.pretrain.steps"
            )

    def _check_methods(self) -> None:
        enabled = dict(self.enabled_methods())
        for name in VARIANTS:
            if name in enabled:
                enabled[name].applied_to(self.ppo, name)
        rejection = enabled.get("rejection_sft")
        if rejection and rejection.training.max_tokens <= rejection.max_new_tokens:
            raise ValueError(
                f"rejection_sft.training.max_tokens is {rejection.training.max_tokens}: a prompt and the "
                f"{rejection.max_new_tokens} tokens of rejection_sft.max_new_tokens do not fit; enlarge it"
            )
        if "hybrid" in enabled and not rejection:
            raise ValueError("hybrid starts from models/rejection_sft; set rejection_sft.enabled: true")

    def _check_scorer(self) -> None:
        loops = {"ppo.": self.ppo} | {
            f"{name}.settings.": params.applied_to(self.ppo, name)
            for name, params in self.enabled_methods()
            if name in VARIANTS
        }
        for key, config in loops.items():
            if config.needs_critic_model and config.critic.init == "reward" and self.reward.base is not None:
                raise ValueError(
                    f"{key}critic.init is reward: a critic reads the policy's tokens, and the reward model on "
                    "reward.base reads others; set it to sft"
                )
            if config.needs_critic_model and config.critic.init == "reward" and not is_reward_model(self.scorer):
                raise ValueError(
                    f"{key}critic.init is reward: a critic that starts as the reward model predicts its score, and "
                    "scorer has other terms or another weight; set it to sft"
                )
            if config.advantage == "gdpo" and sum(term.weight != 0 for term in self.scorer) < 2:
                block = key.removesuffix("settings.")
                raise ValueError(
                    f"{block}advantage is gdpo, which compares the terms of scorer apart, and scorer has one term with "
                    "a weight; use grpo, or add a term"
                )
        for name, params in self.enabled_methods():
            if isinstance(params, PairConfig) and not uses_reward_model(self.scorer):
                raise ValueError(
                    f"{name} trains on preference pairs, which are not made where scorer has no term reward_model; "
                    f"set {name}.enabled: false, or add the term"
                )

    def _check_extra_models(self) -> None:
        for name in self.evaluate.extra_models:
            if name in RESERVED or name.startswith(RESERVED_BEGINNINGS):
                raise ValueError(f"evaluate.extra_models: {name} is the name of a model of the run; rename the folder")

    @property
    def _samples_pairs(self) -> bool:
        return self.preferences.source not in {"dataset", "ratings"}

    def _check_reward_length(self) -> None:
        if self._samples_pairs and self.reward.max_tokens <= self.preferences.max_new_tokens:
            raise ValueError(
                f"reward.max_tokens is {self.reward.max_tokens}: a prompt and the {self.preferences.max_new_tokens} "
                "tokens of preferences.max_new_tokens do not fit; enlarge it"
            )

    def _check_stop_tokens(self) -> None:
        wanted = self.ppo.stop_tokens
        for name, found in {
            "preferences": self.preferences.stop_tokens,
            "evaluate": self.evaluate.stop_tokens,
            **{n: method.stop_tokens for n, method in self.enabled_methods() if hasattr(method, "stop_tokens")},
        }.items():
            if set(found) != set(wanted):
                raise ValueError(
                    f"{name}.stop_tokens is {found}, but ppo.stop_tokens is {wanted}: responses must end alike where "
                    "the reward model learns, where the policy learns and where it is judged; make them the same"
                )

    def _check_context(self) -> None:
        if self.base.source != "scratch" or self.base.scratch is None:
            return
        context = self.base.scratch.context
        read = {"sft": self.sft.max_tokens} if self.sft.enabled else {}
        if self.reward.base is None:  # else it reads tokens of its own, in a context of its own
            read["reward"] = self.reward.max_tokens
        sampled = {"ppo": self.ppo.max_new_tokens, "evaluate": self.evaluate.max_new_tokens}
        if self._samples_pairs:
            sampled["preferences"] = self.preferences.max_new_tokens
        for name, method in self.enabled_methods():
            if name in VARIANTS:
                sampled[f"{name}.settings"] = method.applied_to(self.ppo, name).max_new_tokens
            if hasattr(method, "max_tokens"):
                read[name] = method.max_tokens
            if hasattr(method, "max_new_tokens"):
                sampled[name] = method.max_new_tokens
            if hasattr(method, "training"):
                read[f"{name}.training"] = method.training.max_tokens
        for name, tokens in read.items():
            if tokens > context:
                raise ValueError(f"{name}.max_tokens is {tokens} tokens, longer than base.scratch.context {context}")
        for name, tokens in sampled.items():
            if tokens >= context:
                raise ValueError(
                    f"{name}.max_new_tokens is {tokens}: it leaves a prompt no room in base.scratch.context {context}"
                )


def _block(method: Method) -> Any:
    model: Any = params_model(method.name)
    return model, Field(default_factory=partial(model, enabled=False), description=method.meaning)


Params: type[_Params] = create_model(
    "Params",
    __base__=_Params,
    __doc__=_Params.__doc__,
    **{method.name: _block(method) for method in METHODS},
)
"""All blocks: those above, and one for each method, which is off where it is absent."""
