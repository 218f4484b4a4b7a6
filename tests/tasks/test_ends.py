"""One set of ends (rule 26): a model with two eos tokens stops at both wherever Leash samples from it, and the reward
model and what is trained read one of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.data.tokenizer import encode_response, load_tokenizer
from rlhf_core.inspect.dialogue import load_chat_model
from rlhf_core.models.hf import load_causal_lm, load_scalar_model
from rlhf_core.models.sampling import Sampled
from rlhf_core.models.scorers import RewardModelScorer
from rlhf_core.ppo import engines, scoring
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation, reference_scores
from rlhf_core.ppo.trainer import PPOTrainer
from tasks import rejection_sft
from tasks.evaluation import evaluator
from tasks.evaluation.evaluator import Evaluator, load_candidate
from tasks.judging import preference_pairs
from tasks.params.preferences import AnnotatorParams, PreferencesParams
from tasks.params.runtime import FunctionParams
from tasks.params.scorer import REWARD_MODEL, Term
from tasks.select import save_policy
from tasks.training import candidates
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import build_scorer
from tests.tasks.conftest import TINY
from tests.tasks.training.test_candidates import REJECTION

EOS, ROLE, TEXT = 1, 3, 7
MakeStage = Callable[..., Any]
Rows = list[dict[str, Any]]


@pytest.fixture(params=[ROLE, TEXT], ids=["a control token", "a text that a stage saved"])
def end(request: pytest.FixtureRequest, workshop: Path) -> int:
    """The second eos of models/sft."""
    place = workshop / "models/sft/generation_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"eos_token_id": [EOS, request.param]}))
    return int(request.param)


@pytest.fixture(autouse=True)
def _sampler(end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sampling gives two tokens, the second end, and more where that ends nothing."""

    def sample(
        model: object, prompts: Sequence[object], keys: object, *, stop_ids: frozenset[int], **_: Any
    ) -> Sampled:
        ids = [20, end] if end in stop_ids else [20, end, 21, EOS]
        rows = range(len(prompts))
        return Sampled([list(ids) for _ in rows], [[-1.0] * len(ids) for _ in rows], [True for _ in rows])

    for module in (engines, scoring, evaluator, candidates, preference_pairs):
        monkeypatch.setattr(module, "sample", sample)


def of_trainer(root: Path, make_stage: MakeStage, asked: Rows) -> list[list[int]]:
    trainer = ppo(root)
    rollout = trainer.rollout()
    assert set(rollout.texts) == {load_tokenizer(root / "models/sft").decode([20])}
    assert rollout.ended.all()
    return rollout.response_ids


def ppo(root: Path) -> PPOTrainer:
    config = PPOConfig(**TINY.tiny_ppo_values())
    sft = [load_causal_lm(root / "models/sft") for _ in range(2)]
    models = ActorCritic(config, sft[0], sft[1], load_scalar_model(root / "models/reward"), seed=1)
    source = RewardSource(lambda answers: Scored([0.0] * len(answers.texts)), ScoreNormalisation(0.0, 1.0))
    return PPOTrainer(config, models, TINY.tiny_tokenizer(), source, TINY.tiny_prompts(), seed=1)


def of_reference(root: Path, make_stage: MakeStage, asked: Rows) -> list[list[int]]:
    config, seen = PPOConfig(**TINY.tiny_ppo_values()), list[list[int]]()

    def scorer(answers: Answers) -> Scored:
        seen.extend(map(list, answers.response_ids))
        return Scored([0.0] * len(answers.texts))

    sft = load_causal_lm(root / "models/sft")
    reference_scores(config, sft, TINY.tiny_tokenizer(), scorer, TINY.tiny_prompts(), seed=1)
    return seen


def of_preferences(root: Path, make_stage: MakeStage, asked: Rows) -> list[list[int]]:
    params = PreferencesParams(
        source="judge",
        samples_per_prompt=2,
        max_new_tokens=6,
        batch_size=8,
        annotators=AnnotatorParams(temperature=0, flip_rate=0),
    )
    rows = {preference_pairs.PROMPTS: [row | {"split": "train"} for row in asked]}
    stage = make_stage("preferences", params, [], rows, blocks={"round": {}})
    samples, _ = preference_pairs.draw_samples(stage)
    assert all(row["ended"] for row in samples)
    return [row["response_ids"] for row in samples]


