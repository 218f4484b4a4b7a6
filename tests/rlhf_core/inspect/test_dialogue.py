"""`dialogue.py`: a conversation within the context, and answers that come as text as they are sampled."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.base import ScratchConfig
from rlhf_core.data.tokenizer import decode_response, encode_prompt, stop_ids, train_bpe
from rlhf_core.errors import UserError
from rlhf_core.inspect import dialogue
from rlhf_core.inspect.dialogue import ChatModel, Start, load_chat_model, pieces
from rlhf_core.models.hf import build_llama, save_checkpoint, scalar_model_from
from rlhf_core.models.sampling import sample
from tests.architectures.zoo import download

BYTES = train_bpe(["good morning, naïve café 早餐 🍳"], 300, "<|pad|>", "<|end|>", 128)
"""Every byte is a token: characters beyond ASCII come in several."""
Build = Callable[..., PreTrainedModel]


@pytest.fixture
def chat(build_lm: Build, tokenizer: PreTrainedTokenizerBase) -> ChatModel:
    """Tiny, with a context of 64 tokens."""
    return ChatModel("tiny", build_lm(), tokenizer, frozenset({1}), system="eat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as a stage writes it."""
    config = ScratchConfig(vocabulary=300, context=128, layers=1, hidden=16, intermediate=16, heads=2)
    model = build_llama(config, BYTES, seed=1)
    path = tmp_path_factory.mktemp("models") / "policy"
    save_checkpoint(path, model, BYTES)
    return path


def shown(text: str) -> Iterator[str]:
    yield from pieces(BYTES, BYTES(text, add_special_tokens=False)["input_ids"], frozenset({1}))


def test_half_characters_and_outer_white_space_are_held_back() -> None:
    found = list(shown("  a 🍳 b\n"))
    assert "".join(found) == "a 🍳 b"
    assert len(found) >= 3
    assert not any("�" in piece for piece in found)


@settings(max_examples=60)
@given(st.lists(st.integers(min_value=0, max_value=len(BYTES) - 1), max_size=30))
def test_pieces_are_the_decoded_response(ids: list[int]) -> None:
    """Whatever was sampled: broken bytes and control tokens included."""
    assert "".join(pieces(BYTES, ids, frozenset({1}))) == decode_response(BYTES, ids, {1})


def test_an_answer_is_what_the_sampler_samples(chat: ChatModel) -> None:
    chat.add_message("what shall i eat", 20)
    prompt = encode_prompt(chat.tokenizer, chat.conversation)
    text = "".join(chat.answer((4, 2), 20, 0.8))
    (ids,) = sample(
        chat.model, [prompt], [(4, 2)], max_new_tokens=20, temperature=0.8, stop_ids=chat.stop_ids, pad_id=0,
        batch_size=1,
    ).responses  # fmt: skip
    assert text == decode_response(chat.tokenizer, ids, chat.stop_ids)
    assert chat.conversation[-1] == {"role": "assistant", "content": text}


