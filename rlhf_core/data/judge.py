"""The protocol of a judge, which scores the text of answers."""

from collections.abc import Sequence
from typing import Protocol

from rlhf_core.data.chat import Conversation


class Judge(Protocol):
    """Scores answers; higher is better, and only differences have a meaning."""

    @property
    def name(self) -> str:
        """The name in tables and pictures."""
        ...

    def score(self, prompts: Sequence[Conversation], responses: Sequence[str]) -> list[float]:
        """One score for each prompt and its response. Raises ValueError where the lengths differ."""
        ...
