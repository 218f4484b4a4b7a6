"""`control_tokens.py`: whatever a text spells, the control tokens are the template's own, and no character is lost."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_core.data.chat import Conversation
from rlhf_core.data.control_tokens import PRIVATE_USE, chat_ids, text_ids
from rlhf_core.data.tokenizer import complete, decode_response, encode_prompt, encode_response, stop_ids, train_bpe
from rlhf_core.errors import UserError
from rlhf_core.ppo.ptx import cut_text

TEXTS = [
    "Eat oats with yogurt. " * 3,
    "Boiled eggs release sugar slowly.",
    "What shall I eat </s> for <|end|> breakfast?",
]
CHAT_ROLES = ("system", "user", "assistant", "user")
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_TEMPLATE = (
    "{% for m in messages %}{{ (bos_token if loop.first else '') + '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)


def wrapped(backend: Tokenizer, template: str | None, **special: str) -> PreTrainedTokenizerBase:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **special
    )
    return complete(tokenizer, "<|pad|>")[0]


def own() -> PreTrainedTokenizerBase:
    return train_bpe(TEXTS, 300, "<|pad|>", "<|end|>", 4096)


def gpt2() -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    return wrapped(backend, None, eos_token="<|endoftext|>")


def llama3() -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    headers = ["<|start_header_id|>", "<|end_header_id|>", *(f"<|reserved_{i}|>" for i in range(250))]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in headers])
    return wrapped(backend, LLAMA3_TEMPLATE, bos_token="<|begin|>", eos_token="<|eot_id|>")


def llama2() -> PreTrainedTokenizerBase:
    """The model's own vocabulary spells the control tokens, and a space is put before what is encoded."""
    characters = sorted({*map(chr, range(33, 127)), "▁", "\n"})
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in characters), ("▁Eat", -3.0)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return wrapped(backend, LLAMA2_TEMPLATE, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def made(make: Callable[[], PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    return make()


BYTE_LEVEL = [own, gpt2, llama3]
ALL = [*BYTE_LEVEL, llama2]


def specials(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def strewn(tokenizer: PreTrainedTokenizerBase, letters: str | None = None) -> st.SearchStrategy[str]:
    """Texts in which control tokens, halves of them and private characters occur often."""
    spelt = sorted(specials(tokenizer).values())[:12]
    halves = [part for text in spelt for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    anything = st.text(letters or st.characters(exclude_categories=["Cs"]), max_size=6)
    private = [] if letters else [chr(PRIVATE_USE[0]), chr(PRIVATE_USE[1])]
    pieces = st.one_of(st.sampled_from([*spelt, *halves, " ", *private]), anything)
    return st.lists(pieces, max_size=8).map("".join)


def chat(texts: list[str]) -> Conversation:
    return [{"role": role, "content": text} for role, text in zip(CHAT_ROLES, texts, strict=False)]


@pytest.mark.parametrize("make", BYTE_LEVEL)
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_a_chat_has_the_control_tokens_of_its_template_and_all_its_text(
    make: Callable[[], PreTrainedTokenizerBase], data: st.DataObject
) -> None:
    tokenizer = made(make)
    prompt = chat(data.draw(st.lists(strewn(tokenizer), min_size=2, max_size=4)))
    ids, control = encode_prompt(tokenizer, prompt), specials(tokenizer)
    harmless = encode_prompt(tokenizer, [{**message, "content": "Eat"} for message in prompt])
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]
    rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


@pytest.mark.parametrize("make", BYTE_LEVEL)
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_an_answer_survives_and_goes_on_surviving(
    make: Callable[[], PreTrainedTokenizerBase], data: st.DataObject
) -> None:
    """Also what is sampled, stored as text and encoded again: special tokens are left out, what is left is text."""
    tokenizer = made(make)
    text, control = data.draw(strewn(tokenizer)), specials(tokenizer)
    ids = encode_response(tokenizer, text)
    assert tokenizer.decode(ids[:-1], skip_special_tokens=True) == text.strip()
    assert [i for i in ids if i in control] == [tokenizer.eos_token_id]
    sampled = data.draw(st.permutations([*ids, *sorted(control)[:6]]))
    stored = decode_response(tokenizer, sampled)
    assert control.keys().isdisjoint(encode_response(tokenizer, stored, ended=False))
    assert decode_response(tokenizer, encode_response(tokenizer, stored)) == stored


@settings(max_examples=60, derandomize=True)
@given(text=strewn(made(llama2), "Eatos </[]\n"))
@example("Eat </s> oats")
def test_a_vocabulary_that_spells_control_tokens_and_a_space_in_front(text: str) -> None:
    tokenizer = made(llama2)
    text = f"Eat{' '.join(text.split())}."
    ids = encode_response(tokenizer, text)
    assert [i for i in ids if i in specials(tokenizer)] == [tokenizer.eos_token_id]
    assert decode_response(tokenizer, ids) == text
    prompt = encode_prompt(tokenizer, [{"role": "user", "content": text}])
    assert [i for i in prompt if i in specials(tokenizer)] == [tokenizer.bos_token_id]
    assert tokenizer.decode(prompt) == f"<s>[INST] {text} [/INST]"


@pytest.mark.parametrize("make", ALL)
def test_harmless_text_has_the_ids_it_always_had(make: Callable[[], PreTrainedTokenizerBase]) -> None:
    tokenizer = made(make)
    prompt = chat(["Eat </ s> < |end|>", f"\n {chr(PRIVATE_USE[0])}oats ", "Boiled eggs", " What?"])
    assert encode_prompt(tokenizer, prompt) == tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    for message in prompt:
        plain = tokenizer(message["content"].strip(), add_special_tokens=False)["input_ids"]
        assert encode_response(tokenizer, message["content"], ended=False) == plain


@pytest.mark.parametrize("make", ALL)
def test_the_tokenizer_is_left_as_it_was_and_threads_do_not_disturb_each_other(
    make: Callable[[], PreTrainedTokenizerBase],
) -> None:
    tokenizer = make()
    before = tokenizer.backend_tokenizer.to_str()
    eos = tokenizer.eos_token
    texts = [f"Eat {eos} oats", "Eat oats", eos, "What"] * 20
    alone = [text_ids(tokenizer, text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda text: text_ids(tokenizer, text), texts)) == alone
    assert not tokenizer.backend_tokenizer.encode_special_tokens
    assert tokenizer.backend_tokenizer.to_str() == before
    assert stop_ids(tokenizer, None, [eos]) == {tokenizer.eos_token_id}


def test_text_of_ppo_ptx() -> None:
    tokenizer = made(own)
    pieces = cut_text("Eat<|end|> oats <|assistant|>", tokenizer, 4)
    assert specials(tokenizer).keys().isdisjoint(i for piece in pieces for i in piece)
    assert tokenizer.decode([i for piece in pieces for i in piece]) == "Eat<|end|> oats <|assistant|>"


def test_overlapping_spellings_are_all_cut() -> None:
    tokenizer = own()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a><b>", "<b><c>", "<b>"]})
    ids = text_ids(tokenizer, "<a><b><c>")
    assert specials(tokenizer).keys().isdisjoint(ids)
    assert tokenizer.decode(ids) == "<a><b><c>"


def test_control_tokens_added_later_count() -> None:
    tokenizer = own()
    before = text_ids(tokenizer, "say [STOP] now")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[STOP]"]})
    stop = tokenizer.convert_tokens_to_ids("[STOP]")
    assert stop not in text_ids(tokenizer, "say [STOP] now")
    assert tokenizer.decode(before) == tokenizer.decode(text_ids(tokenizer, "say [STOP] now"))


def test_tokens_that_the_template_writes_and_that_are_not_declared_special() -> None:
    """A user cannot say them; the assistant's own `<think>` stays the token that it learnt."""
    tokenizer = own()
    tokenizer.add_tokens(["<think>", "<tool>"])
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ '<think>' }}{% endif %}"
    think, tool = tokenizer.convert_tokens_to_ids(["<think>", "<tool>"])
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "<think> <tool>"}])
    assert (ids.count(think), ids.count(tool)) == (1, 1)
    assert encode_response(tokenizer, "<think>", ended=False) == [think]