def test_the_oldest_turns_go_when_the_context_is_full(chat: ChatModel) -> None:
    """The system message stays; what was forgotten is counted in messages, a question with its answer."""
    forgotten = []
    for turn in range(6):
        forgotten.append(chat.add_message("what shall i eat", 20))
        assert len(encode_prompt(chat.tokenizer, chat.conversation)) + 20 <= chat.context
        chat.conversation.append({"role": "assistant", "content": f"an egg {turn}"})
    assert forgotten[0] == 0
    assert sum(forgotten) > 0
    assert all(count % 2 == 0 for count in forgotten)
    roles = [message["role"] for message in chat.conversation]
    assert roles == ["system", *["user", "assistant"] * ((len(roles) - 1) // 2)]
    assert chat.conversation[-1]["content"] == "an egg 5"


def test_a_message_longer_than_the_context_is_refused_and_nothing_forgotten(chat: ChatModel) -> None:
    chat.add_message("i eat", 20)
    chat.conversation.append({"role": "assistant", "content": "tea"})
    before = list(chat.conversation)
    with pytest.raises(UserError, match=r"makes \d+ tokens, and the model reads 64; shorten it"):
        chat.add_message("what shall i eat for breakfast " * 10, 20)
    assert chat.conversation == before


def test_an_answer_ends_where_the_context_does(chat: ChatModel) -> None:
    chat.stop_ids = frozenset()
    chat.add_message("eat", 1)
    room = chat.context - len(encode_prompt(chat.tokenizer, chat.conversation))
    seen: list[int] = []
    real = dialogue.stream_response

    def counted(*arguments: Any, **options: Any) -> Iterator[int]:
        for token in real(*arguments, **options):
            seen.append(token)
            yield token

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialogue, "stream_response", counted)
        list(chat.answer((1,), 1000, 1.0))
    assert len(seen) == room


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_was_read(chat: ChatModel) -> None:
    chat.stop_ids = frozenset()
    chat.add_message("eat", 20)
    answer = chat.answer((1, 3), 20, 1.0)
    first = next(answer)
    answer.close()  # type: ignore[attr-defined]
    assert chat.conversation[-1]["role"] == "assistant"
    assert chat.conversation[-1]["content"].startswith(first)
    chat.reset()
    assert chat.conversation == [{"role": "system", "content": "eat"}]


def test_a_folder_becomes_a_chat_model(folder: Path) -> None:
    found = load_chat_model(folder, "policy")
    assert (found.name, found.context) == ("policy", 128)
    assert found.stop_ids == {BYTES.eos_token_id}
    assert not any(parameter.requires_grad for parameter in found.model.parameters())
    half = load_chat_model(folder, "policy", precision="bfloat16", start=Start(folder, 0.5))
    assert {p.dtype for model in (found, half) for p in model.model.parameters()} == {torch.float32, torch.bfloat16}
    half.add_message("eat", 4)
    assert list(half.answer((1, 3), 4, 1.0))


def test_stop_tokens_of_the_folder_end_answers(folder: Path) -> None:
    found = load_chat_model(folder, "policy")
    for named, expected in ((7, {1, 7}), ([7, 8], {1, 7, 8}), (None, {1})):
        found.model.generation_config.eos_token_id = named
        assert stop_ids(found.tokenizer, found.model) == expected


def test_rule_26_a_folder_that_no_stage_has_made_ends_answers_as_its_template_does(tmp_path: Path) -> None:
    """It speaks as in rollouts: its own end of turn, and every eos of its generation_config."""
    download("gemma3", tmp_path / "raw")
    found = load_chat_model(tmp_path / "raw", "raw")
    ends = found.tokenizer.convert_tokens_to_ids(["<end_of_turn>", "<eos>"])
    assert found.stop_ids == set(ends)
    assert found.tokenizer.eos_token == "<end_of_turn>"


def test_folders_without_a_language_model_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / "README.md").write_text("rloo is switched off.\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    save_checkpoint(tmp_path / "reward", scalar_model_from(folder, seed=1), BYTES)
    for name, words in {
        "nowhere": "no such folder",
        "off": "holds no model .*rloo is switched off",
        "broken": "config.json cannot be read",
        "reward": "scores, not words",
    }.items():
        with pytest.raises(UserError, match=words):
            load_chat_model(tmp_path / name, name)


def test_a_model_of_texts_continues_each_message_by_itself(build_lm: Build) -> None:
    texts = train_bpe(["good morning"], 300, "<|pad|>", "<|end|>", 128, plain=True)
    chat = ChatModel("texts", build_lm(), texts, frozenset({1}))
    for message in ("good", "morning good"):
        assert chat.add_message(message, 8) == 0
        assert chat.conversation == [{"role": "user", "content": message}]
        chat.conversation.append({"role": "assistant", "content": " morning"})


def test_the_white_space_before_a_continuation_is_shown() -> None:
    texts = train_bpe(["good morning"], 300, "<|pad|>", "<|end|>", 128, plain=True)
    assert "".join(pieces(texts, texts("  a b ")["input_ids"])) == "  a b"
