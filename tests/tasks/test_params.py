"""The whole of params.yaml: what is valid, and every rule by which it is refused, in one line that names the key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.tokenizer import ROLES
from rlhf_core.errors import UserError
from tasks.params import base
from tasks.params.all import Params
from tasks.params.loader import parse, read_yaml, why_switched_off, with_derived
from tasks.params.methods import METHODS
from tasks.params.scorer import DEFAULT, functions, is_reward_model, uses_reward_model
from tasks.params.variant import Recipe, VariantParams
from tests.conftest import EXAMPLES

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "params.yaml", *EXAMPLES]
FILES_SOURCE = {"source": "files", "files": {"path": "set"}}

Content = dict[str, Any]


@pytest.fixture
def content() -> Content:
    return read_yaml(ROOT / "examples" / "tiny.yaml")


def put(content: Content, name: str, value: Any) -> Content:
    *above, last = name.split(".")
    block = content
    for part in above:
        block = block.setdefault(part, {})
    block[last] = value
    return content


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_shipped_file_is_valid(path: Path) -> None:
    parse(Params, read_yaml(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_rule_32_only_the_demos_models_have_a_large_eps(path: Path) -> None:
    """It takes a part of the first steps of a pretrained model, whose gradients are small in each weight."""
    params = parse(Params, read_yaml(path))
    assert params.ppo.optimizer.eps == (1e-5 if params.ingest.source == "demo" else 1e-8)


def test_without_sft_the_base_model_must_be_trained(content: Content) -> None:
    """Settings of SFT may stand beside it; the stage runs, and `ingest` and `check_data` follow it."""
    put(content, "sft.enabled", False)
    parse(Params, content)
    assert not why_switched_off(content, "sft")
    assert with_derived(content)["sft_enabled"] is False
    assert all(with_derived({"sft": block})["sft_enabled"] for block in ({}, {"enabled": True}, None))
    put(content, "sft.max_tokens", 10_000)
    parse(Params, content)
    with pytest.raises(UserError, match=r"sft\.enabled is false, so the policy would start from the random weights of"):
        parse(Params, put(content, "base.pretrain.steps", 0))


def test_a_method_without_a_block_is_off(written: Callable[[str], Content], content: Content) -> None:
    """A parameter file from before the method existed stays valid, and DVC can track the block all the same."""
    read = written("dpo:\n  enabled: true\n")
    assert [read[method.name]["enabled"] for method in METHODS] == [method.name == "dpo" for method in METHODS]
    for method in METHODS:
        del content[method.name]
    assert list(parse(Params, content).enabled_methods()) == []


def test_without_the_reward_model_what_needs_pairs_is_refused(content: Content) -> None:
    put(content, "scorer", [{"term": "maths/exact.py", "weight": 1}])
    put(content, "ppo.critic.init", "sft")
    for method in ("dpo", "ipo"):
        put(content, f"{method}.enabled", True)
    with pytest.raises(UserError, match=r"dpo trains on preference pairs, .* set dpo.enabled: false, or add the term"):
        parse(Params, content)
    put(content, "dpo.enabled", False)
    with pytest.raises(UserError, match=r"ipo trains on preference pairs"):
        parse(Params, content)
    put(content, "ipo.enabled", False)
    assert [term.term for term in parse(Params, content).scorer] == ["maths/exact.py"]
    put(content, "hybrid", {"enabled": True, "settings": {"critic": {"init": "reward"}}})
    with pytest.raises(UserError, match=r"hybrid\.settings\.critic\.init is reward.*; set it to sft"):
        parse(Params, content)


def test_without_the_block_the_scorer_is_the_reward_model_alone(content: Content) -> None:
    assert "scorer" not in content
    assert is_reward_model(parse(Params, content).scorer)
    assert with_derived(content)["scorer"] == DEFAULT
    assert with_derived(content)["reward_model"] is True
    assert with_derived(content | {"scorer": [{"term": "a.py", "weight": 1}]})["reward_model"] is False
    assert with_derived(content | {"scorer": "wrong"})["reward_model"] is False, "`check` reports it"


REFUSED = [
    # unknown, missing, of a wrong type
    ("ppo.clip_ration", 0.2, "ppo.clip_ration: unknown parameter; did you mean clip_ratio?"),
    ("pppo", {}, "pppo: unknown parameter"),
    ("ppo.kl.cof", 0.1, "ppo.kl.cof: unknown parameter; did you mean coef?"),
    ("reward.lora", {"rnk": 4}, "reward.lora.rnk: unknown parameter; did you mean rank?"),
    ("reward.members", 0, "reward.members: Input should be greater than or equal to 1 (got 0)"),
    ("reward.combine", "max", "reward.combine: Input should be 'mean', 'min' or 'mean_minus_std' (got 'max')"),
    ("reward.base", ["one", "two", "three"], "reward: base lists 3 models and members is 1; list one for each member"),
    ("reward.base", ["../one"], "reward.base: must stay below data/raw/"),
    ("reward.base", [], "reward.base: give a folder below data/raw/, or a list with one for each member (got [])"),
    ("reward.base", 3, "reward.base: give a folder below data/raw/, or a list with one for each member (got 3)"),
    ("reward.max_pairs", 1, "reward.max_pairs: Input should be greater than or equal to 2 (got 1)"),
    ("ppo.reference_ema", 1.0, "ppo.reference_ema: Input should be less than 1 (got 1.0)"),
    ("reward.std_coef", -1.0, "reward.std_coef: Input should be greater than or equal to 0"),
    ("reward.judge_share", 1.0, "reward.judge_share: Input should be less than 1 (got 1.0)"),
    ("evaluate.qqq", 4, "evaluate.qqq: unknown parameter; remove it"),
    ("runtime.traking", True, "runtime.traking: unknown parameter"),
    ("ppo", None, "ppo: Input should be a valid dictionary"),
    ("ppo.kl", 3, "ppo.kl: Input should be a valid dictionary"),
    ("ppo.steps", "four", "ppo.steps: Input should be a valid integer (got 'four')"),
    ("ppo.steps", 4.0, "ppo.steps: Input should be a valid integer (got 4.0)"),
    ("ppo.steps", True, "ppo.steps: Input should be a valid integer (got True)"),
    ("ppo.learning_rate", "1e-4", "ppo.learning_rate: Input should be a valid number (got '1e-4')"),
    ("ppo.clip_ratio", True, "ppo.clip_ratio: Input should be a valid number (got True)"),
    ("ppo.score.normalise", "off", "ppo.score.normalise: Input should be a valid boolean (got 'off')"),
    ("ppo.kl.coef", float("nan"), "ppo.kl.coef: Input should be a finite number"),
    ("ppo.kl.coef", float("inf"), "ppo.kl.coef: Input should be a finite number"),
    # impossible
    ("ppo.clip_ratio", -1, "ppo.clip_ratio: Input should be greater than 0 (got -1)"),
    ("ppo.clip_ratio", 1.0, "ppo.clip_ratio: Input should be less than 1"),
    ("ppo.kl.coef", -0.1, "ppo.kl.coef: Input should be greater than or equal to 0"),
    ("ppo.gamma", 1.1, "ppo.gamma: Input should be less than or equal to 1"),
    ("ppo.lam", -0.1, "ppo.lam: Input should be greater than or equal to 0"),
    ("ppo.temperature", 0, "ppo.temperature: Input should be greater than 0"),
    ("ppo.steps", 0, "ppo.steps: Input should be greater than or equal to 1"),
    ("ppo.engine", "sglang", "ppo.engine: Input should be 'leash' or 'vllm'"),
    ("ppo.engine", "transformers", "ppo: engine transformers was removed; use leash, or vllm on a GPU"),
    ("ppo.engine", "transformers_continuous", "ppo: engine transformers_continuous was removed; use leash"),
    ("ppo.optimizer.states", "int8", "ppo: optimizer.states was removed: Adam's moments are float32"),
    ("ppo.sampler_rows", 0, "ppo.sampler_rows: Input should be greater than or equal to 1"),
    ("ppo.kl.controller", "pid", "ppo.kl.controller: Input should be 'fixed' or 'adaptive' (got 'pid')"),
    ("ppo.critic.init", "policy", "ppo.critic.init: Input should be 'reward' or 'sft'"),
    ("ppo.optimizer.betas", [0.9], "ppo.optimizer: betas must be two numbers"),
    ("ppo.optimizer.betas", [0.9, 1.0], "ppo.optimizer: betas must be two numbers"),
    ("preferences.samples_per_prompt", 1, "preferences.samples_per_prompt: Input should be greater than or equal to 2"),
    ("preferences.annotators.flip_rate", 0.5, "flip_rate: Input should be less than 0.5"),
    ("evaluate.max_prompts", 0, "evaluate.max_prompts: Input should be greater than or equal to 1 (got 0)"),
    ("evaluate.prompts", "../mine.jsonl", "evaluate.prompts: must stay below data/raw/"),
    ("evaluate.seeds", [1, 1], "evaluate: seeds must be distinct"),
    ("evaluate.extra_models", ["../x"], "evaluate.extra_models.0: must be the name of a folder"),
    ("evaluate.extra_models", ["dpo"], "evaluate.extra_models: dpo is the name of a model of the run"),
    ("evaluate.extra_models", ["ppo"], "evaluate.extra_models: ppo is the name of a model of the run"),
    ("evaluate.extra_models", ["best_of_mine"], "best_of_mine is the name of a model of the run"),
    ("evaluate.extra_models", ["round_1"], "round_1 is the name of a model of the run"),
    ("round", {"share": 0}, "round.share: Input should be greater than 0 (got 0)"),
    ("round", {"share": 1.1}, "round.share: Input should be less than or equal to 1"),
    ("round", {"reference": "last"}, "round.reference: Input should be 'sft' or 'previous' (got 'last')"),
    ("round", {"part": 0.5}, "round.part: unknown parameter"),
    ("best_of_n.n", [4, 2], "best_of_n: n must rise"),
    ("rejection_sft.training", None, "rejection_sft: enabled needs the block `training`"),
    ("rejection_sft.training.turns", "all", "rejection_sft: training.enabled and training.turns are for `sft` alone"),
    ("rejection_sft.training.enabled", False, "rejection_sft: training.enabled and training.turns are for `sft` alone"),
    ("sft.turns", "first", "sft.turns: Input should be 'last' or 'all' (got 'first')"),
    ("ingest.split.share", 0.5, "ingest.split.share: Input should be a valid boolean"),
    ("select", {"rule": "best_proxy", "prompts": 0}, "select: rule best_proxy compares snapshots"),
    ("judge.kind", "model", "judge: kind: model needs the name of a folder"),
    (
        "rloo.settings",
        {"samples_per_prompt": 4, "ppo_epochs": 2},
        "rloo.settings.ppo_epochs is fixed by recipe: published; remove",
    ),
    (
        "rloo.settings",
        {"samples_per_prompt": 4, "kl": {"penalty": "loss"}},
        "rloo.settings.kl.penalty is fixed by recipe",
    ),
    ("rloo.recipe", "dr_grpo", "rloo.recipe is dr_grpo, which is a recipe of grpo"),
    ("rloo.recipe", "gdpo", "rloo.recipe is gdpo, which is a recipe of grpo"),
    ("rloo.settings", {"skip_equal_groups": True}, "rloo.settings.skip_equal_groups is fixed by recipe: published"),
    (
        "base.chat_template_kwargs",
        {"think": False},
        "base: chat_template_kwargs names think, which no template of Leash",
    ),
    ("ppo.max_prompt_tokens", 0, "ppo.max_prompt_tokens: Input should be greater than or equal to 1"),
    ("hybrid", {"enabled": True, "recipe": "ppo_style"}, "hybrid.recipe is ppo_style: hybrid has no recipes"),
    ("rloo.settings", {"clip_ration": 0.1}, "rloo.settings.clip_ration: unknown parameter"),
    ("rloo.settings", {"advantage": "grpo"}, "rloo.settings.advantage is fixed by recipe"),
    ("rloo.settings", {"samples_per_prompt": 3}, "rloo.settings: batch_size 16 counts responses"),
    ("rloo.settings", {"samples_per_prompt": 4, "max_new_tokens": 96}, "rloo.settings.max_new_tokens is 96: it leaves"),
    ("rloo.settings", {"samples_per_prompt": 4, "stop_tokens": ["."]}, "rloo.settings.stop_tokens: answers must end"),
    ("rloo.settings", {"samples_per_prompt": 4, "snapshot_every": 2}, "only `ppo` keeps snapshots"),
    ("rejection_sft.max_new_tokens", 96, "rejection_sft.training.max_tokens is 96: a prompt and the 96 tokens"),
    ("hybrid", {"enabled": True, "settings": {"lora": {"rank": 2}}}, "hybrid: with lora the reference is"),
    ("sft.learning_rate", 0, "sft.learning_rate: Input should be greater than 0"),
    ("reward.epochs", 0, "reward.epochs: Input should be greater than 0"),
    # the scorer
    ("scorer", [], "scorer: no term has a weight other than 0"),
    ("scorer", [{"term": "a.py", "weight": 0}], "scorer: no term has a weight other than 0"),
    ("scorer", [{"term": "reward_model", "weight": 1}] * 2, "scorer: the term reward_model occurs twice"),
    ("scorer", [{"term": "../a.py", "weight": 1}], "scorer.0.term: must be reward_model, or the path of a Python file"),
    ("scorer", [{"term": "/a.py", "weight": 1}], "scorer.0.term: must be reward_model, or the path of a Python file"),
    ("scorer", [{"term": "a/../b.py", "weight": 1}], "scorer.0.term: must be reward_model, or the path of a Python"),
    ("scorer", [{"term": "a.txt", "weight": 1}], "scorer.0.term: must be reward_model, or the path of a Python file"),
    ("scorer", [{"term": "a.py", "weight": float("nan")}], "scorer.0.weight: Input should be a finite number"),
    ("scorer", [{"term": "a.py"}], "scorer.0.weight: missing parameter"),
    ("scorer", [{"term": "a.py", "weight": 1, "wieght": 2}], "scorer.0.wieght: unknown parameter"),
    ("scorer", {"term": "a.py", "weight": 1}, "scorer: Input should be a valid list"),
    ("scorer", [{"term": "a.py", "weight": 1}], "ppo.critic.init is reward: a critic that starts as the reward model"),
    (
        "scorer",
        [{"term": "reward_model", "weight": 2}],
        "scorer has other terms or another weight; set it to",
    ),
    ("reward_model", True, "reward_model: unknown parameter"),
    ("runtime.functions", {"timeout_seconds": 0}, "runtime.functions.timeout_seconds: Input should be greater than 0"),
    ("report.samples", 0, "report.samples: Input should be greater than or equal to 1"),
    ("threads", 0, "threads: Input should be greater than or equal to 1"),
    ("seed", -1, "seed: Input should be greater than or equal to 0"),
    ("long_rows", "cut", "long_rows: Input should be 'refuse' or 'drop' (got 'cut')"),
    ("ingest.source", "csv", "ingest.source: Input should be 'demo', 'files' or 'huggingface'"),
    ("ingest.demo.domains", 10, "ingest.demo.domains: Input should be less than or equal to 9"),
    ("base.scratch.vocabulary", 100, "base.scratch.vocabulary: Input should be greater than or equal to 300"),
    # truncated sampling
    ("ppo.top_p", 0.9, "ppo: top_p is refused in rollouts"),
    (
        "ppo.precision",
        "bfloat16",
        "ppo: precision is no key of this block: it holds for all stages; remove it here, and",
    ),
    (
        "rloo.settings.precision",
        "bfloat16",
        "rloo.settings: precision is no key of this block: it holds for all stages",
    ),
    ("precision", "float16", "precision: Input should be 'float32' or 'bfloat16' (got 'float16')"),
    ("ppo.gradient_checkpointing", 0, "ppo.gradient_checkpointing: give false, true, or n (1 or more) for every n-th"),
    ("sft.gradient_checkpointing", "all", "sft.gradient_checkpointing: give false, true, or n (1 or more)"),
    ("ppo.top_k", 50, "ppo: top_k is refused in rollouts"),
    ("ppo.min_p", 0.1, "ppo: min_p is refused in rollouts"),
    ("ppo.repetition_penalty", 1.1, "ppo: repetition_penalty is refused in rollouts"),
    ("preferences.top_p", 0.9, "preferences.top_p: unknown parameter"),
    ("evaluate.top_p", 0.9, "evaluate.top_p: unknown parameter"),
    ("ppo.kl.estimator", "k3", "ppo.kl: estimator k3 in the reward moves the optimum"),
    # within a block
    ("base.pad_token", "<|end|>", "base: pad_token must differ from eos_token"),
    ("base.pad_token", "", "base: '' cannot be pad_token or eos_token"),
    ("base.eos_token", "e", "base: 'e' cannot be pad_token or eos_token"),
    ("base.pad_token", "<|user|>", "base: '<|user|>' cannot be pad_token or eos_token"),
    ("base.source", "pretrained", "the block base.pretrained is needed"),
    ("base.scratch.heads", 5, "hidden 32 must be heads"),
    ("base.scratch.heads", 32, "hidden 32 must be heads"),
    ("sft.micro_batch_size", 12, "sft: batch_size 16 must be a multiple of micro_batch_size 12"),
    ("sft.processes", 2, "sft: batch_size 16 must be a multiple of micro_batch_size 16 times processes 2"),
    ("sft.micro_batch_size", 32, "sft: batch_size 16 must be a multiple of micro_batch_size 32"),
    ("ppo.minibatches", 3, "ppo: batch_size 16 must be a multiple of minibatches 3"),
    ("ppo.kl", {"coef": 0.1, "controller": "adaptive", "target": 6.0, "horizon": 8}, "must not exceed kl.horizon 8"),
    ("ingest.split.ppo", 0.3, "demonstrations + preferences + ppo must be 1, they are 1.1"),
    ("ingest.split.heldout", 0.0, "ingest.split: heldout must be greater than 0"),
    ("ingest.split.validation", 0.0, "ingest.split: validation must be greater than 0"),
    ("ingest.demo", None, "the block ingest.demo is needed"),
    ("ingest.files", {"path": "../elsewhere"}, "ingest.files.path: must stay below data/raw/"),
    ("ingest.files", {"path": "/etc"}, "ingest.files.path: must stay below data/raw/"),
    ("ingest.huggingface", {"dataset": "a/b", "revision": "main"}, "revision must be a commit hash"),
    # across stages
    ("preferences.source", "dataset", "preferences.source is dataset, but the demo data have no pairs"),
    (
        "preferences.source",
        "ratings",
        "preferences.source: ratings and the name of their column in ingest.rating_column",
    ),
    (
        "ingest.rating_column",
        "label",
        "preferences.source: ratings and the name of their column in ingest.rating_column",
    ),
    (
        "judge",
        {"kind": "function"},
        "judge: kind: function needs a file below rewards/ in `function`, and only it does",
    ),
    ("judge", {"kind": "data", "function": "a.py"}, "judge: kind: function needs a file below rewards/"),
    ("judge", {"kind": "function", "function": "../a.py"}, "judge.function: must be the path of a Python file below"),
    ("judge", {"kind": "function", "function": "a.py", "model": "b"}, "judge: kind: function has no `model`"),
    ("ingest.opening_words", 0, "ingest.opening_words: Input should be greater than or equal to 1"),
    ("base.format", "plain", "base.format: Input should be 'chat' or 'text'"),
    ("preferences.source", "both", "preferences.source is both, but the demo data have no pairs"),
    ("ingest.labels", "people.jsonl", "preferences.source is judge, so the labels of ingest.labels would not be used"),
    ("ingest.labels", "/etc", "ingest.labels: must stay below data/raw/"),
    ("ingest", FILES_SOURCE, "preferences.source is judge, but only the demo data have a judge"),
    ("ingest.demo.prompts", 5761, "ingest.demo.prompts is 5761, but 2 domains and 4 needs have 5760 distinct prompts"),
    ("sft.max_tokens", 97, "sft.max_tokens is 97 tokens, longer than base.scratch.context 96"),
    ("reward.max_tokens", 97, "reward.max_tokens is 97 tokens, longer than base.scratch.context 96"),
    ("reward.max_tokens", 8, "reward.max_tokens is 8: a prompt and the "),
    ("preferences.max_new_tokens", 96, "preferences.max_new_tokens is 96: it leaves a prompt no room"),
    ("ppo.max_new_tokens", 96, "ppo.max_new_tokens is 96: it leaves a prompt no room"),
    ("ppo.stop_tokens", ["."], "preferences.stop_tokens is [], but ppo.stop_tokens is ['.']"),
    ("evaluate.stop_tokens", ["."], "evaluate.stop_tokens is ['.'], but ppo.stop_tokens is []"),
    ("evaluate.max_new_tokens", 96, "evaluate.max_new_tokens is 96: it leaves a prompt no room"),
]


@pytest.mark.parametrize(("name", "value", "says"), REFUSED, ids=lambda part: str(part)[:30])
def test_refused_in_one_line_that_names_the_key(content: Content, name: str, value: Any, says: str) -> None:
    if name == "ingest":
        value = content["ingest"] | value
    with pytest.raises(UserError) as refusal:
        parse(Params, put(content, name, value))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("params.yaml: ")


def test_the_same_stop_tokens_in_all_stages_are_valid(content: Content) -> None:
    """In any order."""
    for name, value in {
        "preferences": [".", "!"],
        "ppo": ["!", "."],
        "evaluate": [".", "!"],
        "rejection_sft": ["!", "."],
    }.items():
        put(content, f"{name}.stop_tokens", value)
    assert parse(Params, content).ppo.stop_tokens == ["!", "."]


@pytest.mark.parametrize("source", ["dataset", "both"])
def test_labels_give_the_demo_data_pairs(content: Content, source: str) -> None:
    put(content, "ingest.labels", "people.jsonl")
    put(content, "preferences.source", source)
    assert parse(Params, content).ingest.labels == "people.jsonl"


def rated(content: Content) -> Content:
    content["ingest"] |= FILES_SOURCE | {"rating_column": "label"}
    put(content, "preferences.source", "ratings")
    return put(content, "dpo.enabled", False)


def test_ratings_need_data_of_the_user_and_make_no_pairs(content: Content) -> None:
    assert parse(Params, rated(content)).preferences.source == "ratings"
    assert why_switched_off(content, "preferences")
    assert not why_switched_off(content, "reward")
    for name, value, says in (
        (
            "ipo.enabled",
            True,
            r"ipo trains on pairs of answers to the same prompt, .* set ipo\.enabled: false, or base\.format: text",
        ),
        ("ingest.labels", "people.jsonl", r"without ingest\.labels"),
        ("reward.max_pairs", 100, r"reward\.max_pairs counts pairs, and preferences\.source is ratings"),
        ("ingest.source", "demo", r"of your own data"),
    ):
        *above, last = name.split(".")
        before = content[above[0]].get(last)
        with pytest.raises(UserError, match=says):
            parse(Params, put(content, name, value))
        put(content, name, before)
    put(content, "base.format", "text")
    put(content, "ipo.max_tokens", 64)
    assert parse(Params, put(content, "ipo.enabled", True)).ipo.enabled, "whole texts are answers to the empty text"


def test_a_function_judges_and_labels_no_pairs(content: Content) -> None:
    put(content, "judge", {"kind": "function", "function": "a/words.py"})
    assert parse(Params, content).judge.function == "a/words.py"
    with pytest.raises(UserError, match=r"preferences\.source is model, but judge\.kind is function"):
        parse(Params, put(content, "preferences.source", "model"))


def test_a_judge_is_no_term_that_ppo_maximises(content: Content) -> None:
    put(content, "judge", {"kind": "function", "function": "words.py"})
    put(content, "ppo.critic.init", "sft")
    scorer = [{"term": "reward_model", "weight": 1}, {"term": "words.py", "weight": 0}]
    assert parse(Params, put(content, "scorer", scorer)).judge.kind == "function", "it is only logged"
    scorer[1]["weight"] = -0.1
    with pytest.raises(
        UserError, match=r"judge\.function is words\.py, a term of scorer: a judge must not be what PPO"
    ):
        parse(Params, content)
    put(content, "judge", {"kind": "reward_model", "model": "rm"})
    put(content, "dpo", {"enabled": False})
    assert parse(Params, put(content, "scorer", [{"model": "other", "weight": 1}])).judge.model == "rm"
    with pytest.raises(UserError, match=r"judge\.model is rm, a term of scorer: .*Name another folder"):
        parse(Params, put(content, "scorer", [{"model": "rm", "weight": 1}]))


def test_a_term_is_a_reward_model_a_function_or_a_model_from_elsewhere(content: Content) -> None:
    put(content, "ppo.critic.init", "sft")
    put(content, "dpo", {"enabled": False})
    scorer = [{"model": "rm", "weight": 1.0, "precision": "bfloat16"}, {"term": "words.py", "weight": 0.5}]
    terms = parse(Params, put(content, "scorer", scorer)).scorer
    assert [term.name for term in terms] == ["rm", "words.py"]
    assert (uses_reward_model(terms), is_reward_model(terms), functions(terms)) == (False, False, ["words.py"])
    for term, says in (
        ({"weight": 1.0}, "needs either term or model"),
        ({"term": "words.py", "model": "rm", "weight": 1.0}, "needs either term or model"),
        ({"model": "reward_model", "weight": 1.0}, "is the name of another score; rename the folder"),
        ({"model": "a/b", "weight": 1.0}, "must be the name of a folder"),
        ({"term": "words.py", "label": "GOOD", "weight": 1.0}, "label, reads and precision are for a model below"),
        ({"model": "rm", "reads": "all", "weight": 1.0}, "Input should be 'answer' or 'pair'"),
    ):
        with pytest.raises(UserError, match=says):
            parse(Params, put(content, "scorer", [term]))
    with pytest.raises(UserError, match="the term rm occurs twice"):
        parse(Params, put(content, "scorer", [scorer[0], scorer[0] | {"label": "GOOD"}]))


def test_a_reward_model_that_judges_is_named_and_scores_single_answers(content: Content) -> None:
    put(content, "judge", {"kind": "reward_model", "model": "rm", "label": "GOOD", "reads": "pair"})
    put(content, "select.rule", "best_judge")
    assert parse(Params, content).judge.label == "GOOD"
    for judge, says in (
        ({"kind": "reward_model"}, "kind: reward_model needs the name of a folder below models/judges/"),
        ({"kind": "reward_model", "model": "rm", "question": "a.txt"}, "without a `question`; remove it"),
        ({"kind": "model", "model": "rm", "label": "GOOD"}, "label, reads and precision are for kind: reward_model"),
    ):
        with pytest.raises(UserError, match=says):
            parse(Params, put(content, "judge", judge))


def test_a_critic_does_not_start_from_a_reward_model_with_other_tokens(content: Content) -> None:
    put(content, "reward.base", "other")
    put(content, "ppo.critic.init", "reward")
    with pytest.raises(UserError, match=r"ppo\.critic\.init is reward: .* reward\.base reads others; set it to sft"):
        parse(Params, content)
    assert parse(Params, put(content, "ppo.critic.init", "sft")).reward.base == "other"
    put(content, "reward.max_tokens", 5000)
    assert parse(Params, content).reward.max_tokens == 5000, "in a context of its own"


def test_the_limits_themselves_are_valid(content: Content) -> None:
    for name, value in {"ingest.demo.prompts": 5760, "sft.max_tokens": 96, "ppo.max_new_tokens": 95}.items():
        put(content, name, value)
    for name, value in {"ppo.learning_rate": 1, "ppo.kl.coef": 0, "base.pad_token": "[PAD]"}.items():
        put(content, name, value)
    assert parse(Params, content).ppo.learning_rate == 1.0


def test_all_mistakes_are_named_at_once(content: Content) -> None:
    del content["report"]
    put(content, "ppo.steps", 0)
    put(content, "sft.epochz", 1)
    with pytest.raises(UserError) as refusal:
        parse(Params, content)
    lines = str(refusal.value).splitlines()
    for part in ("report: missing parameter", "ppo.steps: ", "sft.epochz: unknown parameter; did you mean epochs?"):
        assert len([line for line in lines if part in line]) == 1
    assert len(lines) == 3


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Content]:
    def write(text: str) -> Content:
        (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
        return read_yaml(tmp_path / "params.yaml")

    return write


def test_yaml_is_read_as_yaml_1_2(written: Callable[[str], Content]) -> None:
    read = written("a: 1e-4\nb: off\nc: yes\nd: 010\nf: 12:30\ng: on\n")
    assert read["a"] == 0.0001
    assert (read["b"], read["c"], read["g"]) == ("off", "yes", "on")
    assert read["d"] == 10
    assert read["f"] == "12:30"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 1\nseed: 2\n", "no valid YAML"),
        ("a: [1\n", "no valid YAML"),
        ("a:\n\t- 1\n", "no valid YAML"),
        ("", "expected a mapping"),
        ("- 1\n", "expected a mapping"),
        ("!!python/object/apply:os.system [ls]\n", "no valid YAML"),
    ],
)
def test_text_that_is_no_parameter_file(written: Callable[[str], Content], text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refusal:
        written(text)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_and_foreign_bytes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="file not found; copy one of examples"):
        read_yaml(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_bytes("seed: 1 # größe".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        read_yaml(tmp_path / "params.yaml")


def test_the_roles_that_no_token_may_be_are_those_of_the_chat_template() -> None:
    assert base.ROLES == ROLES


@pytest.mark.parametrize(
    ("name", "recipe", "expected"),
    [
        ("rloo", "published", ("rloo", 1, 1, False, "answer_sums", "reward", "k1")),
        ("reinforce", "published", ("reinforce", 1, 1, False, "answer_sums", "reward", "k1")),
        ("grpo", "published", ("grpo", 1, 1, False, "answer_means", "loss", "k3")),
        ("grpo", "dr_grpo", ("dr_grpo", 1, 1, False, "answer_sums", "loss", "k3")),
        ("grpo", "gdpo", ("gdpo", 1, 1, True, "answer_means", "loss", "k3")),
        ("rloo", "ppo_style", ("rloo", 3, 2, True, "tokens", "reward", "k1")),
    ],
)
def test_rule_12_a_method_is_the_published_one_unless_its_recipe_says_otherwise(
    name: str, recipe: Recipe, expected: tuple[object, ...]
) -> None:
    ppo = PPOConfig.model_validate(read_yaml(ROOT / "params.yaml")["ppo"] | {"ppo_epochs": 3, "minibatches": 2})
    found = VariantParams(enabled=True, recipe=recipe, settings={"samples_per_prompt": 4}).applied_to(ppo, name)
    shown = (found.advantage, found.ppo_epochs, found.minibatches, found.whiten_advantages, found.loss_average)
    assert (*shown, found.kl.penalty, found.kl.estimator) == expected


def test_a_published_method_takes_no_option_of_ppos_update() -> None:
    options = {"dual_clip": 3.0, "importance_cap": 2.0, "stop_kl": 0.02, "ptx": {"coef": 0.1}, "clip_ratio_high": 0.3}
    ppo = PPOConfig.model_validate(read_yaml(ROOT / "params.yaml")["ppo"] | options)
    for recipe in ("published", "ppo_style"):
        found = VariantParams(enabled=True, recipe=recipe, settings={"samples_per_prompt": 4}).applied_to(ppo, "rloo")
        shown = (found.dual_clip, found.importance_cap, found.stop_kl, found.ptx.coef, found.clip_ratio_high)
        assert shown == ((None, None, None, 0.0, None) if recipe == "published" else (3.0, 2.0, 0.02, 0.1, 0.3))


def test_a_method_without_a_critic_takes_nothing_of_ppos_critic() -> None:
    values = read_yaml(ROOT / "params.yaml")["ppo"]
    ppo = PPOConfig.model_validate(values | {"critic": values["critic"] | {"warmup_steps": 3, "init": "sft"}})
    for recipe in ("published", "ppo_style"):
        found = VariantParams(enabled=True, recipe=recipe, settings={"samples_per_prompt": 4}).applied_to(ppo, "rloo")
        assert found.critic.warmup_steps == 0
