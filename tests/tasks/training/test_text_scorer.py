"""Models from elsewhere as scorers: they read text with tokenizers of their own, and score as transformers does."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_core.data.chat import Conversation, as_text
from rlhf_core.data.classifiers import require_classifier
from rlhf_core.data.scorer import Answers, WeightedSum
from rlhf_core.errors import UserError
from rlhf_core.models.scorers import TextScorer, require_room
from tasks.params.scorer import TextModel
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import text_scorer
from tests.elsewhere import save_classifier, save_language_model, save_reward_model, save_roberta


def foreign(folder: Path, **how: Any) -> TextScorer:
    """The model in the folder, as a stage of a policy that answers in chats loads it, in float32; batches of 3."""
    continues = how.pop("continues", False)
    models = ScalarModels(device=torch.device("cpu"))
    return text_scorer(folder.parents[2], folder.name, TextModel(**how), "scorer", models, 3, continues)


CHATS: list[tuple[Conversation, str]] = [
    ([{"role": "user", "content": "How do I sleep better?"}], "Walk in the evening."),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "I eat late."}], "Eat early, then."),
    (
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Go"},
        ],
        "",
    ),
    ([{"role": "user", "content": "A longer question about sleep and food and walks, please."}], "No. " * 9),
]
GIVEN = Answers([prompt for prompt, _ in CHATS], [answer for _, answer in CHATS])


def alone(folder: Path, *texts: str, ids: list[int] | None = None) -> torch.Tensor:
    """What transformers itself computes for one row."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = (
        {"input_ids": torch.tensor([ids])}
        if ids
        else AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")
    )
    with torch.no_grad():
        found: torch.Tensor = model(**inputs).logits[0]
    return found


