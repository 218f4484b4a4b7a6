"""The normalisation of scores: what it is measured on, and where it is kept."""

import math
from collections.abc import Callable
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

from rlhf_core.config.ppo import ScoreConfig
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.errors import NonFiniteError, UserError
from rlhf_core.models.batch import pad_batch, response_logits
from rlhf_core.ppo.scoring import REFERENCE_ANSWERS, ReferenceScores, ScoreNormalisation, reference_scores
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.training.processes import Processes

MakeTrainer = Callable[..., PPOTrainer]
MANY_ROWS = {"sampler_rows": 128}
"""Fewer calls of the model than with PPO's batches of 8; in float32 the answers are the same."""


def measured(trainer: PPOTrainer, seed: int = 5, seen: list[Answers] | None = None, **options: Any) -> ReferenceScores:
    """`seen` receives the answers of each call of the scorer."""
    reference = trainer.models.reference
    assert reference is not None
    score = trainer.scoring.source.scorer

    def scorer(answers: Answers) -> Scored:
        if seen is not None:
            seen.append(answers)
        return score(answers)

    config = trainer.config.model_copy(update=MANY_ROWS)
    return reference_scores(config, reference, trainer.tokenizer, scorer, trainer.prompts, seed, **options)


def test_rule_12_scores_are_normalised_on_answers_of_the_reference(make_trainer: MakeTrainer) -> None:
    """Five hundred answers to the prompts of PPO, each prompt as often as any other or once more; a function of the
    seed."""
    trainer = make_trainer()
    seen: list[Answers] = []
    found = measured(trainer, seen=seen)
    assert len(found.scores) == REFERENCE_ANSWERS
    counts = [sum(list(answers.prompts).count(prompt) for answers in seen) for prompt in trainer.prompts]
    assert sum(counts) == REFERENCE_ANSWERS
    assert max(counts) - min(counts) <= 1
    assert found.normalisation == ScoreNormalisation(fmean(found.scores), pstdev(found.scores))
    assert measured(trainer).scores == found.scores
    assert measured(trainer, seed=6).scores != found.scores


def test_rule_12_the_answers_of_the_reference_to_one_prompt_are_different(make_trainer: MakeTrainer) -> None:
    """About 51 to each of ten prompts."""
    seen: list[Answers] = []
    measured(make_trainer(), seen=seen)
    found: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for answers in seen:
        for prompt, response in zip(answers.prompt_ids, answers.response_ids, strict=True):
            found.setdefault(tuple(prompt), set()).add(tuple(response))
    assert len(found) == 10
    assert min(map(len, found.values())) > 20


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_rule_12_the_answers_are_sampled_at_the_temperature_of_ppo(
    make_trainer: MakeTrainer, temperature: float
) -> None:
    """The mean log-probability of a sampled token is minus the entropy of softmax(logits / temperature)."""
    trainer = make_trainer(temperature=temperature)
    seen: list[Answers] = []
    measured(trainer, seen=seen)
    prompt_ids = [ids for answers in seen for ids in answers.prompt_ids]
    response_ids = [ids for answers in seen for ids in answers.response_ids]
    batch = pad_batch(prompt_ids, response_ids, trainer.pad_id)
    with torch.no_grad():
        logprobs = (response_logits(trainer.models.reference, batch) / temperature).log_softmax(dim=-1)
    sampled = logprobs.gather(1, batch.response_tokens[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    error = (sampled + entropy).std() / math.sqrt(len(sampled))
    assert abs((sampled + entropy).mean()) < 4 * error


def test_a_score_that_is_no_number_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(NonFiniteError, match="128 of 128 answers with nan"):
        measured(make_trainer(scorer=lambda answers: [math.nan] * len(answers.texts)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"normalise": True}, (0.5, -3.0)),
        ({"normalise": False}, (1.0, 0.0)),
    ],
    ids=["normalised", "raw"],
)
def test_rule_20_the_unit_of_the_score(config: dict[str, bool], expected: tuple[float, float]) -> None:
    score = ScoreConfig(**{"clip": 5.0, "missing_eos_penalty": 1.0, **config})
    assert ScoreNormalisation(6.0, 2.0).unit(score) == expected


