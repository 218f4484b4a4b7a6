"""`tokenizer.py`: any text survives, pad is not eos, and a prompt becomes ids in one way."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import (
    CHAT_TEMPLATE,
    complete,
    continues_text,
    decode_response,
    encode_prompt,
    encode_response,
    load_tokenizer,
    require_usable,
    stop_ids,
    train_bpe,
)
from rlhf_core.errors import UserError

TEXTS = ["Eat oats with yogurt.", "Boiled eggs release sugar slowly.", "What shall I eat for breakfast?"]
PROMPT: Conversation = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What shall I eat?"}]


def train(texts: list[str] = TEXTS) -> PreTrainedTokenizerFast:
    return train_bpe(texts, 300, "<|pad|>", "<|end|>", 32)


TRAINED = train()


@pytest.fixture
def plain() -> Callable[..., PreTrainedTokenizerFast]:
    """A pretrained tokenizer that lacks what the arguments do not give."""

    def make(**special: str) -> PreTrainedTokenizerFast:
        words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2, "<unk>": 3}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=words, **special)

    return make


def test_equal_texts_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        train().save_pretrained(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_survives_encoding(text: str) -> None:
    assert decode_response(TRAINED, encode_response(TRAINED, text)) == text.strip()


def test_training_learns_merges() -> None:
    """Fewer tokens than bytes for the texts it was trained on."""
    assert len(encode_response(TRAINED, TEXTS[0])) < len(TEXTS[0])
    assert len(TRAINED) == 300


def test_a_response_closes_with_eos_where_it_ended() -> None:
    ended = encode_response(TRAINED, "Eat oats.", ended=True)
    assert ended[-1] == TRAINED.eos_token_id
    assert encode_response(TRAINED, "Eat oats.", ended=False) == ended[:-1]
    assert TRAINED.eos_token_id not in ended[:-1]


def test_failure_14_conversations_go_through_the_chat_template() -> None:
    text = TRAINED.decode(encode_prompt(TRAINED, PROMPT))
    assert text == "<|system|>Be kind.<|end|><|user|>What shall I eat?<|end|><|assistant|>"
    role = TRAINED.convert_tokens_to_ids("<|assistant|>")
    assert encode_prompt(TRAINED, PROMPT)[-1] == role


def test_a_saved_tokenizer_comes_back_whole(tmp_path: Path) -> None:
    TRAINED.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert encode_prompt(loaded, PROMPT) == encode_prompt(TRAINED, PROMPT)
    assert (loaded.pad_token_id, loaded.eos_token_id) == (TRAINED.pad_token_id, TRAINED.eos_token_id)


def test_special_tokens_are_not_shown() -> None:
    ids = encode_response(TRAINED, "Eat.")
    pad = TRAINED.pad_token_id
    assert decode_response(TRAINED, [pad, *ids[:-1], pad, ids[-1]]) == "Eat."


def test_stop_ids_are_eos_and_the_tokens_with_the_texts() -> None:
    full_stop, role = TRAINED.convert_tokens_to_ids("."), TRAINED.convert_tokens_to_ids("<|user|>")
    assert stop_ids(TRAINED, []) == {TRAINED.eos_token_id}
    assert stop_ids(TRAINED, [".", "<|user|>", "."]) == {TRAINED.eos_token_id, full_stop, role}


@pytest.mark.parametrize(("text", "count"), [("", "0 tokens"), ("x.", "2 tokens"), ("<|u", "3 tokens")])
def test_a_stop_token_must_be_exactly_one_token(text: str, count: str) -> None:
    with pytest.raises(UserError, match=f"{count} of the tokenizer"):
        stop_ids(TRAINED, [text])


def test_a_text_that_the_tokenizer_does_not_know_is_no_stop_token(
    plain: Callable[..., PreTrainedTokenizerFast],
) -> None:
    with pytest.raises(UserError, match="'zebra' is no token"):
        stop_ids(plain(eos_token="<eos>", unk_token="<unk>"), ["zebra"])


def test_the_stop_token_that_closes_a_response_is_not_shown() -> None:
    """One inside is: it has ended nothing."""
    ids = encode_response(TRAINED, "Eat. Rest.", ended=False)
    stops = stop_ids(TRAINED, ["."])
    assert decode_response(TRAINED, ids, stops) == "Eat. Rest"
    assert decode_response(TRAINED, ids) == "Eat. Rest."
    assert decode_response(TRAINED, [], stops) == ""


def test_failure_11_pad_equal_to_eos_is_repaired_and_reported(plain: Callable[..., PreTrainedTokenizerFast]) -> None:
    tokenizer, repairs = complete(plain(eos_token="<eos>", pad_token="<eos>"), "<|pad|>")
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert repairs == ["pad token set to <|pad|>", "chat template added"]
    assert len(tokenizer) == 8
    assert encode_prompt(tokenizer, PROMPT)[0] == tokenizer.convert_tokens_to_ids("<|system|>")


def test_a_complete_tokenizer_is_unchanged(plain: Callable[..., PreTrainedTokenizerFast]) -> None:
    given_template = plain(eos_token="<eos>", pad_token="<unk>")
    given_template.chat_template = "{{ messages[0]['content'] }}"
    tokenizer, repairs = complete(given_template, "<|pad|>")
    assert repairs == []
    assert tokenizer.pad_token == "<unk>"
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_failure_11_pad_equal_to_eos_is_refused(plain: Callable[..., PreTrainedTokenizerFast]) -> None:
    same = plain(eos_token="<eos>", pad_token="<eos>")
    same.chat_template = CHAT_TEMPLATE
    with pytest.raises(UserError, match="pad token equals eos"):
        require_usable(same)
    with pytest.raises(UserError, match="pad token equals eos"):
        complete(plain(eos_token="<eos>"), "<eos>")


def test_what_cannot_be_repaired_is_refused(plain: Callable[..., PreTrainedTokenizerFast]) -> None:
    with pytest.raises(UserError, match="no eos token"):
        complete(plain(), "<|pad|>")
    with pytest.raises(UserError, match="needs an eos and a pad"):
        require_usable(plain(eos_token="<eos>"))
    with pytest.raises(UserError, match="no chat template"):
        require_usable(plain(eos_token="<eos>", pad_token="<unk>"))


def test_a_template_may_require_a_system_message(plain: Callable[..., PreTrainedTokenizerFast]) -> None:
    """Prompts must bring it: one without is refused with the words of the template."""
    strict = plain(eos_token="<eos>", pad_token="<unk>")
    strict.chat_template = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    tokenizer, repairs = complete(strict, "<|pad|>")
    assert repairs == []
    assert encode_prompt(tokenizer, PROMPT)
    with pytest.raises(UserError, match=r"its chat template fails \(TemplateError: no system message\)"):
        encode_prompt(tokenizer, OPENING)


OPENING: Conversation = [{"role": "user", "content": "What shall I"}]


def test_a_text_is_its_opening_and_its_continuation_and_nothing_between_them(tmp_path: Path) -> None:
    """Joined, the tokens of both are those of the whole text, and so are the decoded texts."""
    train_bpe(TEXTS, 300, "<|pad|>", "<|end|>", 32, plain=True).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert continues_text(tokenizer)
    assert not continues_text(TRAINED)
    prompt, response = encode_prompt(tokenizer, OPENING), encode_response(tokenizer, " eat for  breakfast?")
    assert prompt + response[:-1] == tokenizer("What shall I eat for  breakfast?")["input_ids"]
    assert response[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(prompt) + decode_response(tokenizer, response) == "What shall I eat for  breakfast?"
    assert "<|user|>" not in tokenizer.get_vocab()


def test_a_model_of_texts_has_no_turns(tmp_path: Path) -> None:
    tokenizer = train_bpe(TEXTS, 300, "<|pad|>", "<|end|>", 32, plain=True)
    with pytest.raises(UserError, match=r"base\.format is text: a prompt is one text, without turns"):
        encode_prompt(tokenizer, PROMPT)


def test_a_pretrained_tokenizer_keeps_its_first_token_before_texts(
    plain: Callable[..., PreTrainedTokenizerFast],
) -> None:
    opening: Conversation = [{"role": "user", "content": "a b"}]
    bare, _ = complete(plain(eos_token="<eos>", chat_template="{{ messages }}"), "<pad>", plain=True)
    assert encode_prompt(bare, opening) == [0, 1]
    starting = plain(eos_token="<eos>", bos_token="<bos>")
    first = starting.bos_token_id
    starting.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", first)]
    )
    found, repairs = complete(starting, "<pad>", plain=True)
    assert encode_prompt(found, opening) == [first, 0, 1]
    assert continues_text(found)
    assert "chat template replaced: prompts are texts" in repairs


def test_an_added_chat_template_begins_as_the_tokenizer_begins_texts(
    plain: Callable[..., PreTrainedTokenizerFast],
) -> None:
    """Base models of Llama were trained with `bos` before every text."""
    starting = plain(eos_token="<eos>", bos_token="<bos>")
    first = starting.bos_token_id
    starting.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", first)]
    )
    tokenizer, _ = complete(starting, "<pad>")
    ids = encode_prompt(tokenizer, PROMPT)
    assert ids[0] == first
    assert ids.count(first) == 1
    unused, _ = complete(plain(eos_token="<eos>", bos_token="<bos>"), "<pad>")
    assert unused.bos_token_id not in encode_prompt(unused, PROMPT)
