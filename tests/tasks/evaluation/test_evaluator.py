"""The evaluator: random numbers, ties, scores, and models that do not fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.base import ScratchConfig
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.data.tokenizer import train_bpe
from rlhf_core.errors import UserError
from rlhf_core.functions.process import RewardFunction
from rlhf_core.models.hf import build_llama
from tasks.evaluation.evaluator import CandidateModel, Evaluator, ScoredAnswers

WORDS = ["eat some oats and an egg", "what shall i eat for breakfast", "take tea and a fig"]


@pytest.fixture(scope="module")
def sft() -> CandidateModel:
    return candidate("sft", seed=1)


def candidate(name: str, seed: int, context: int = 64, words: Sequence[str] = WORDS) -> CandidateModel:
    tokenizer = train_bpe(list(words) * 3, 300, "<|pad|>", "<|end|>", context)
    size = ScratchConfig(vocabulary=300, context=context, layers=1, hidden=16, intermediate=16, heads=2)
    return CandidateModel(name, build_llama(size, tokenizer, seed).eval(), tokenizer)


class Stage:
    """Runs all batches at once, without a journal."""

    def resumed(self, name: str, batches: Any, work: Callable[[Any], list[Any]], **_: Any) -> list[Any]:
        return [value for batch in batches for value in work(batch)]


@dataclass(frozen=True)
class Own:
    """A scorer of tests."""

    score: Callable[[Answers], list[float]]
    name: str = "reward model"

    def __call__(self, answers: Answers) -> Scored:
        return Scored(self.score(answers))


lengths = Own(lambda answers: [float(len(ids)) for ids in answers.response_ids])
characters = Own(lambda answers: [float(len(text)) for text in answers.texts])


def evaluator(sft: CandidateModel, **changes: Any) -> Evaluator:
    rows = [{"prompt": [{"role": "user", "content": f"what shall i eat {i}"}]} for i in range(6)]
    settings: dict[str, Any] = {
        "stage": Stage(), "rows": rows, "reference": sft, "scorer": lengths, "judge": None, "pair_judge": None,
        "temperature": 1.0, "max_new_tokens": 8, "batch_size": 4, "stop_tokens": [],
    }  # fmt: skip
    return Evaluator(**settings | changes)


def test_candidates_sample_independently_unless_they_share_noise(sft: CandidateModel) -> None:
    """The same weights three times; under another name the answers differ."""
    twin = CandidateModel("twin", sft.model, sft.tokenizer)
    shared = CandidateModel("step-5", sft.model, sft.tokenizer, "sft")
    evaluation = evaluator(sft)
    first = evaluation.answer(sft, [1])[0]
    assert evaluation.answer(sft, [1])[0].responses == first.responses
    assert evaluation.answer(shared, [1])[0].responses == first.responses
    assert evaluation.answer(twin, [1])[0].responses != first.responses
    assert evaluation.answer(sft, [2])[0].responses != first.responses
    assert first.tokens == [len(response) for response in first.responses]


def test_seeds_answered_together_are_those_answered_alone(sft: CandidateModel) -> None:
    both = evaluator(sft, batch_size=5).answer(sft, [1, 2])
    alone = [evaluator(sft).answer(sft, [seed])[0] for seed in (1, 2)]
    assert [each.texts for each in both] == [each.texts for each in alone]
    assert [each.rewards for each in both] == [each.rewards for each in alone]
    for one, other in zip(both, alone, strict=True):
        assert one.divergence is not None
        assert other.divergence is not None
        assert one.divergence.log_ratio == pytest.approx(other.divergence.log_ratio, abs=1e-4)
        assert set(one.divergence.log_ratio) == {0.0}, "the SFT model is its own reference"


def test_an_answer_is_scored_once_whichever_model_gives_it(sft: CandidateModel) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def score(answers: Answers) -> list[float]:
        seen.extend((str(p), tuple(ids)) for p, ids in zip(answers.prompt_ids, answers.response_ids, strict=True))
        return lengths(answers).total

    evaluation = evaluator(sft, scorer=Own(score))
    first = evaluation.answer(sft, [1, 2])
    again = evaluation.answer(CandidateModel("copy", sft.model, sft.tokenizer, "sft"), [1, 2])
    assert [each.rewards for each in again] == [each.rewards for each in first]
    assert len(seen) == len(set(seen))


def test_evaluators_of_other_purposes_use_other_random_numbers(sft: CandidateModel) -> None:
    chosen, final = evaluator(sft, purpose="select ").answer(sft, [1])[0], evaluator(sft).answer(sft, [1])[0]
    assert chosen.responses != final.responses


def test_a_model_is_not_judged_against_itself(sft: CandidateModel) -> None:
    """A judge without methods is never called."""
    evaluation = evaluator(sft, pair_judge=object())
    scored = evaluation.answer(sft, [1])[0]
    assert evaluation.compare(scored, scored) == [0.5] * 6


def test_no_batch_size_changes_an_answer(sft: CandidateModel) -> None:
    assert (
        evaluator(sft, batch_size=1).answer(sft, [1])[0].texts == evaluator(sft, batch_size=6).answer(sft, [1])[0].texts
    )


def test_equal_answers_tie_despite_rounding_of_their_rewards() -> None:
    """One text with scores that differ in their last bits; a cut-off text is a different answer."""

    def scored(rewards: list[float], ended: bool = True) -> ScoredAnswers:
        return ScoredAnswers([[5]] * 3, [True, True, ended], ["same", "one", "cut"], rewards, None, [1] * 3, None)

    evaluation: Any = evaluator(candidate("sft", 1))
    other = ScoredAnswers([[5]] * 3, [True] * 3, ["same", "two", "cut"], [0.5, 0.5, 0.5], None, [1] * 3, None)
    assert evaluation.compare(scored([0.5 + 5e-7, 0.6, 0.6]), other) == [0.5, 1.0, 0.5]
    assert evaluation.compare(scored([0.5, 0.4, 0.6], ended=False), other) == [0.5, 0.0, 1.0]
    assert evaluation.judged_by == "reward model"


sums = Own(lambda answers: [float(sum(ids)) for ids in answers.response_ids])
opposite = Own(lambda answers: [-float(sum(ids)) for ids in answers.response_ids], "judging reward model")


def test_the_judging_reward_model_decides_where_nothing_else_judges(sft: CandidateModel) -> None:
    """It scores the opposite of PPO's: so are the wins."""
    evaluation = evaluator(sft, scorer=sums, judging=opposite)
    first, second = evaluation.answer(sft, [1, 2])
    assert first.judging == [-reward for reward in first.rewards]
    assert evaluation.compare(first, second) == evaluation.compare(first, second, "judging")
    by_ppo = evaluation.compare(first, second, "rewards")
    assert by_ppo == evaluator(sft, scorer=sums).compare(first, second)
    assert by_ppo == [1 - won for won in evaluation.compare(first, second)]
    assert len(set(by_ppo)) > 1
    assert (evaluation.judged_by, evaluation.winner_named_by) == ("judging reward model", "judging reward model")


