"""Conversations: their type, identity, and text."""

import hashlib
import json
import unicodedata
from typing import Literal, TypedDict


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


Conversation = list[Message]


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def canonical(prompt: Conversation) -> bytes:
    """Canonical JSON of a prompt: equal prompts have equal bytes, and `json.loads` returns the prompt."""
    text = _ENCODER.encode([{"role": m["role"], "content": m["content"]} for m in prompt])
    return text.encode("utf-8", "surrogatepass")


def prompt_id(prompt: Conversation) -> str:
    """The id of a prompt: 16 hexadecimal digits of the SHA-256 of its canonical JSON."""
    return identity(canonical(prompt))


def identity(canonical_prompt: bytes) -> str:
    """`prompt_id` from the bytes of `canonical`."""
    return hashlib.sha256(canonical_prompt).hexdigest()[:16]


def opening(prompt: Conversation) -> str:
    """The first user message with case, white space and forms of Unicode (NFKC) folded; prompts with the same one are
    never split apart."""
    first = next((m["content"] for m in prompt if m["role"] == "user"), "")
    folded = first.casefold()
    return " ".join((folded if folded.isascii() else unicodedata.normalize("NFKC", folded)).split())


def as_text(prompt: Conversation) -> str:
    """The prompt as text: a single message as it is, several with their roles."""
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