def of_candidates(root: Path, make_stage: MakeStage, asked: Rows) -> list[list[int]]:
    """What rejection sampling trains on, and best-of-n chooses from."""
    stage = make_stage("rejection_sft", REJECTION, [], {rejection_sft.PROMPTS: asked})
    kept = [(row, [3, 9, 4]) for row in asked]
    model, tokenizer = load_causal_lm(root / "models/sft"), TINY.tiny_tokenizer()
    groups = candidates.draw_candidates(stage, model, tokenizer, kept, 2, REJECTION, lambda *place: place)
    assert all(each.ended for group in groups for each in group)
    return [each.response for group in groups for each in group]


def of_evaluator(root: Path, make_stage: MakeStage, asked: Rows) -> list[list[int]]:
    """Of the stages `evaluate` and `select`."""
    stage = make_stage("select", None, [])
    sft = load_candidate(stage, "sft", root / "models/sft")
    no_score = lambda answers: Scored([0.0] * len(answers.texts))  # noqa: E731
    found = Evaluator(stage, asked, sft, no_score, None, None, temperature=1.0, max_new_tokens=6, batch_size=8,
                      stop_tokens=[]).answer(sft, [1])[0]  # fmt: skip
    return found.responses


@pytest.mark.parametrize(
    ("sampled", "closes"),
    [(of_trainer, False), (of_reference, False), (of_preferences, True), (of_candidates, True), (of_evaluator, False)],
    ids=["trainer", "reference", "preferences", "candidates", "evaluator"],
)
def test_rule_26_every_eos_of_the_model_ends_an_answer(
    sampled: Callable[[Path, MakeStage, Rows], list[list[int]]],
    closes: bool,
    end: int,
    workshop: Path,
    make_stage: MakeStage,
    asked: Rows,
) -> None:
    """Answers that a model learns from close with the tokenizer's eos in place of another control token; what PPO
    rolls out stays as it was sampled."""
    found = sampled(workshop, make_stage, asked)
    assert {tuple(ids) for ids in found} == {(20, EOS if closes and end == ROLE else end)}


def test_rule_26_chat_stops_where_the_stages_stop(end: int, workshop: Path) -> None:
    assert load_chat_model(workshop / "models/sft", "sft").stop_ids == {EOS, end}


def test_rule_26_the_saved_policy_names_the_same_ends_the_tokenizers_first(
    end: int, workshop: Path, make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage("select", None, ["models/policy"])
    sft = load_candidate(stage, "sft", workshop / "models/sft")
    monkeypatch.setattr("tasks.select.exact_start", lambda stage: None)
    monkeypatch.setattr("tasks.select.snapshots.load", lambda *_: load_causal_lm(workshop / "models/sft"))
    config = PPOConfig(**TINY.tiny_ppo_values(stop_tokens=["<|system|>"]))
    save_policy(stage, config, sft, {"step": 1, "eta": 1.0})
    saved = GenerationConfig.from_pretrained(str(stage.out("models/policy")))
    assert saved.eos_token_id == [EOS, 2, end]


def test_rule_02_an_answer_scores_the_same_whichever_eos_closes_it(end: int, workshop: Path) -> None:
    """A text among the ends is a part of the answer for the reward model."""
    terms = [Term(term=REWARD_MODEL, weight=1.0)]
    scorer = build_scorer(workshop, terms, FunctionParams(), TINY.tiny_tokenizer(), 4, ScalarModels())
    text = encode_response(TINY.tiny_tokenizer(), "eat some oats")
    sampled = [*text[:-1], end]
    answers = Answers([[]] * 3, [""] * 3, [[3, 9, 4]] * 3, [text, sampled, [20, end, 21]])
    found = scorer(answers).total
    plain = RewardModelScorer(load_scalar_model(workshop / "models/reward"), 0, EOS, 4)(answers).total
    assert (found[0] == pytest.approx(found[1], abs=1e-6)) == (end == ROLE)
    assert (found[0], found[2]) == pytest.approx((plain[0], plain[2]), abs=1e-6)