def test_a_judge_of_the_data_or_of_pairs_comes_before_the_judging_reward_model(sft: CandidateModel) -> None:
    first_letters = Own(lambda answers: [float(place) for place in range(len(answers.texts))], "first letters")
    evaluation = evaluator(sft, scorer=sums, judging=opposite, judge=first_letters)
    first, second = evaluation.answer(sft, [1, 2])
    assert evaluation.compare(second, first) == [1.0] * 6, "the later answers have the higher gold score"
    assert (evaluation.judged_by, evaluation.winner_named_by) == ("scores", "first letters")
    compares = evaluator(sft, scorer=sums, judging=opposite, pair_judge=object())
    assert compares.judged_by == "pairs"
    by_ppo, by_judge = (evaluation.compare(second, first, by) for by in ("rewards", "judging"))
    assert by_ppo == [1 - won for won in by_judge] != [1.0] * 6, "both reward models can still compare"
    assert compares.compare(second, first, "rewards") == by_ppo, (
        "the judge of pairs, which has no method, is not called"
    )


def test_a_context_that_is_too_short_is_named(sft: CandidateModel) -> None:
    small = candidate("small", 2, context=16)
    with pytest.raises(UserError, match=r"small: a prompt with 8 new tokens is \d+ tokens long, .* holds 16"):
        evaluator(sft).answer(small, [1])[0]


def test_a_model_with_other_tokens_is_scored_on_its_text_and_has_no_kl(sft: CandidateModel) -> None:
    other = candidate("other", 3, words=["zebras zigzag", "quick quokkas"])
    found = evaluator(sft).answer(other, [1])[0]
    assert found.divergence is None
    assert max(found.tokens) > 8, "of other tokenizers whole answers are read"
    assert found.rewards == [float(tokens) for tokens in found.tokens], "read in the SFT model's tokens"


def test_a_function_judges_answers_with_the_columns_of_their_prompts(sft: CandidateModel, tmp_path: Path) -> None:
    text = (
        "def score(prompts, responses, rows):\n    return [row['most'] - len(r) for r, row in zip(responses, rows)]\n"
    )
    (tmp_path / "short.py").write_text(text, encoding="utf-8")
    judge = RewardFunction(tmp_path, "short.py", 20, 1024, key="judge.function")
    evaluation = evaluator(sft, judge=judge)
    for place, row in enumerate(evaluation.rows[:5]):
        row["extra"] = {"most": 10 * place}
    assert evaluation.totals(judge, [1, 0, 1], ["a", "ab", ""], [[1], [1], []]) == [9.0, -2.0, 10.0]
    assert (evaluation.judged_by, evaluation.winner_named_by) == ("scores", f"{tmp_path.name}/short.py")
    with pytest.raises(UserError, match=r"judge\.function: short\.py: answer 1 of 1, .* KeyError: 'most'"):
        evaluation.totals(judge, [5], ["a"], [[1]])
    judge.close()


def test_texts_that_are_cut_to_the_same_tokens_have_their_own_scores(sft: CandidateModel) -> None:
    """Answers of another tokenizer are cut where they exceed a context; a function reads the text."""
    found = evaluator(sft).scores(characters, [0, 0, 0], ["one", "three", "one"], [[5, 6]] * 3)
    assert found.total == [3.0, 5.0, 3.0]
