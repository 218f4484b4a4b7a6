"""One normalised row of raw data, and where it came from."""

import json
import re
from pathlib import Path
from typing import Any, Literal

from rlhf_core.data.chat import Conversation, canonical, identity, opening

Kind = Literal["demonstration", "pair", "prompt"]

RAW = Path("data/raw")
"""The folder of raw data, relative to the root of the repository; also its name in messages and in dropped.jsonl."""


class Example:
    """One row of raw data: a prompt, and a response, a pair, or nothing more. A text is a prompt until it is `cut`.

    The prompt is stored as its canonical JSON, and decoded at each access: a million conversations of lists and
    dictionaries would take a gigabyte more.
    """

    __slots__ = (
        "_extra", "_prompt", "annotator", "broken", "chosen", "ended", "file", "heldout", "is_text", "low", "opening",
        "prompt_id", "rating", "rejected", "response", "row", "tie",
    )  # fmt: skip

    def __init__(
        self,
        file: str,
        row: int,
        heldout: bool,
        prompt: Conversation,
        response: str | None = None,
        chosen: str | None = None,
        rejected: str | None = None,
        broken: str = "",
        annotator: str | None = None,
        tie: bool = False,
        ended: tuple[bool, bool] | None = None,
        extra: dict[str, Any] | None = None,
        is_text: bool = False,
        rating: float | None = None,
    ) -> None:
        self.file = file
        """Name for messages: the path from the root of the repository, or dataset and split."""
        self.row = row
        """Line or record number, from 1."""
        self.heldout = heldout
        self.response, self.chosen, self.rejected = response, chosen, rejected
        self.broken = broken
        """Why the turns do not make a prompt and its answers; empty where they do. `cleaning` drops or refuses such
        rows."""
        self.annotator = annotator
        """The person who labelled the pair."""
        self.tie = tie
        """The annotator has no preference; `chosen` and `rejected` are two answers in any order."""
        self.ended = ended
        """Whether chosen and rejected ended, or were cut off at a limit; None where the row does not say it."""
        self.rating = rating
        """How good the response is, where the row says it; higher is better."""
        self.low = False
        """Rated too low to imitate, see `ratings.mark_low`."""
        self.is_text = is_text
        """The prompt is a whole text, its opening and the rest."""
        self._extra = json.dumps(extra, ensure_ascii=False, sort_keys=True) if extra else None
        self._prompt = canonical(prompt)
        self.prompt_id = identity(self._prompt)
        self.opening = opening(prompt)

    @property
    def prompt(self) -> Conversation:
        """The conversation that is answered: a new list each time."""
        turns: Conversation = json.loads(self._prompt)
        return turns

    @property
    def extra(self) -> dict[str, Any]:
        """The further columns of the row: a new dictionary each time."""
        found: dict[str, Any] = json.loads(self._extra) if self._extra else {}
        return found

    @property
    def kind(self) -> Kind:
        """What the row has besides its prompt."""
        if self.chosen is not None:
            return "pair"
        return "prompt" if self.response is None and not self.is_text else "demonstration"

    @property
    def answers(self) -> list[str]:
        """The texts that answer the prompt: none, the response, or chosen and rejected."""
        return [text for text in (self.response, self.chosen, self.rejected) if text is not None]

    def cut(self, words: int) -> "Example":
        """A text as its first words (separated by white space), which are the prompt, and the rest, which begins with
        the white space between them. Any other row itself, and a text without further words."""
        text = self.prompt[0]["content"].strip() if self.is_text else ""
        found = re.match(rf"\S+(?:\s+\S+){{{words - 1}}}(?=\s)", text)
        if found is None:
            return self
        prompt: Conversation = [{"role": "user", "content": found.group()}]
        return Example(self.file, self.row, self.heldout, prompt, text[found.end() :], extra=self.extra)