def test_a_constant_score_is_only_centred() -> None:
    score = ScoreConfig(normalise=True, clip=5.0, missing_eos_penalty=1.0)
    assert ScoreNormalisation(6.0, 0.0).unit(score) == (1.0, -6.0)


def test_figures_of_the_reference() -> None:
    """Correlations with length and judge; None where one side does not vary."""
    assert ReferenceScores([1.0, 2.0, 3.0], [1, 2, 3], [True] * 3, [-1.0, -2.0, -3.0]).figures == {
        "score_mean": 2.0,
        "score_std": pytest.approx(math.sqrt(2 / 3)),
        "length_correlation": pytest.approx(1.0),
        "gold_correlation": pytest.approx(-1.0),
    }
    constant = ReferenceScores([1.0, 1.0, 1.0], [1, 2, 3], [True] * 3, None).figures
    assert (constant["length_correlation"], constant["gold_correlation"]) == (None, None)


def test_rule_19_the_normalisation_is_part_of_the_checkpoint(make_trainer: MakeTrainer) -> None:
    first, second = make_trainer(normalisation=(2.0, 0.25)), make_trainer()
    second.load_state_dict(first.state_dict())
    assert second.scoring.source.normalisation == ScoreNormalisation(2.0, 0.25)


def test_an_error_of_the_scorer_in_one_process_ends_all_of_them(make_trainer: MakeTrainer) -> None:
    """It travels as a value, so that no process waits for one that has left."""

    def refuse(answers: Answers) -> list[float]:
        raise UserError(f"no score for {len(answers.texts)} answers")

    trainer = make_trainer()
    rollout = trainer.rollout()
    trainer.scoring.source.scorer = lambda answers: Scored(refuse(answers))
    gathered: list[object] = []

    class Noted(Processes):
        def map(self, items, work):  # type: ignore[no-untyped-def]
            gathered.extend(work(list(items)))
            return gathered

    with pytest.raises(UserError, match="no score for"):
        trainer.scoring(rollout, Noted())
    assert len(gathered) == len(rollout.texts), "the share of this process was gathered before the error was raised"


def test_scores_have_the_rows_behind_their_prompts(make_trainer: MakeTrainer) -> None:
    """In a rollout, on the reference's answers and on held-out ones."""
    seen: list[tuple[object, object]] = []

    def scorer(answers: Answers) -> list[float]:
        assert answers.rows is not None
        seen.extend(zip(answers.prompts, answers.rows, strict=True))
        return [1.0] * len(answers.texts)

    trainer = make_trainer(scorer=scorer)
    trainer.rows = [{"prompt": prompt} for prompt in trainer.prompts]
    trainer.step()
    reference = trainer.models.reference
    assert reference is not None
    source = trainer.scoring.source
    config = trainer.config.model_copy(update=MANY_ROWS)
    reference_scores(config, reference, trainer.tokenizer, source.scorer, trainer.prompts, 5, rows=trainer.rows)
    trainer.answer(trainer.prompts[:2], trainer.rows[:2])
    assert len(seen) == trainer.config.batch_size + REFERENCE_ANSWERS + 2
    assert all(row == {"prompt": prompt} for prompt, row in seen)


def test_rule_12_the_reference_answers_in_the_precision_of_the_policy(make_trainer: MakeTrainer) -> None:
    """Its products are those of the policy that PPO samples from."""
    trainer = make_trainer(precision="bfloat16")
    read: list[torch.dtype] = []
    layer = next(each for each in trainer.models.reference.base_model.modules() if isinstance(each, torch.nn.Linear))
    layer.register_forward_hook(lambda _module, _input, output: read.append(output.dtype))
    measured(trainer, precision="bfloat16")
    assert set(read) == {torch.bfloat16}
