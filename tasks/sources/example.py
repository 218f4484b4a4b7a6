"""What every source hands on: one normalised row, and where it came from. How a file's columns become one stands in
`shapes.py`, what is thrown away in `cleaning.py`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlhf_core.chat import Conversation, opening, prompt_id

Kind = Literal["demonstration", "pair", "prompt"]

RAW = Path("data/raw")
"""Where raw data lie, relative to the root of the repository: also their name in messages and in dropped.jsonl."""


@dataclass(slots=True)
class Example:
    """One row of raw data: a prompt, and a response, a pair, or nothing more."""

    file: str
    """Name for messages: the path from the root of the repository, or dataset and split."""
    row: int
    """Line or record number, from 1."""
    heldout: bool
    prompt: Conversation
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    broken: bool = False
    """The turns do not make a prompt and its answers; `cleaning` drops or refuses such rows."""
    prompt_id: str = field(init=False, default="")
    opening: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.prompt_id = prompt_id(self.prompt)
        self.opening = opening(self.prompt)

    @property
    def kind(self) -> Kind:
        """What the row brings besides its prompt."""
        if self.chosen is not None:
            return "pair"
        return "prompt" if self.response is None else "demonstration"

    @property
    def answers(self) -> list[str]:
        """The texts that answer the prompt: none, the response, or chosen and rejected."""
        return [text for text in (self.response, self.chosen, self.rejected) if text is not None]
