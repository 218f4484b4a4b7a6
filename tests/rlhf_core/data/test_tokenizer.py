"""`tokenizer.py`: any text survives, pad is not eos, and a prompt becomes ids in one way."""

import re
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import (
    CHAT_TEMPLATE,
    CLOCKS,
    DIRECTIVES,
    answer_text,
    complete,
    continues_text,
    decode_response,
    encode_prompt,
    encode_response,
    encode_turns,
    load_tokenizer,
    require_usable,
    settle,
    stop_ids,
    train_bpe,
)
from rlhf_core.errors import UserError
from tests.architectures import kinds

TEXTS = ["Eat oats with yogurt.", "Boiled eggs release sugar slowly.", "What shall I eat for breakfast?"]
PROMPT: Conversation = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What shall I eat?"}]

TALK: Conversation = [
    {"role": "user", "content": "What is tea?"},
    {"role": "assistant", "content": "A drink."},
    {"role": "user", "content": "And oats?"},
]


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


@settings(max_examples=80, derandomize=True)
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
    assert stop_ids(TRAINED, None, []) == {TRAINED.eos_token_id}
    assert stop_ids(TRAINED, None, [".", "<|user|>", "."]) == {TRAINED.eos_token_id, full_stop, role}


@pytest.mark.parametrize(("text", "count"), [("", "0 tokens"), ("x.", "2 tokens"), ("<|u", "3 tokens")])
def test_a_stop_token_must_be_exactly_one_token(text: str, count: str) -> None:
    with pytest.raises(UserError, match=f"{count} of the tokenizer"):
        stop_ids(TRAINED, None, [text])


def test_a_text_that_the_tokenizer_does_not_know_is_no_stop_token(
    plain: Callable[..., PreTrainedTokenizerFast],
) -> None:
    with pytest.raises(UserError, match="'zebra' is no token"):
        stop_ids(plain(eos_token="<eos>", unk_token="<unk>"), None, ["zebra"])


def test_the_stop_token_that_closes_a_response_is_not_shown() -> None:
    """One inside is: it has ended nothing."""
    ids = encode_response(TRAINED, "Eat. Rest.", ended=False)
    stops = stop_ids(TRAINED, None, ["."])
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


# what `settle` changes: today's date, and the end of a turn

USER = "{% for m in messages %}{{ '<|user|>' + m['content'] + '<|end|>' }}{% endfor %}"
DATED = {
    "llama 3": "{% set date_string = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}"
    "{{ 'Today Date: ' + date_string }}" + USER,
    "mistral": '{%- set today = strftime_now("%Y-%m-%d") %}'
    "{% if messages[0]['role'] != 'system' %}{{ 'The current date is ' + today }}{% endif %}" + USER,
    "granite": "{% if messages[0]['role'] == 'system' %}{{ 'Date: ' + strftime_now( '%B %d, %Y' ) }}{% endif %}" + USER,
}


def set_clock(monkeypatch: pytest.MonkeyPatch, *moment: int) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Clock":
            return cls(*moment, tzinfo=tz)  # type: ignore[misc]

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


