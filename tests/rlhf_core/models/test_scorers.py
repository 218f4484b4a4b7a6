"""`scorers.py`: the reward model reads the ids that were sampled, in any order and batch; terms are weighted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from rlhf_core.data.scorer import Answers, Observed, Scored, Scorer, WeightedSum
from rlhf_core.errors import UserError
from rlhf_core.functions.process import RewardFunction
from rlhf_core.models.batch import pad_batch, sequence_scores
from rlhf_core.models.scorers import RewardModelScorer

Build = Callable[..., PreTrainedModel]
PAD, END = 0, 1
PROMPTS = [[3, 9, 4], [3, 8, 7, 6, 4], [3, 4], [3, 5, 6, 4]]
RESPONSES = [[20, 21, 22, 23, END], [30, PAD], [40, 41, 42], [50]]
COMPLETE = [[20, 21, 22, 23, END], [30, PAD, END], [40, 41, 42, END], [50, END]]


def answers(texts: str = "text") -> Answers:
    return Answers([[] for _ in PROMPTS], [texts] * len(PROMPTS), PROMPTS, RESPONSES)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 10])
def test_scores_come_back_in_order_whatever_the_batch(kind: str, build_scalar: Build, batch_size: int) -> None:
    model = build_scalar(kind)
    scorer: Scorer = RewardModelScorer(model, PAD, END, batch_size)
    alone = [sequence_scores(model, pad_batch([p], [r], PAD)).item() for p, r in zip(PROMPTS, COMPLETE, strict=True)]
    assert scorer(answers()).total == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 3) for score in alone}) == len(alone)


def test_rule_02_nothing_is_tokenised_again(build_scalar: Build) -> None:
    scorer = RewardModelScorer(build_scalar(), PAD, END, 2)
    assert scorer(answers("one")) == scorer(answers("another"))


def test_an_answer_that_was_cut_off_is_read_with_its_end(kind: str, build_scalar: Build) -> None:
    """A reward model means something where it was trained: at the end. Where the context is full, the last token gives
    way to it; answers that ended are read as they are."""
    model, prompt, cut = build_scalar(kind), [3, 4], [40, 41, 42]
    scorer, answered = RewardModelScorer(model, PAD, END, 4), [[*cut, END], [*cut[:2], END]]
    ended, shorter = sequence_scores(model, pad_batch([prompt] * 2, answered, PAD)).tolist()
    found = scorer(Answers([[]] * 2, [""] * 2, [prompt] * 2, [cut, answered[0]])).total
    assert found == pytest.approx([ended, ended], abs=1e-6)
    model.config.get_text_config().max_position_embeddings = 5
    found = scorer(Answers([[]], [""], [prompt], [cut])).total
    assert found[0] == pytest.approx(shorter, abs=1e-6) != pytest.approx(ended, abs=1e-3)
    with pytest.raises(UserError, match="a prompt with its answer has 7 of its tokens, and its context holds 5"):
        scorer(Answers([[]], [""], [prompt], [[*cut, 43]]))


def test_scoring_keeps_no_gradient(build_scalar: Build) -> None:
    model = build_scalar()
    RewardModelScorer(model, PAD, END, 2)(answers())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_sum_of_terms_weighs_each_and_keeps_them(tmp_path: Path) -> None:
    """Negative weights, and weight 0 for a term that is only logged."""
    (tmp_path / "mine.py").write_text("def score(prompts, responses, rows): return [row['n'] for row in rows]\n")
    function = RewardFunction(tmp_path, "mine.py", 20, 1024)
    of_length: Scorer = lambda answers: Scored([float(len(ids)) for ids in answers.response_ids])  # noqa: E731
    given = replace(answers(), rows=[{"n": 10}, {"n": 20}, {"n": 30}, {"n": 40}])
    found = WeightedSum({"length": (2.0, of_length), "mine.py": (-0.5, function), "other": (0.0, of_length)})(given)
    assert found.parts == {"length": [5, 2, 3, 1], "mine.py": [10, 20, 30, 40], "other": [5, 2, 3, 1]}
    assert found.total == [5.0, -6.0, -9.0, -18.0]
    assert found.by_answer()[1] == (-6.0, {"length": 2, "mine.py": 20, "other": 2})
    function.close()


def test_an_observer_changes_no_total() -> None:
    of_length: Scorer = lambda answers: Scored([float(len(ids)) for ids in answers.response_ids], {"std": [0.0] * 4})  # noqa: E731
    of_place: Scorer = lambda answers: Scored([1.0, 2.0, 3.0, 4.0])  # noqa: E731
    found = Observed(of_length, {"judge": of_place})(answers())
    assert found == Scored([5.0, 2.0, 3.0, 1.0], {"std": [0.0] * 4, "judge": [1.0, 2.0, 3.0, 4.0]})
    assert Observed(of_length, {})(answers()) == of_length(answers())


def test_answers_of_some_places_keep_their_rows() -> None:
    given = replace(answers(), rows=[{"n": place} for place in range(4)])
    assert given.at([3, 1]).rows == [{"n": 3}, {"n": 1}]
    assert answers().at([3, 1]).rows is None
