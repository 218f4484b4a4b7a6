"""Encoding of texts that contain the spelling of control tokens (`</s>`, `<|assistant|>`): only a chat template writes
control tokens, everything else is text.

A spelling is cut after its first character, and the parts are encoded one by one. The tokenizer's settings are not
changed (`split_special_tokens` is shared by all threads)."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat import Conversation, Message
from rlhf_core.errors import UserError

PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Characters of no meaning; one that the chat does not contain marks the cuts."""


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, without control tokens. Raises UserError where the tokenizer makes one from plain text."""
    control = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = _encode(tokenizer, _cut(text, _pattern(tuple((spelling, True) for spelling in control.values()))))
    control.pop(tokenizer.unk_token_id, None)
    if not control.keys().isdisjoint(ids):
        found = next(control[i] for i in ids if i in control)
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer makes the control token {found!r} of plain text "
            f"({_shown(text)}); leave the text out, or use another tokenizer"
        )
    return ids


def chat_ids(tokenizer: PreTrainedTokenizerBase, prompt: Conversation, answered: bool = False) -> list[int]:
    """Token ids of a conversation up to the start of the answer, or of one whose last message is the answer; all
    control tokens are the template's.

    Raises UserError where the template leaves out a message, and where a message spells a control token and the
    template changes the message.
    """
    roles = tuple(message["role"] for message in prompt)
    _require_all_turns(tokenizer, tokenizer.get_chat_template(), roles, answered)
    texts = [_cut(message["content"], _control_spellings(tokenizer, message)) for message in prompt]
    cuts = sum(map(len, texts)) - len(texts)
    if not cuts:
        return list(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=not answered, tokenize=True, return_dict=False)
        )
    plain = _render(tokenizer, prompt, answered)
    mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in plain)
    marked = _render(tokenizer, _with_texts(prompt, [mark.join(parts) for parts in texts]), answered)
    if marked.count(mark) != cuts or marked.replace(mark, "") != plain:
        raise UserError(
            f"{tokenizer.name_or_path}: a message spells a control token and the chat template changes or leaves out "
            f"parts of it ({_shown(next(''.join(parts) for parts in texts if len(parts) > 1))}); leave the row out"
        )
    return _encode(tokenizer, marked.split(mark))


@lru_cache(maxsize=32)
def _require_all_turns(
    tokenizer: PreTrainedTokenizerBase, template: str, roles: tuple[str, ...], answered: bool
) -> None:
    """Raise UserError where the template leaves out one of the messages with these roles, in this order. The probe's
    texts are numbers, which no template changes."""
    probe = [cast(Message, {"role": role, "content": str(7305 + place)}) for place, role in enumerate(roles)]
    rendered = _render(tokenizer, probe, answered)
    left_out = [message["role"] for message in probe if message["content"] not in rendered]
    if left_out:
        raise UserError(
            f"{tokenizer.name_or_path}: its chat template leaves out {_and(left_out)} messages of a prompt with the "
            f"turns {', '.join(roles)}; correct chat_template.jinja, remove it for the one that the stage `base` adds, "
            "or leave such prompts out"
        )


def _and(names: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(names))


def _control_spellings(tokenizer: PreTrainedTokenizerBase, message: Message) -> re.Pattern[str]:
    """Spellings that are text in this message. A template may also write tokens that are not declared special, such as
    `<think>`: they are control tokens in an assistant's message only."""
    tokens = tuple((token.content, token.special) for token in tokenizer.added_tokens_decoder.values())
    return _pattern(tokens, "" if message["role"] == "assistant" else tokenizer.get_chat_template())


@lru_cache
def _pattern(tokens: tuple[tuple[str, bool], ...], template: str = "") -> re.Pattern[str]:
    """Matches the special ones among the tokens (text, special), and those that the template contains."""
    texts = [text for text, special in tokens if special or (text in template and not text.isspace())]
    return re.compile("|".join(map(re.escape, filter(None, texts))) or "(?!)")


def _cut(text: str, pattern: re.Pattern[str]) -> list[str]:
    """The text, cut after the first character of each match, overlapping ones included."""
    places, found = [0], pattern.search(text)
    while found:
        places.append(found.start() + 1)
        found = pattern.search(text, found.start() + 1)
    return [text[start:end] for start, end in zip(places, [*places[1:], len(text)], strict=True)]


def _render(tokenizer: PreTrainedTokenizerBase, prompt: Conversation, answered: bool) -> str:
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=not answered, tokenize=False))


def _with_texts(prompt: Conversation, texts: Sequence[str]) -> Conversation:
    return [cast(Message, {**message, "content": text}) for message, text in zip(prompt, texts, strict=True)]


def _encode(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str]) -> list[int]:
    """Token ids of the parts of one text."""
    ids = _ids(tokenizer, parts[0])
    for part in parts[1:]:
        ids += _ids_inside(tokenizer, part)
    return ids


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ids_inside(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a part that is not the first: tokenizers such as Llama 2's add a space before a text."""
    lead = _ids(tokenizer, "\n")
    ids = _ids(tokenizer, "\n" + text)
    return ids[len(lead) :] if ids[: len(lead)] == lead else _ids(tokenizer, text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
