"""Converts the conversations of data sets to one form: lists of messages with the usual names of roles and keys, also
as JSON or Python text, {input, output} turns, and raw "Human: … Assistant: …" text."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, cast

from rlhf_core.data.chat import Conversation, Message
from tasks.datasets.jsonl import brief

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
} | dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "model"), "assistant")
KEYS = (("role", "content"), ("from", "value"))
"""Names that a message's speaker and text have."""
METADATA = frozenset((
    "name", "id", "message_id", "timestamp", "date", "time", "language", "lang", "model", "header", "state", "country",
    "hashed_ip", "turn_identifier", "openai_moderation", "detoxify_moderation", "metadata", "meta", "source", "url",
))  # fmt: skip
"""Keys of a message whose texts are about it, and no part of it."""
CARRIERS = frozenset((
    "tool_calls", "tool_call_id", "tools", "function_call", "functions", "reasoning_content", "reasoning", "thinking",
    "refusal", "audio", "image", "images", "speech", "video",
))  # fmt: skip
"""Keys whose content a text model does not see; never left out silently."""
REASONING = ("reasoning_content", "reasoning", "thinking")
_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKER = {"Human": "user", "Assistant": "assistant"}
_IN_TEXT = re.compile(r"""(?:array\()?\[?\s*\{\s*(["'])(role|from)\1\s*:""")
"""The beginning of messages in text."""
_NUMPY = re.compile(r"^array\(|,\s*dtype=object\)")


class ShapeError(Exception):
    """A value that cannot be read; the message says what was expected, without file and row."""


class BrokenConversation(Exception):
    """Turns that do not make a prompt and its answer; the message says why."""


def is_transcript(value: object) -> bool:
    """Whether `value` is raw text in the form of Anthropic's HH data."""
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def parse_transcript(transcript: str) -> Conversation:
    """Turns of an HH transcript, white space around each removed; an empty last "Assistant:" is the cue, not a turn."""
    parts = _TURN.split(transcript)[1:]
    turns = [message(_SPEAKER[who], text.strip()) for who, text in zip(parts[::2], parts[1::2], strict=True)]
    return without_cue(turns)


def without_cue(turns: Conversation) -> Conversation:
    """The turns without an empty last one of the assistant."""
    return turns[:-1] if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"] else turns


def messages_in(text: str) -> list[Any] | None:
    """The messages that a text holds as JSON or as Python wrote them (also numpy, without commas between them); None
    for any other text. Raises ShapeError for text that begins like messages and cannot be read."""
    found = loaded(text)
    listed, turns = (found, (*KEYS, ("input", "output"))) if isinstance(found, list) else ([found], KEYS)
    if listed and all(isinstance(item, dict) and any(set(keys) <= item.keys() for keys in turns) for item in listed):
        return listed
    if isinstance(found, str) and _IN_TEXT.match(text.lstrip()):
        raise ShapeError(f"looks like messages in a text, and cannot be read ({brief(text)}); write it as JSON")
    return None


def loaded(value: object) -> Any:
    """The list or object that a text holds, as JSON, or as Python or numpy wrote it; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{", "array(")):
        return value
    text = _NUMPY.sub("", value.strip())
    for read in (json.loads, ast.literal_eval, lambda t: ast.literal_eval(re.sub(r"\}\s*\n\s*\{", "}, {", t))):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, list | dict) else value
    return value


def parse_messages(value: list[Any]) -> Conversation:
    """A list of {role, content}, {from, value} or {input, output}. Raises ShapeError for messages of another form, for
    null in place of content, and for other keys with content, such as tool calls and reasoning."""
    turns = []
    for number, item in enumerate(value, start=1):
        if not isinstance(item, dict):
            raise ShapeError(f"message {number} must be an object with role and content, got {brief(item)}")
        if {"input", "output"} <= item.keys():
            for speaker, name in (("user", "input"), ("assistant", "output")):
                if not isinstance(item[name], str | None):
                    raise ShapeError(f"message {number} has {name} {brief(item[name])}, expected text")
                turns.append(message(speaker, item[name] or ""))
            continue
        who, what = next((keys for keys in KEYS if set(keys) <= item.keys()), ("", ""))
        if not who:
            raise ShapeError(f"message {number} must be an object with role and content")
        if item.keys() != {who, what}:
            _refuse_content(item, {who, what}, number, last=number == len(value))
        role = ROLES.get(item[who].lower()) if isinstance(item[who], str) else None
        if role is None:
            raise ShapeError(f"message {number} has role {brief(item[who])}, expected system, user or assistant")
        if item[what] is None:
            raise ShapeError(f"message {number} has no {what} (null); write a text, or remove the row")
        text = message_text(item[what], f"message {number} has {what}")
        if role != "system" or text.strip():  # many exports write an empty one into every row
            turns.append(message(role, text))
    return turns


def message_text(value: object, where: str = "a message has content") -> str:
    """Text, also as a list of parts that are all text. Raises ShapeError for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        if other := [part.get("type") for part in value if not isinstance(part.get("text"), str)]:
            raise ShapeError(f"{where} of type {brief(other[0])}, expected text")
        return "\n".join(part["text"] for part in value)
    raise ShapeError(f"{where} of type {type(value).__name__}, expected text")


