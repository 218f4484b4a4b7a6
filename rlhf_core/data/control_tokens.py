"""Texts that spell control tokens (`</s>`, `<|assistant|>`): what people type and models say is text, and only a chat
template writes control tokens. How conversations and answers become ids otherwise stands in `tokenizer.py`.

A spelling is cut after its first character, and the parts are encoded one by one: neither of them is a control token.
No setting of the tokenizer is touched (`split_special_tokens` would set one that all threads share), and a text that
spells none is encoded as it always was."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat import Conversation, Message
from rlhf_core.errors import UserError

PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Characters without a meaning: one that a chat does not contain marks the cuts in it."""


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, none of them a control token's. Raises UserError where the tokenizer makes one of plain
    text all the same."""
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


def chat_ids(tokenizer: PreTrainedTokenizerBase, prompt: Conversation) -> list[int]:
    """Token ids of a conversation up to the place where the answer begins; its control tokens are the template's own.

    Raises UserError for a template that does not hand on the texts as they are, where one of them spells a control
    token.
    """
    texts = [_cut(message["content"], _not_to_be_said(tokenizer, message)) for message in prompt]
    cuts = sum(map(len, texts)) - len(texts)
    if not cuts:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        return list(ids)
    plain = _render(tokenizer, prompt)
    mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in plain)
    marked = _render(tokenizer, _with_texts(prompt, [mark.join(parts) for parts in texts]))
    if marked.count(mark) != cuts or marked.replace(mark, "") != plain:
        raise UserError(
            f"{tokenizer.name_or_path}: a message spells a control token and the chat template changes or leaves out "
            f"parts of it ({_shown(next(''.join(parts) for parts in texts if len(parts) > 1))}); leave the row out"
        )
    return _encode(tokenizer, marked.split(mark))


def _not_to_be_said(tokenizer: PreTrainedTokenizerBase, message: Message) -> re.Pattern[str]:
    """What a message must not say as a control token. A template may also write tokens that are not declared special,
    such as `<think>`: an assistant says them, nobody else does."""
    tokens = tuple((token.content, token.special) for token in tokenizer.added_tokens_decoder.values())
    return _pattern(tokens, "" if message["role"] == "assistant" else tokenizer.get_chat_template())


@lru_cache
def _pattern(tokens: tuple[tuple[str, bool], ...], template: str = "") -> re.Pattern[str]:
    """Matches the special ones among the tokens (text, special), and those that stand in the template."""
    texts = [text for text, special in tokens if special or (text in template and not text.isspace())]
    return re.compile("|".join(map(re.escape, filter(None, texts))) or "(?!)")


def _cut(text: str, pattern: re.Pattern[str]) -> list[str]:
    """The parts of a text: a new one begins after the first character of each match, those that overlap included."""
    places, found = [0], pattern.search(text)
    while found:
        places.append(found.start() + 1)
        found = pattern.search(text, found.start() + 1)
    return [text[start:end] for start, end in zip(places, [*places[1:], len(text)], strict=True)]


def _render(tokenizer: PreTrainedTokenizerBase, prompt: Conversation) -> str:
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))


def _with_texts(prompt: Conversation, texts: Sequence[str]) -> Conversation:
    return [cast(Message, {**message, "content": text}) for message, text in zip(prompt, texts, strict=True)]


def _encode(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str]) -> list[int]:
    """The parts of one text, one after the other."""
    ids = _ids(tokenizer, parts[0])
    for part in parts[1:]:
        ids += _ids_inside(tokenizer, part)
    return ids


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ids_inside(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of what does not stand at the beginning: tokenizers such as Llama 2's put a space there, which nobody
    wrote."""
    lead = _ids(tokenizer, "\n")
    ids = _ids(tokenizer, "\n" + text)
    return ids[len(lead) :] if ids[: len(lead)] == lead else _ids(tokenizer, text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