@pytest.mark.parametrize("name", DATED)
def test_a_chat_template_writes_a_fixed_date_in_place_of_today(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train()
    tokenizer.chat_template = DATED[name]
    tokenizer, repairs = complete(tokenizer, "<|pad|>")
    assert repairs == ["the chat template writes 26 Jul 2024 in place of today's date"]
    tokenizer.save_pretrained(tmp_path)
    days = []
    for month in (3, 11):
        set_clock(monkeypatch, 2031, month, 5)
        loaded = load_tokenizer(tmp_path)
        assert loaded.chat_template == tokenizer.chat_template
        days.append([encode_prompt(loaded, prompt) for prompt in (PROMPT, OPENING)])
    assert days[0] == days[1]
    assert re.search("26 Jul 2024|2024-07-26|July 26, 2024", tokenizer.decode([*days[0][0], *days[0][1]]))


# values of the chat template's variables

THINKING = (
    "{%- macro turn(role) %}{{ '<|im_start|>' + role + '\\n' }}{%- endmacro %}"
    "{%- for m in messages %}{{ turn(m.role) }}{%- generation %}{{ m.content }}{%- endgeneration %}"
    "{{ '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ turn('assistant') }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{ mood | default('') }}{%- endif %}"
)
"""As Qwen 3's, which thinks unless `enable_thinking` is false."""


def thinking() -> PreTrainedTokenizerBase:
    tokenizer = kinds.KINDS["qwen3"]()
    tokenizer.chat_template = THINKING
    return tokenizer


def test_values_of_the_chat_template_hold_in_every_rendering_and_are_saved_with_it(tmp_path: Path) -> None:
    plain, _ = complete(thinking(), "<|pad|>")
    tokenizer, repairs = complete(thinking(), "<|pad|>", values={"enable_thinking": False, "mood": 'a "dry" one'})
    assert repairs[0] == "the chat template's enable_thinking is false"
    tokenizer.save_pretrained(tmp_path)
    expected = [
        *plain(plain.apply_chat_template(OPENING, add_generation_prompt=True, tokenize=False))["input_ids"],
        *plain('<think>\n\n</think>\n\na "dry" one')["input_ids"],
    ]
    for loaded in (tokenizer, load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert encode_prompt(loaded, OPENING) == expected
    assert tokenizer.apply_chat_template(OPENING, tokenize=False) == plain.apply_chat_template(OPENING, tokenize=False)
    text = tokenizer.apply_chat_template(OPENING, add_generation_prompt=True, tokenize=False, enable_thinking=True)
    assert "<think>" not in str(text), "a caller's own value wins"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("thinking", r"does not read thinking; it reads enable_thinking, mood"),
        ("messages", r"does not read messages; it reads"),
        ("m", r"does not read m; it reads"),
    ],
)
def test_values_that_the_chat_template_does_not_read_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"base.chat_template_kwargs: the chat template of .*{message}"):
        complete(thinking(), "<|pad|>", values={name: True})
    with pytest.raises(UserError, match="it reads no variable of its own"):
        complete(kinds.KINDS["gpt2"](), "<|pad|>", values={name: True})


def test_a_tokenizer_that_no_stage_has_made_writes_the_same_date(tmp_path: Path) -> None:
    """Of a judge model or an extra model."""
    tokenizer = train()
    tokenizer.chat_template = DATED["llama 3"]
    tokenizer.save_pretrained(tmp_path)
    assert "26 Jul 2024" in load_tokenizer(tmp_path).decode(encode_prompt(load_tokenizer(tmp_path), OPENING))


def test_a_date_that_cannot_be_fixed_is_refused() -> None:
    tokenizer = train()
    tokenizer.chat_template = "{% set form = '%d %b' %}{{ strftime_now(form) }}" + USER
    with pytest.raises(UserError, match=r"writes today's date, .* write a fixed date"):
        complete(tokenizer, "<|pad|>")


def test_the_moments_of_the_date_check_differ_in_each_directive() -> None:
    early, late = CLOCKS
    assert all(early.strftime(text) != late.strftime(text) for text in DIRECTIVES if "-" not in text)


