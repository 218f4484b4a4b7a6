"""A language model as a judge: what it is shown, how its answer is read, and that nothing but the texts decides it."""

from string import Template
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import encode_prompt
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judge_model import QUESTION, LanguageModelJudge
from rlhf_core.evaluation.pair_judges import PairJudge, both_orders

if TYPE_CHECKING:
    from tests.rlhf_core.conftest import Build

SHORT = "$prompt $first_letter $first $second_letter $second"
"""The tiny models read 64 tokens, and their tokenizer has small letters only."""
PROMPTS: list[Conversation] = [
    [{"role": "user", "content": text}]
    for text in ("eat", "what shall i eat", "tea", "rest then", "oats for breakfast")
]
FIRSTS = ["an egg", "some oats", "", "fig", "eat some oats and an egg"]
SECONDS = ["tea", "take tea and a fig", "rest", "fig", "no"]


@pytest.fixture
def make(build_lm: "Build", tokenizer: PreTrainedTokenizerBase) -> Any:
    """make(kind="llama", **fields) -> a judge on a tiny random model."""

    def judge(kind: str = "llama", **fields: Any) -> LanguageModelJudge:
        settings = {"name": "tiny", "question": SHORT, "letters": ("a", "e"), **fields}
        return LanguageModelJudge(build_lm(kind), tokenizer, **settings)

    return judge


def test_log_odds_are_those_of_the_next_token_of_each_question_alone(
    make: Any, kind: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    judge = make(kind)
    found = judge.log_odds(PROMPTS, FIRSTS, SECONDS)
    for prompt, first, second, gap in zip(PROMPTS, FIRSTS, SECONDS, found, strict=True):
        text = f"{prompt[0]['content']} a {first} e {second}"
        ids = encode_prompt(tokenizer, [{"role": "user", "content": text}])
        with torch.no_grad():
            logprobs = judge.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        a, e = (tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "ae")
        assert gap == pytest.approx((logprobs[a] - logprobs[e]).item(), abs=1e-4)


def test_the_batch_changes_no_verdict(make: Any, kind: str) -> None:
    alone = make(kind, batch_size=1)
    for size in (2, 3, 16):
        judge = make(kind, batch_size=size)
        assert judge.log_odds(PROMPTS, FIRSTS, SECONDS) == pytest.approx(
            alone.log_odds(PROMPTS, FIRSTS, SECONDS), abs=2e-5
        )
        assert judge.prefer(PROMPTS, FIRSTS, SECONDS) == alone.prefer(PROMPTS, FIRSTS, SECONDS)


def test_verdicts_are_the_signs_of_the_log_odds(make: Any) -> None:
    judge: PairJudge = make()
    verdicts = judge.prefer(PROMPTS, FIRSTS, SECONDS)
    assert verdicts == [float(gap > 0) for gap in make().log_odds(PROMPTS, FIRSTS, SECONDS)]
    assert judge.prefer(PROMPTS, FIRSTS, SECONDS) == verdicts


def test_equal_answers_show_the_order_alone(make: Any) -> None:
    """The same text on both sides gives one question in both orders: the two verdicts of the judge cancel."""
    found = both_orders(make(), PROMPTS, FIRSTS, FIRSTS)
    assert found.preference == [0.5] * len(PROMPTS)


def test_a_model_that_cannot_tell_the_letters_apart_ties(make: Any) -> None:
    """With one and the same embedding for both letters neither is ever more likely: a judge without a position."""
    judge = make()
    a, e = judge._letter_ids()
    with torch.no_grad():
        weight = judge.model.get_output_embeddings().weight
        weight[e] = weight[a]
    found = both_orders(judge, PROMPTS, FIRSTS, SECONDS)
    assert found.preference == [0.5] * len(PROMPTS)
    assert (found.position_bias, found.self_agreement) == (0.0, 1.0)


def test_the_mirror_image_of_a_model_gives_the_mirror_image_of_its_verdicts(
    make: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Its two letters exchanged, and the answers shown in the other order: it sees the same text and says the other
    letter."""
    judge = make(question="$prompt $first $second")
    mirrored = make(question="$prompt $second $first")
    letters, firsts, seconds = list(judge._letter_ids()), ["an egg"] * 5, ["tea", "fig", "rest", "then", "oats"]
    texts = " ".join([prompt[0]["content"] for prompt in PROMPTS] + firsts + seconds)
    assert not set(letters) & set(tokenizer(texts)["input_ids"])  # nothing else is exchanged
    with torch.no_grad():
        weight = mirrored.model.get_output_embeddings().weight
        weight[letters] = weight[letters[::-1]]
    gaps = judge.log_odds(PROMPTS, firsts, seconds)
    assert mirrored.log_odds(PROMPTS, seconds, firsts) == pytest.approx([-gap for gap in gaps], abs=1e-5)
    verdicts = judge.prefer(PROMPTS, firsts, seconds)
    assert mirrored.prefer(PROMPTS, seconds, firsts) == [1 - verdict for verdict in verdicts]


def test_the_question_shows_the_texts_as_they_are(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def record(tokenizer: Any, conversation: Conversation) -> list[int]:
        shown.append(conversation[0]["content"])
        return [5, 6]

    monkeypatch.setattr("rlhf_core.evaluation.judge_model.encode_prompt", record)
    turns: Conversation = [*PROMPTS[0], {"role": "assistant", "content": "$first {x}"}, *PROMPTS[1]]
    make(question=QUESTION).prefer([turns], ["$second costs $$3"], ["{first}"])
    assert "user: eat\nassistant: $first {x}\nuser: what shall i eat" in shown[0]
    assert "Answer a:\n$second costs $$3\n" in shown[0]
    assert "Answer e:\n{first}\n" in shown[0]
    assert shown[0].endswith("Reply with one letter, a or e, and nothing else.")


@pytest.mark.parametrize("question", ["$prompt $first", "$prompt $first $second $third", "$prompt $first $second $"])
def test_an_incomplete_question_is_refused(make: Any, question: str) -> None:
    with pytest.raises(UserError, match="must hold"):
        make(question=question)


def test_letters_that_are_no_single_token_are_refused(make: Any) -> None:
    for letter in ("oats", "A", "xyz"):  # two tokens, none, and one that says y alone
        with pytest.raises(UserError, match=f"'{letter}' is not a single token"):
            make(letters=("a", letter))
    with pytest.raises(UserError, match="same token"):
        make(letters=("a", "a"))


def test_a_question_longer_than_the_context_is_refused(make: Any) -> None:
    with pytest.raises(UserError, match="longer than its context of 64"):
        make().prefer(PROMPTS[:1], ["egg " * 70], ["tea"])


def test_room_for_two_answers_of_full_length_is_required_beforehand(make: Any) -> None:
    """The shortest question leaves some tokens of the context of 64: as many as fit twice, and not one more."""
    judge = make(question="$prompt $first $second")
    left = 64 - len(judge._encode(PROMPTS[0], "", ""))
    judge.require_room(PROMPTS[:1], left // 2)
    with pytest.raises(UserError, match="lower max_new_tokens"):
        judge.require_room(PROMPTS[:1], left // 2 + 1)


def test_the_question_of_ours_holds_what_it_needs() -> None:
    assert set(Template(QUESTION).get_identifiers()) == {"prompt", "first", "second", "first_letter", "second_letter"}
