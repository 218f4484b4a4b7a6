"""One set of ends (rule 26): a model with two eos tokens, or a run with a stop token, stops at both wherever Leash
samples, and the reward model and what is trained read one of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.inspect.dialogue import load_chat_model
from rlhf_core.models.hf import load_causal_lm, load_scalar_model
from rlhf_core.models.sampling import Sampled
from rlhf_core.ppo import engines, scoring
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation, reference_scores
from rlhf_core.ppo.trainer import PPOTrainer
from tasks import rejection_sft
from tasks.evaluate import BEST_OF_N, best_of_n
from tasks.evaluation import evaluator
from tasks.evaluation.evaluator import Evaluator, load_candidate
from tasks.judging import preference_pairs
from tasks.params.preferences import AnnotatorParams, PreferencesParams
from tasks.select import save_policy
from tasks.training import candidates
from tasks.training.pairs import response_tokens
from tests.tasks.conftest import TINY
from tests.tasks.training.test_candidates import REJECTION, REJECTION_OUTS

EOS, STOP, ROLE, TEXT = 1, 2, 3, 7
MakeStage = Callable[..., Any]
Rows = list[dict[str, Any]]


@pytest.fixture(params=[ROLE, TEXT, STOP], ids=["a control token", "a text that a stage saved", "a stop token"])
def end(request: pytest.FixtureRequest, workshop: Path) -> int:
    """The second eos of models/sft, or `stop_tokens` of the run."""
    if request.param == STOP:
        return STOP
    place = workshop / "models/sft/generation_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"eos_token_id": [EOS, request.param]}))
    return int(request.param)


@pytest.fixture
def stops(end: int) -> list[str]:
    return ["<|system|>"] if end == STOP else []


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


class Seen:
    """A scorer that keeps the token ids which it is given."""

    name = "seen"

    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def __call__(self, answers: Answers) -> Scored:
        self.ids.extend(map(list, answers.response_ids))
        return Scored([0.0] * len(answers.texts))


def of_trainer(
    root: Path, stops: list[str], make_stage: MakeStage, asked: Rows, patch: pytest.MonkeyPatch
) -> list[list[int]]:
    """What the scorer reads; PPO trains on what was sampled."""
    config, scorer = PPOConfig(**TINY.tiny_ppo_values(stop_tokens=stops)), Seen()
    sft = [load_causal_lm(root / "models/sft") for _ in range(2)]
    models = ActorCritic(config, sft[0], sft[1], load_scalar_model(root / "models/reward"), seed=1)
    source = RewardSource(scorer, ScoreNormalisation(0.0, 1.0))
    trainer = PPOTrainer(config, models, TINY.tiny_tokenizer(), source, TINY.tiny_prompts(), seed=1)
    rollout = trainer.rollout()
    assert set(rollout.texts) == {load_tokenizer(root / "models/sft").decode([20])}
    assert rollout.ended.all()
    assert {ids[-1] for ids in rollout.response_ids} == trainer.stop_ids - {EOS}
    trainer.scoring(rollout, trainer.processes)
    trainer.answer(TINY.tiny_prompts())
    return scorer.ids


def of_reference(
    root: Path, stops: list[str], make_stage: MakeStage, asked: Rows, patch: pytest.MonkeyPatch
) -> list[list[int]]:
    config, scorer = PPOConfig(**TINY.tiny_ppo_values(stop_tokens=stops)), Seen()
    sft = load_causal_lm(root / "models/sft")
    reference_scores(config, sft, TINY.tiny_tokenizer(), scorer, TINY.tiny_prompts(), seed=1)
    return scorer.ids


def of_preferences(
    root: Path, stops: list[str], make_stage: MakeStage, asked: Rows, patch: pytest.MonkeyPatch
) -> list[list[int]]:
    params = PreferencesParams(
        source="judge",
        samples_per_prompt=2,
        max_new_tokens=6,
        batch_size=8,
        stop_tokens=stops,
        annotators=AnnotatorParams(temperature=0, flip_rate=0),
    )
    rows = {preference_pairs.PROMPTS: [row | {"split": "train"} for row in asked]}
    stage = make_stage("preferences", params, [], rows, blocks={"round": {}})
    samples, _ = preference_pairs.draw_samples(stage)
    assert all(row["ended"] for row in samples)
    sides = [{"chosen": row["response"], "chosen_ids": row["response_ids"], "chosen_ended": True} for row in samples]
    tokenizer = TINY.tiny_tokenizer()
    return [response_tokens(tokenizer, row, "chosen", how, 9) for row in sides for how in ("sampled", "complete")]


def of_candidates(
    root: Path, stops: list[str], make_stage: MakeStage, asked: Rows, patch: pytest.MonkeyPatch
) -> list[list[int]]:
    """What the scorer reads of the answers from which best-of-n and rejection sampling choose; their log-probabilities
    are those of the tokens that were sampled."""
    scorer = Seen()
    patch.setattr(candidates, "scorer_of", lambda *_: scorer)
    settings = REJECTION.model_copy(update={"stop_tokens": stops})
    stage = make_stage("rejection_sft", settings, [], {rejection_sft.PROMPTS: asked})
    kept = [(row, [3, 9, 4]) for row in asked]
    model, tokenizer = load_causal_lm(root / "models/sft"), TINY.tiny_tokenizer()
    groups = candidates.draw_candidates(stage, model, tokenizer, kept, 2, settings, lambda *place: place)
    assert all(each.ended and each.response[-1] != EOS for group in groups for each in group)
    return scorer.ids


def of_rejection(
    root: Path, stops: list[str], make_stage: MakeStage, asked: Rows, patch: pytest.MonkeyPatch
) -> list[list[int]]:
    """What rejection sampling trains on."""
    learned: list[list[int]] = []

    def learn(model: object, training: Sequence[Any], validation: Sequence[Any], *_: object) -> None:
        learned.extend(one.response for one in (*training, *validation))
        raise StopIteration

    patch.setattr(candidates, "scorer_of", lambda *_: Seen())
    patch.setattr(rejection_sft, "fine_tune", learn)
    settings = REJECTION.model_copy(update={"stop_tokens": stops})
    with pytest.raises(StopIteration):
        rejection_sft.execute(make_stage("rejection_sft", settings, REJECTION_OUTS, {rejection_sft.PROMPTS: asked}))
    return learned


def of_best_of_n(
    root: Path, stops: list[str], make_stage: MakeStage, asked: Rows, patch: pytest.MonkeyPatch
) -> list[list[int]]:
    """What judges read of the answers of best-of-n in the stage `evaluate`; the optimum has the sampled tokens."""
    row = {"prompt_id": "a", "response": "", "response_ids": [20, STOP], "ended": True, "tokens": 2, "reward": 0.0}
    stage = make_stage("evaluate", None, [], {BEST_OF_N: [row, row]}, blocks={"best_of_n": {"enabled": True, "n": [1]}})
    seen = list[list[int]]()
    tokenizer = SimpleNamespace(eos_token_id=EOS)
    evaluation: Any = SimpleNamespace(
        rows=[{"prompt_id": "a"}], reference=SimpleNamespace(tokenizer=tokenizer), judge=None, judging=None,
        totals=lambda scorer, places, texts, ids: seen.extend(ids),
    )  # fmt: skip
    [found] = best_of_n(stage, evaluation).values()
    assert [column.responses for column in found.columns] == [[[20, STOP]]] * 2
    return seen


def of_evaluator(
    root: Path, stops: list[str], make_stage: MakeStage, asked: Rows, patch: pytest.MonkeyPatch
) -> list[list[int]]:
    """What the scorer reads in the stages `evaluate` and `select`."""
    stage = make_stage("select", None, [])
    sft = load_candidate(stage, "sft", root / "models/sft")
    scorer = Seen()
    Evaluator(stage, asked, sft, scorer, None, None, temperature=1.0, max_new_tokens=6, batch_size=8,
              stop_tokens=stops).answer(sft, [1])  # fmt: skip
    return scorer.ids


@pytest.mark.parametrize(
    "sampled",
    [of_trainer, of_reference, of_preferences, of_candidates, of_rejection, of_best_of_n, of_evaluator],
    ids=["trainer", "reference", "preferences", "candidates", "rejection", "best of n", "evaluator"],
)
def test_rule_26_every_eos_of_the_model_ends_an_answer(
    sampled: Callable[..., list[list[int]]],
    stops: list[str],
    workshop: Path,
    make_stage: MakeStage,
    asked: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scorers, and models that learn from pairs, read the tokenizer's eos in its place."""
    assert {tuple(ids) for ids in sampled(workshop, stops, make_stage, asked, monkeypatch)} == {(20, EOS)}


def test_rule_26_chat_stops_where_the_stages_stop(end: int, workshop: Path) -> None:
    """A stop token is in the folder that a stage saves."""
    assert load_chat_model(workshop / "models/sft", "sft").stop_ids == {EOS, end} - {STOP}


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
    assert saved.eos_token_id == [EOS, *sorted({STOP, end})]