DEPENDING = {
    "a variable": "{% set form = '%d %b' %}{{ strftime_now(form) }}",
    "a keyword": "{{ strftime_now(format='%d %b') }}",
    "another name": "{% set now = strftime_now %}{{ now('%Y') }}",
    "a whole date": "{% set form = '%F' %}{{ strftime_now(form) }}",
    "without zeros": "{% set form = '%-d' %}{{ strftime_now(form) }}",
    "yesterday": "{% set form = '%j' %}{{ strftime_now(form) | int - 1 }}",
    "a table": "{% set form = '%m' %}{{ ['January', 'February'][strftime_now(form) | int - 1] ~ ' now' }}",
    "a weekday": "{% set form = '%A' %}{{ 'weekend' if strftime_now(form) in ['Saturday', 'Sunday'] else 'weekday' }}",
    "a year": "{% set form = '%Y' %}{% if strftime_now(form) | int > 2026 %}{{ 'late' }}{% endif %}",
    "an error": "{% set form = '%Y' %}{% if strftime_now(form) | int > 2026 %}{{ raise_exception('old') }}{% endif %}",
    "the answer's head": "{% set form = '%d' %}{% if add_generation_prompt %}{{ strftime_now(form) }}{% endif %}",
    "two turns": "{% set form = '%d' %}{% if messages | length > 2 %}{{ strftime_now(form) }}{% endif %}",
    "an open turn": "{% set form = '%d' %}{% if messages[-1]['role'] == 'user' %}{{ strftime_now(form) }}{% endif %}",
    "system": "{% set form = '%d' %}{% if messages[0]['role'] == 'system' %}{{ strftime_now(form) }}{% endif %}",
}


@pytest.mark.parametrize("name", DEPENDING)
def test_a_template_that_depends_on_the_date_in_any_way_is_refused(name: str) -> None:
    tokenizer = train()
    tokenizer.chat_template = DEPENDING[name] + USER
    with pytest.raises(UserError, match=r"writes today's date, .* write a fixed date"):
        settle(tokenizer)


PINNED = {
    "parts": ("{% set t = strftime_now('%Y-%m-%d').split('-') %}{{ t[2] + '/' + t[1] }}", "26/07"),
    "a weekday": ("{{ 'weekend' if strftime_now('%A') in ['Saturday', 'Sunday'] else 'weekday' }}", "weekday"),
    "the answer's head": ("{% if add_generation_prompt %}{{ strftime_now('%d') }}{% endif %}", "26"),
    "joined": ("{{ strftime_now('%d' ~ ' %b') }}", "26 Jul"),
    "many turns": ("{% if messages | length > 4 %}{{ strftime_now('%d %b') }}{% endif %}", "26 Jul"),
    "an error": ("{% if strftime_now('%Y') | int > 2026 %}{{ raise_exception('old') }}{% endif %}", ""),
}


@pytest.mark.parametrize("name", PINNED)
def test_a_date_is_fixed_wherever_the_template_reads_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train()
    body, words = PINNED[name]
    tokenizer.chat_template = body + USER
    assert settle(tokenizer)[0] == "the chat template writes 26 Jul 2024 in place of today's date"
    turns: Conversation = [*OPENING, {"role": "assistant", "content": "Eat."}, *OPENING] * 2
    rendered = []
    for moment in ((2027, 5, 4), (2031, 11, 22)):
        set_clock(monkeypatch, *moment)
        rendered += [str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))]
    assert rendered[0] == rendered[1]
    assert words in rendered[0]


