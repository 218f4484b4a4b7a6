"""Conversations: their shape, their identity, and how two of them are compared. No tokens here (see `tokenizer.py`)."""

import hashlib
import json
from typing import Literal, TypedDict


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


Conversation = list[Message]


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def canonical(prompt: Conversation) -> bytes:
    """The prompt as JSON without a choice: equal prompts have equal bytes, and `json.loads` gives the prompt back."""
    text = _ENCODER.encode([{"role": m["role"], "content": m["content"]} for m in prompt])
    return text.encode("utf-8", "surrogatepass")


def prompt_id(prompt: Conversation) -> str:
    """The identity of a prompt: 16 hexadecimal digits of the SHA-256 of its canonical JSON."""
    return identity(canonical(prompt))


def identity(canonical_prompt: bytes) -> str:
    """The `prompt_id` of what `canonical` returns."""
    return hashlib.sha256(canonical_prompt).hexdigest()[:16]


def opening(prompt: Conversation) -> str:
    """The first user message with case and white space folded: prompts that share it never stand on two sides of a
    split."""
    first = next((m["content"] for m in prompt if m["role"] == "user"), "")
    return " ".join(first.casefold().split())


def as_text(prompt: Conversation) -> str:
    """The prompt for human eyes: a single user turn as it is, anything longer with the speakers' names."""
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