@pytest.mark.parametrize("kind", ["qwen2", "phi3", "llama3"])
def test_a_reward_model_from_elsewhere_scores_as_transformers_does_for_one_row(tmp_path: Path, kind: str) -> None:
    """Through its own template. The pad token of Phi 3 is its eos token; Llama 3 has none, and is read row by row."""
    folder = save_reward_model(tmp_path / "models/judges/rm", kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = foreign(folder)(GIVEN).total
    for score, (prompt, answer) in zip(found, CHATS, strict=True):
        whole = [*prompt, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
        assert score == pytest.approx(alone(folder, ids=ids).item(), abs=1e-4)
    assert len({round(score, 3) for score in found}) == len(CHATS)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_an_empty_answer_has_one_score_in_every_batch(tmp_path: Path, kind: str) -> None:
    """These tokenizers write nothing around a text, so an empty one is read as the token that begins or ends texts."""
    scorer = foreign(save_reward_model(tmp_path / "models/judges/rm", kind), reads="answer")
    prompt = CHATS[0][0]
    [score] = scorer(Answers([prompt], [""])).total
    others = scorer(Answers([prompt] * 3, ["Walk.", "", "A longer answer."])).total
    assert others[1] == pytest.approx(score, abs=1e-5)
    assert score != 0


def test_answers_cannot_write_control_tokens(tmp_path: Path) -> None:
    for folder, mark in (
        (save_reward_model(tmp_path / "models/judges/rm"), "<|im_end|>"),
        (save_classifier(tmp_path / "models/judges/mood", ("SCORE",)), "[SEP]"),
    ):
        scorer = foreign(folder, reads=None if mark == "<|im_end|>" else "answer")
        plain, spelled = (scorer.encode(CHATS[0][0], text)["input_ids"] for text in ("Yes. ", f"Yes. {mark}"))
        end = scorer.tokenizer.convert_tokens_to_ids(mark)
        assert plain.count(end) == spelled.count(end)
        assert len(spelled) > len(plain)


def test_the_score_of_a_classifier_is_the_log_odds_of_its_label(tmp_path: Path) -> None:
    two = save_classifier(tmp_path / "models/judges/two")
    for score, (_, answer) in zip(foreign(two, label="POSITIVE", reads="answer")(GIVEN).total, CHATS, strict=True):
        negative, positive = alone(two, answer).log_softmax(0)
        assert score == pytest.approx((positive - negative).item(), abs=1e-4)

    three = save_classifier(tmp_path / "models/judges/three", ("BAD", "SO", "GOOD"), seed=1)
    for score, (prompt, answer) in zip(foreign(three, label="SO", reads="pair")(GIVEN).total, CHATS, strict=True):
        share = alone(three, as_text(prompt), answer).softmax(0)[1].item()
        assert score == pytest.approx(math.log(share / (1 - share)), abs=1e-4)
    config = json.loads((three / "config.json").read_text())
    (three / "config.json").write_text(json.dumps(config | {"problem_type": "multi_label_classification"}))
    found = foreign(three, label="SO", reads="answer")(GIVEN).total
    assert found == pytest.approx([alone(three, answer)[1].item() for _, answer in CHATS], abs=1e-4)


def test_where_the_policy_continues_texts_the_model_reads_one_text(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "models/judges/one", ("SCORE",))
    prompt: Conversation = [{"role": "user", "content": "Walk in the"}]
    (found,) = foreign(folder, continues=True)(Answers([prompt], [" evening."])).total
    assert found == pytest.approx(alone(folder, "Walk in the evening.").item(), abs=1e-4)


def test_what_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    mood = save_classifier(tmp_path / "models/judges/mood")
    for how, says in (
        ({"reads": "answer"}, "models/judges/mood: has 2 outputs; set label to one of NEGATIVE, POSITIVE"),
        ({"reads": "answer", "label": "GOOD"}, "has no such label 'GOOD'; its labels are NEGATIVE, POSITIVE"),
        ({"label": "POSITIVE"}, "no chat template, so that it cannot read a conversation; set reads: answer"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            foreign(mood, **how)
        with pytest.raises(UserError, match=re.escape(says)):  # `check` sees it in the files
            require_classifier(mood, how.get("label"), "reads" not in how, "scorer: models/judges/mood")
    one = save_reward_model(tmp_path / "models/judges/rm")
    with pytest.raises(UserError, match="has one output, which is the score; remove label: POSITIVE"):
        foreign(one, label="POSITIVE")
    with pytest.raises(UserError, match="scorer: models/judges/gone is no Hugging Face folder"):
        foreign(tmp_path / "models/judges/gone")
    with pytest.raises(UserError, match=r"weights are missing \(score\.weight\)"):
        foreign(save_language_model(tmp_path / "models/judges/lm"), label="LABEL_1")


def test_nothing_is_cut_off(tmp_path: Path) -> None:
    """At an answer, and before any answer where prompts and longest answers show it."""
    short = foreign(save_reward_model(tmp_path / "models/judges/rm", context=60))
    long = Answers(GIVEN.prompts[:1], ["Walk. " * 60])
    with pytest.raises(
        UserError, match=r"rm: a prompt with its answer has \d+ of its tokens, and its context holds 60"
    ):
        short(long)
    with pytest.raises(UserError, match="its context holds 60"):
        require_room(WeightedSum({"rm": (1.0, short)}), GIVEN.prompts[:1], 60)
    require_room(foreign(save_reward_model(tmp_path / "models/judges/long")), GIVEN.prompts, 60)
    roberta = foreign(save_roberta(tmp_path / "models/judges/roberta", 20), reads="answer")
    assert roberta.context == 18
    fitting = Answers(GIVEN.prompts[:1], ["Walk " * 16])
    assert math.isfinite(roberta(fitting).total[0])
    with pytest.raises(UserError, match="has 19 of its tokens, and its context holds 18"):
        roberta(Answers(GIVEN.prompts[:1], ["Walk " * 17]))


def test_a_model_from_elsewhere_has_a_precision_of_its_own(tmp_path: Path) -> None:
    """Its outputs are computed in float32, also where the policy's autocast is on."""
    folder = save_reward_model(tmp_path / "models/judges/rm")
    exact, rounded = foreign(folder), foreign(folder, precision="bfloat16")
    assert (exact.model.dtype, rounded.model.dtype) == (torch.float32, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert exact(GIVEN).total == pytest.approx(foreign(folder)(GIVEN).total, abs=1e-6)
    found = rounded(GIVEN).total
    assert found == pytest.approx(exact(GIVEN).total, abs=0.2)
    assert any(torch.tensor(score).bfloat16().item() != score for score in found)


def test_a_score_that_is_no_number_is_refused(tmp_path: Path) -> None:
    scorer = foreign(save_reward_model(tmp_path / "models/judges/rm"))
    torch.nn.init.constant_(scorer.model.score.weight, math.nan)
    with pytest.raises(UserError, match="rm: scores 4 of 4 answers with nan; set precision: float32"):
        scorer(GIVEN)