def test_a_turn_that_closes_with_text_is_said(plain: Callable[..., PreTrainedTokenizerFast]) -> None:
    tokenizer = plain(eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n### End\n' }}{% endfor %}"
    _, repairs = complete(tokenizer, "<|pad|>")
    assert repairs == [
        "the chat template closes an answer with '### End', which is no control token: answers end with <eos>"
    ]


def closed_by(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    return encode_response(tokenizer, "Eat.")[-1] == tokenizer.convert_tokens_to_ids(text)


@pytest.mark.parametrize(
    ("kind", "end", "before"),
    [
        ("gemma", "<end_of_turn>", "<eos>"),
        ("phi3", "<|end|>", "<|endoftext|>"),
        ("qwen_base", "<|im_end|>", "<|endoftext|>"),
    ],
)
def test_rule_26_answers_close_as_the_chat_template_closes_them(
    kind: str, end: str, before: str, tmp_path: Path
) -> None:
    """The template's own use of the old eos, and all ids of a prompt, stay as they were."""
    makers = {**kinds.KINDS, "qwen_base": lambda: kinds._qwen("{{ '' if messages else eos_token }}" + kinds.QWEN2)}
    tokenizer, size = makers[kind](), len(makers[kind]())
    turns: Conversation = [*OPENING, {"role": "assistant", "content": "Eat."}, *OPENING]
    prompt = encode_prompt(tokenizer, turns)
    rendered, added = tokenizer.apply_chat_template(turns, tokenize=False), dict(tokenizer.added_tokens_decoder)
    tokenizer, repairs = complete(tokenizer, "<|pad|>")
    assert f"answers end with {end}, as the chat template closes them; the tokenizer's eos was {before}" in repairs
    assert len(tokenizer) == size
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for found in (tokenizer, loaded):
        assert closed_by(found, end)
        assert encode_prompt(found, turns) == prompt
        assert found.apply_chat_template(turns, tokenize=False) == rendered
        assert found.added_tokens_decoder == added
    assert settle(loaded) == []


def test_an_end_of_turn_that_is_not_declared_special_is_no_text_of_an_answer() -> None:
    vocabulary = {text: i for i, text in enumerate(["Eat", "<|user|>", "<eos>", "<pad>"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="Eat")), eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.add_tokens([AddedToken("<|end|>", special=False, normalized=False)])
    tokenizer.chat_template = USER
    settle(tokenizer)
    assert decode_response(tokenizer, encode_response(tokenizer, "Eat")) == "Eat"


@pytest.mark.parametrize("kind", ["llama2", "falcon", "olmo2", "qwen3"])
def test_a_template_that_closes_with_eos_or_with_nothing_changes_no_end(kind: str) -> None:
    tokenizer = kinds.KINDS[kind]()
    eos = tokenizer.eos_token
    complete(tokenizer, "<|pad|>")
    assert tokenizer.eos_token == eos


def test_the_end_of_a_turn_is_enough_where_the_tokenizer_names_no_eos() -> None:
    tokenizer = train()
    tokenizer.eos_token = None
    tokenizer.chat_template = USER
    assert complete(tokenizer, "<|pad|>")[0].eos_token == "<|end|>"


# the pad token


def smol(template: str | None, **special: str) -> PreTrainedTokenizerFast:
    """As SmolLM2's: the first tokens are control tokens, and none of them is for padding."""
    words = Tokenizer(models.BPE(unk_token="<|endoftext|>"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
    words.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            special_tokens=control, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **special)


@pytest.mark.parametrize(
    ("template", "special", "plain", "expected"),
    [
        (kinds.QWEN2, {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "bos_token": "<|im_start|>"}, False, 0),
        (kinds.QWEN2, {"eos_token": "<|endoftext|>"}, False, 0),
        (None, {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}, False, 3),
        (None, {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}, True, 1),
    ],
    ids=["instruct", "base with a template", "base", "texts"],
)
def test_a_control_token_without_a_use_becomes_the_pad_token(
    template: str | None, special: dict[str, str], plain: bool, expected: int
) -> None:
    """A vocabulary of 49,152 stays one: 49,153 rows are slow on every machine."""
    tokenizer = smol(template, **special)
    size = len(tokenizer)
    tokenizer, repairs = complete(tokenizer, "<|pad|>", plain)
    assert (len(tokenizer), tokenizer.pad_token_id) == (size, expected)
    reason = "was the eos token" if tokenizer.pad_token == special["eos_token"] != tokenizer.eos_token else "has no use"
    assert f"pad token set to {tokenizer.pad_token}, which {reason}" in repairs
    assert tokenizer.eos_token == ("<|endoftext|>" if plain else "<|im_end|>")


def test_names_for_padding_come_first_and_an_unknown_token_that_texts_make_never() -> None:
    llama = kinds.llama3()
    llama.add_special_tokens({"additional_special_tokens": ["<|finetune_right_pad_id|>"]})
    assert complete(llama, "<|pad|>")[0].pad_token == "<|finetune_right_pad_id|>"
    assert complete(kinds.llama3(), "<|pad|>")[0].pad_token == "<|reserved_special_token_0|>"
    assert complete(kinds.llama2(), "<|pad|>")[0].pad_token == "<unk>"
    words = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    unknown = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    assert complete(unknown, "<|pad|>")[0].pad_token == "<|pad|>"


CONTROL = ["<eos>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


def control_only(model: models.Model, trainer: trainers.Trainer, **declared: str) -> PreTrainedTokenizerFast:
    """A tokenizer without a token for padding that writes [CLS] and [SEP] around texts."""
    words = Tokenizer(model)
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(TEXTS, trainer)
    places = [(text, words.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=places
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", additional_special_tokens=CONTROL[1:],
                                   **declared)  # fmt: skip


@pytest.mark.parametrize("declared", [{}, {"unk_token": "<unk>", "mask_token": "[MASK]"}], ids=["", "declared"])
def test_what_texts_or_the_tokenizer_around_them_make_is_no_pad_token(declared: dict[str, str]) -> None:
    """Also an unknown token that the model of the tokenizer names and its settings do not; `é` is unknown here."""
    found = {
        "WordLevel": (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(special_tokens=CONTROL)),
        "BPE": (models.BPE(unk_token="<unk>"), trainers.BpeTrainer(special_tokens=CONTROL, show_progress=False)),
        "Unigram": (models.Unigram(), trainers.UnigramTrainer(special_tokens=CONTROL, unk_token="<unk>",
                                                              show_progress=False)),
    }  # fmt: skip
    for name, (model, trainer) in found.items():
        tokenizer = control_only(model, trainer, **declared)
        complete(tokenizer, "<|pad|>")
        assert tokenizer.pad_token == ("<|pad|>" if declared else "[MASK]"), name


# one form of an answer


def test_an_answer_has_one_form_on_the_way_in_and_out() -> None:
    assert encode_response(TRAINED, " Eat.\n") == encode_response(TRAINED, "Eat.")
    texts = train_bpe(TEXTS, 300, "<|pad|>", "<|end|>", 32, plain=True)
    assert encode_response(texts, " Eat.\n") == encode_response(texts, " Eat.") != encode_response(texts, "Eat.")
    for tokenizer, continues in ((TRAINED, False), (texts, True)):
        decoded = decode_response(tokenizer, encode_response(tokenizer, " Eat.\n"))
        assert decoded == answer_text(" Eat.\n", continues)


@pytest.mark.parametrize("kind", ["llama3", "gemma", "qwen2", "gpt2", "opt"])
def test_all_answers_of_a_conversation_are_cut_out_with_their_ends(kind: str) -> None:
    tokenizer, _ = complete(kinds.KINDS[kind](), "<|pad|>")
    prompt, response, counted = encode_turns(tokenizer, TALK, "A grain.")
    assert prompt == encode_prompt(tokenizer, TALK[:1])
    assert [*prompt, *response] == encode_prompt(tokenizer, TALK) + encode_response(tokenizer, "A grain.")
    answers = [token for token, imitated in zip(response, counted, strict=True) if imitated]
    assert answers == encode_response(tokenizer, "A drink.") + encode_response(tokenizer, "A grain.")
    spaced = [{**message, "content": f" {message['content']}\n"} if message["role"] == "assistant" else message
              for message in TALK]  # fmt: skip
    assert encode_turns(tokenizer, spaced, "A grain.") == (prompt, response, counted)
    alone = encode_turns(tokenizer, TALK[:1], "A drink.")
    assert alone[:2] == (prompt, encode_response(tokenizer, "A drink."))
    assert all(alone[2])


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_earlier_answers_that_the_template_writes_otherwise_are_refused(kind: str) -> None:
    tokenizer, _ = complete(kinds.KINDS[kind](), "<|pad|>")
    with pytest.raises(UserError, match=r"sft\.turns is all, and the chat template does not write turn 2, an answer"):
        encode_turns(tokenizer, TALK, "A grain.")
