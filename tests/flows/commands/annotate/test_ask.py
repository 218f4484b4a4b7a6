"""Which tasks come first, from scores written down here and from tiny reward models."""

from pathlib import Path

import pytest
import torch

from flows.commands.annotate.tasks import Task, ask_order, most_uncertain, reward_models, score_tasks
from rlhf_core.data.tokenizer import encode_prompt, encode_response
from rlhf_core.errors import UserError
from rlhf_core.models.ensemble import Ensemble, member_folder
from rlhf_core.models.hf import save_checkpoint
from tests.rlhf_core.conftest import tiny_scalar, tiny_tokenizer

TASKS = [
    Task([{"role": "user", "content": "what shall i eat"}], ("eat oats", "take tea and a fig"), (True, True)),
    Task([{"role": "user", "content": "what shall i eat"}], ("eat oats", "rest"), (True, False)),
    Task([{"role": "user", "content": "then"}], ("an egg", "some tea", "a fig"), (True, True, True)),
]


def test_margin_takes_the_smallest_difference_first() -> None:
    one = [[[0.0, 3.0], [5.0, 4.5], [1.0, -1.0], [2.0, 2.0]]]
    assert ask_order("margin", one) == [3, 1, 2, 0]


def test_the_margin_of_an_ensemble_is_the_mean_of_the_margins() -> None:
    both = [[[2.0, 0.0], [1.0, 0.0]], [[0.0, 2.0], [1.0, 0.0]]]
    assert ask_order("margin", both) == [0, 1], "the two models cancel out in the first"


def test_disagreement_takes_the_largest_deviation_of_the_margin_first() -> None:
    first = [[1.0, 0.0], [2.0, 0.0], [9.0, 0.0]]
    second = [[100.0, 99.5], [0.0, 2.0], [9.0, 0.0]]  # margins 1 and 0.5, 2 and −2, 9 and 9
    assert ask_order("disagreement", [first, second]) == [1, 0, 2]


def test_a_ranking_counts_with_the_mean_over_its_pairs() -> None:
    four = [[[0.0, 0.0, 0.0, 6.0], [0.0, 1.0, 2.0, 3.0], [0.0, 9.0, 0.0, 9.0]]]
    # mean |margin|: 18/6, 10/6, 36/6
    assert ask_order("margin", four) == [1, 0, 2]


def test_equal_tasks_keep_their_random_order() -> None:
    assert ask_order("margin", [[[1.0, 0.0]] * 4]) == [0, 1, 2, 3]


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "first", tmp_path / "second"]
    for seed, folder in enumerate(folders):
        model = tiny_scalar(seed=seed)
        model.config.pad_token_id = tiny_tokenizer().pad_token_id
        save_checkpoint(folder, model, tiny_tokenizer())
    (tmp_path / "params.yaml").write_text("trust_remote_code: false\n", encoding="utf-8")
    return folders


def test_scores_are_those_of_the_model_on_prompt_and_answer(
    models: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = tiny_scalar(seed=0), tiny_tokenizer()
    scores = score_tasks(TASKS, models[0])
    assert [len(one) for one in scores] == [2, 2, 3]
    assert scores[0][0] == scores[1][0], "the same answer to the same prompt"
    for task, found in zip(TASKS, scores, strict=True):
        for text, score in zip(task.answers, found, strict=True):
            ids = encode_prompt(tokenizer, task.prompt) + encode_response(tokenizer, text)
            with torch.no_grad():
                expected = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits
            assert score == pytest.approx(expected.item(), abs=1e-4)
    assert "answer 6/6" in capsys.readouterr().out


def test_the_scores_are_those_of_the_projects_precision(models: list[Path]) -> None:
    exact, rounded = score_tasks(TASKS, models[0]), score_tasks(TASKS, models[0], precision="bfloat16")
    for one, other in zip(exact, rounded, strict=True):
        assert one != other
        assert one == pytest.approx(other, abs=0.05)


def test_the_order_follows_the_models(models: list[Path], tmp_path: Path) -> None:
    scores = [score_tasks(TASKS, folder) for folder in models]
    for ask in ("margin", "disagreement"):
        expected = [TASKS[place] for place in ask_order(ask, scores)]  # type: ignore[arg-type]
        assert most_uncertain(TASKS, ask, models, tmp_path) == expected  # type: ignore[arg-type]
    assert most_uncertain(TASKS, "random", reward_models("random", [tmp_path / "nowhere"]), tmp_path) == TASKS


def test_the_members_of_a_reward_model_count_as_several(models: list[Path], tmp_path: Path) -> None:
    expected = most_uncertain(TASKS, "disagreement", models, tmp_path)
    one, other = models
    member_folder(one, 2).parent.mkdir()
    other.rename(member_folder(one, 2))
    with pytest.raises(UserError, match=r"at least twice, or set reward\.members"):
        reward_models("disagreement", [one])
    Ensemble("mean", 1.0, [0.0, 0.0]).write(one)
    assert most_uncertain(TASKS, "disagreement", reward_models("disagreement", [one]), tmp_path) == expected


def test_what_cannot_be_scored_is_one_line(models: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give --reward FOLDER at least twice"):
        reward_models("disagreement", models[:1])
    with pytest.raises(
        UserError, match=r"nowhere: no reward model here; run `leash run reward`, or name one with --reward"
    ):
        reward_models("margin", [tmp_path / "nowhere"])
    long = Task([{"role": "user", "content": "eat " * 60}], ("a", "b"), (True, True))
    with pytest.raises(UserError, match=r"tokens, and the model's context holds 64; .* --ask random"):
        most_uncertain([long], "margin", models[:1], tmp_path)
