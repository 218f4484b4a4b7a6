"""Converts the conversations of data sets (lists of messages, raw "Human: … Assistant: …" text) to one form."""

import re
from typing import Any, cast

from rlhf_core.data.chat import Conversation, Message
from tasks.datasets.jsonl import brief

ROLES = ("system", "user", "assistant")
_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKER = {"Human": "user", "Assistant": "assistant"}


class ShapeError(Exception):
    """A value of the wrong type; the message says what was expected, without file, row and column."""


class BrokenConversation(Exception):
    """Turns that do not make a prompt and its answer."""


def is_transcript(value: object) -> bool:
    """Whether `value` is raw text in the form of Anthropic's HH data."""
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def parse_transcript(transcript: str) -> Conversation:
    """Turns of an HH transcript, white space around each removed; an empty last "Assistant:" is the cue, not a turn."""
    parts = _TURN.split(transcript)[1:]
    turns = [_message(_SPEAKER[who], text.strip()) for who, text in zip(parts[::2], parts[1::2], strict=True)]
    if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
        turns.pop()
    return turns


def parse_messages(value: list[Any]) -> Conversation:
    """A list of {role, content}; other keys are left out, null content counts as empty. Raises ShapeError."""
    turns = []
    for number, item in enumerate(value, start=1):
        if not isinstance(item, dict) or not {"role", "content"} <= item.keys():
            raise ShapeError(f"message {number} must be an object with role and content")
        role, content = item["role"], item["content"]
        if role not in ROLES:
            raise ShapeError(f"message {number} has role {brief(role)}, expected one of {', '.join(ROLES)}")
        if content is not None and not isinstance(content, str):
            raise ShapeError(f"message {number} has content of type {type(content).__name__}, expected text")
        turns.append(_message(role, content or ""))
    return turns


def parse_conversation(value: object) -> Conversation:
    """A transcript or a list of messages; any other text is one user turn, null an empty one. Raises ShapeError."""
    if isinstance(value, list):
        return parse_messages(value)
    if value is None or isinstance(value, str):
        return parse_transcript(cast(str, value)) if is_transcript(value) else [_message("user", value or "")]
    raise ShapeError(f"expected text or a list of messages, got {type(value).__name__}")


def parse_reply(value: object, prompt: Conversation, *, strip: bool) -> str:
    """The answer to `prompt`: text, one assistant message, or a whole conversation that begins with the prompt.

    `strip` removes white space around plain text. Raises ShapeError, and BrokenConversation when the turns do not fit.
    """
    if value is None:
        return ""
    if isinstance(value, str) and not is_transcript(value):
        return value.strip() if strip else value
    turns = parse_conversation(value)
    if not turns or turns[-1]["role"] != "assistant" or turns[:-1] not in ([], prompt):
        raise BrokenConversation
    return turns[-1]["content"]


def split_reply(turns: Conversation) -> tuple[Conversation, str]:
    """A whole conversation as prompt and last assistant turn. Raises BrokenConversation when it ends otherwise."""
    if not turns or turns[-1]["role"] != "assistant":
        raise BrokenConversation
    return turns[:-1], turns[-1]["content"]


def split_pair(chosen: Conversation, rejected: Conversation) -> tuple[Conversation, str, str]:
    """Two whole conversations as shared prompt and two answers. Raises BrokenConversation when they differ earlier."""
    prompt, good = split_reply(chosen)
    other, bad = split_reply(rejected)
    if prompt != other:
        raise BrokenConversation
    return prompt, good, bad


def is_prompt(turns: Conversation) -> bool:
    """Whether an answer can follow: the last turn is the user's."""
    return bool(turns) and turns[-1]["role"] == "user"


def _message(role: str, content: str) -> Message:
    return cast(Message, {"role": role, "content": content})