def test_a_template_that_writes_the_text_in_another_way_keeps_it_text() -> None:
    tokenizer = own()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper | trim }}<|end|>{% endfor %}"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|END|>"]})
    ids = encode_prompt(tokenizer, [{"role": "user", "content": " <|end|> oats <|END|>"}])
    assert [i for i in ids if i in specials(tokenizer)] == [tokenizer.eos_token_id]


MANGLING = {
    "escaped": "{% for m in messages %}{{ m['content'] | urlencode }}{% endfor %}",
    "cut": "{% for m in messages %}{{ m['content'][:4] }}{% endfor %}",
    "without private characters": (
        "{% for m in messages %}{% for c in m['content'] if c < '\U000f0000' %}{{ c }}{% endfor %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("template", MANGLING.values(), ids=MANGLING)
def test_a_template_that_mangles_what_spells_a_control_token_is_refused(template: str) -> None:
    tokenizer = own()
    tokenizer.chat_template = template
    prompt = chat(["Eat <|end|> oats", "What?"])
    with pytest.raises(
        UserError, match=r"the chat template changes or leaves out parts of it \('Eat <\|end\|> oats'\)"
    ):
        chat_ids(tokenizer, prompt)
    assert chat_ids(tokenizer, chat(["Eat oats", "What?"]))


LEAVING_OUT = {
    "system, user, assistant": "{{ messages[-1]['content'] }}",
    "assistant": "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}{% endfor %}",
    "system": "{% for m in messages if m['role'] in ('user', 'assistant') %}{{ m['content'] | trim }}{% endfor %}",
}


@pytest.mark.parametrize(("roles", "template"), LEAVING_OUT.items(), ids=LEAVING_OUT)
def test_a_template_that_leaves_out_messages_is_refused_where_a_prompt_has_them(roles: str, template: str) -> None:
    tokenizer = own()
    tokenizer.chat_template = template
    said = " and ".join(roles.split(", "))
    with pytest.raises(
        UserError, match=f"leaves out {said} messages of a prompt with the turns system, user, assistant, user"
    ):
        chat_ids(tokenizer, chat(["Be brief.", "Eggs?", "Yes.", "What?"]))
    assert chat_ids(tokenizer, [{"role": "user", "content": "What?"}])


def test_a_tokenizer_that_spells_a_control_token_in_one_character_is_refused() -> None:
    tokenizer = own()
    tokenizer.add_special_tokens({"additional_special_tokens": ["¶"]})
    with pytest.raises(
        UserError, match=r"makes the control token '¶' of plain text \('Eat ¶ oats'\); leave the text out"
    ):
        text_ids(tokenizer, "Eat ¶ oats")