def _refuse_content(item: Mapping[str, Any], read: set[str], number: int, *, last: bool) -> None:
    for key, value in item.items():
        untrained = last and key in ("weight", "train") and value in (0, False)
        if key in read or not (value or untrained):
            continue
        if key in REASONING and isinstance(value, str):
            raise ShapeError(
                f"message {number} has {key}, which would be lost; `leash import --think` writes it into the text "
                f"(<think>…</think>), --ignore {key} leaves it out"
            )
        if untrained or key in CARRIERS or (key not in METADATA and carries(value)):
            raise ShapeError(
                f"message {number} has {key}, which is not read; `leash import --ignore {key}` leaves it out"
            )


def carries(value: object) -> bool:
    """Whether a value is more than a number, a name or an id: a text of several words, or a list or object with
    texts."""
    if isinstance(value, str):
        return len(value.split(maxsplit=1)) > 1
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(bool(item) if isinstance(item, str) else carries(item) for item in inner)


def parse_conversation(value: object) -> Conversation:
    """Messages, one message, a transcript; any other text is one user turn, null an empty one. Raises ShapeError."""
    if isinstance(value, str):
        if is_transcript(value):
            return parse_transcript(value)
        found = messages_in(value)
        return [message("user", unlisted(value))] if found is None else parse_messages(found)
    if isinstance(value, list | dict):
        return parse_messages(value if isinstance(value, list) else [value])
    if value is None:
        return [message("user", "")]
    raise ShapeError(f"expected text or a list of messages, got {type(value).__name__}")


def unlisted(text: str) -> str:
    """The one text that a text holds as a list, `["Hello"]`; any other text as it is. Raises ShapeError for a list of
    several texts."""
    if not text.lstrip().startswith(('["', "['")) or not isinstance(found := loaded(text), list):
        return text
    if len(found) == 1 and isinstance(found[0], str):
        return found[0]
    if found and all(isinstance(item, str) for item in found):
        raise ShapeError(f"is a list of {len(found)} texts ({brief(text)}); write the turns as messages")
    return text


def parse_reply(value: object, prompt: Conversation, *, strip: bool) -> tuple[Conversation, str]:
    """The prompt and its answer: text, an assistant's message, or a whole conversation in which the prompt occurs; what
    comes before its last turn is then the prompt.

    `strip` removes white space around plain text. Raises ShapeError, and BrokenConversation when the turns do not fit.
    """
    if value is None:
        return prompt, ""
    if isinstance(value, str) and not is_transcript(value) and messages_in(value) is None:
        return prompt, value.strip() if strip else value
    head, reply = split_reply(parse_conversation(value))
    if head == prompt[len(prompt) - len(head) :]:
        return prompt, reply
    texts = {turn["content"].strip() for turn in head}
    if any(turn["content"].strip() not in texts for turn in prompt if turn["role"] != "system"):
        raise BrokenConversation("the conversation does not contain the prompt")
    system = [turn for turn in prompt if turn["role"] == "system" and turn not in head]
    if system and head[0]["role"] == "system":
        raise BrokenConversation("the conversation has another system message than the prompt")
    return system + head, reply


def split_reply(turns: Conversation) -> tuple[Conversation, str]:
    """A whole conversation as prompt and last assistant turn. Raises BrokenConversation when it ends otherwise."""
    if not turns or turns[-1]["role"] != "assistant":
        raise BrokenConversation(f"the last turn is {turns[-1]['role'] if turns else 'missing'}, expected assistant")
    return turns[:-1], turns[-1]["content"]


def is_prompt(turns: Conversation) -> bool:
    """Whether an answer can follow: the last turn is the user's."""
    return bool(turns) and turns[-1]["role"] == "user"


def message(role: str, content: str) -> Message:
    """One turn."""
    return cast(Message, {"role": role, "content": content})
