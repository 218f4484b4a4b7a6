"""Parameters of the stage `ingest`: where the data come from and how they are split."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_core.config.block import Block
from rlhf_core.config.paths import BelowRaw, stay_below

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class DemoParams(Block):
    """The built-in demo data."""

    prompts: Annotated[int, Field(ge=20)] = 2880
    """Distinct prompts, before the split."""
    domains: Annotated[int, Field(ge=1, le=9)] = 2
    """Topics of the prompts. Fewer are easier for a small model."""
    needs: Annotated[int, Field(ge=2, le=7)] = 2
    """Needs per topic that prompts mention (diabetes, a small budget, …)."""
    demonstrations_per_prompt: Annotated[int, Field(ge=1)] = 6
    """Answers of mixed quality per SFT prompt."""


class FilesParams(Block):
    """Local files below data/raw/, copied there by `leash import PATH`."""

    path: str | list[str]
    """File or folder below data/raw/, as `leash import` prints it; or a list of them."""
    heldout_files: list[str] = Field(default_factory=lambda: ["test*", "heldout*"])
    """Patterns of file names whose rows are held out. If none matches, `ingest.split.heldout` applies."""

    @field_validator("path", mode="before")
    @classmethod
    def _stay_below(cls, value: object) -> object:
        listed = value if isinstance(value, list) else [value]
        if not listed or not all(isinstance(path, str) for path in listed):
            raise ValueError("must be the name of a file or folder below data/raw/, or a list of them")
        for path in listed:
            stay_below(str(path))
        return value

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        return self.path if isinstance(self.path, list) else [self.path]


class HuggingFaceParams(Block):
    """A dataset on the Hugging Face Hub, or a dataset folder below data/raw/."""

    dataset: BelowRaw
    """`owner/name` on the Hub, or a folder below data/raw/."""
    revision: str | None = None
    """Commit hash, 40 hexadecimal digits. Required on the Hub, because a branch can change."""
    name: str | None = None
    """Configuration, for a dataset that has several."""
    train_split: str = "train"
    """Split to train on."""
    heldout_split: str | None = "test"
    """Split whose rows are held out. null: `ingest.split.heldout` applies."""

    @model_validator(mode="after")
    def _pinned(self) -> "HuggingFaceParams":
        if self.revision is not None and not re.fullmatch("[0-9a-f]{40}", self.revision):
            raise ValueError(f"revision must be a commit hash of 40 hexadecimal digits, not {self.revision!r}")
        return self


class SplitParams(Block):
    """Shares of the prompts, all above 0. Of the training prompts, `demonstrations`, `preferences` and `ppo` sum to 1:
    demonstrations, pairs and bare prompts each go to their own share, and a share without rows of its kind takes from
    the others."""

    share: bool | None = None
    """`true`: SFT, reward model and PPO all use every training prompt with suitable rows, and the three shares are
    ignored. `false`: each prompt has one use. null: `true` with fewer than 3,000 training prompts, or without a reward
    model."""
    demonstrations: Fraction = 0.5
    """For SFT; without SFT, divided between the other two."""
    preferences: Fraction = 0.3
    """For the reward model."""
    ppo: Fraction = 0.2
    """For PPO's rollouts."""
    heldout: Fraction = 0.1
    """Of all prompts, if the data have no held-out rows."""
    validation: Fraction = 0.1
    """Of the SFT and preference prompts."""

    @model_validator(mode="after")
    def _sums_to_one(self) -> "SplitParams":
        total = self.demonstrations + self.preferences + self.ppo
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"demonstrations + preferences + ppo must be 1, they are {total:g}")
        for name in ("demonstrations", "preferences", "ppo", "heldout", "validation"):
            if getattr(self, name) <= 0.0:
                raise ValueError(f"{name} must be greater than 0")
        return self


class IngestParams(Block):
    """Source and preparation of the data."""

    source: Literal["demo", "files", "huggingface"]
    """The block of this name is required."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Seed of the built-in data and of all splits; the run's `seed` does not change them."""
    demo: DemoParams | None = None
    files: FilesParams | None = None
    huggingface: HuggingFaceParams | None = None
    labels: BelowRaw | None = None
    """Labelled pairs to add for the reward model: a file or folder below data/raw/. They change no other prompt's
    share; pairs of held-out prompts are leaks."""
    opening_words: Annotated[int, Field(ge=1)] = 4
    """In rows with the column `text`: number of words that are the prompt; the rest is the answer. Shorter texts are
    bad rows (`too_short`)."""
    rating_column: Annotated[str, Field(min_length=1)] | None = None
    """Column of demonstrations with a number (higher is better), from which the reward model learns. Needs
    `preferences.source: ratings`."""
    sft_rating_above: float | None = None
    """SFT imitates rated demonstrations only above this rating (in `rating_column`, else their `label`: 0 or 1, false
    or true). null: halfway between the lowest and the highest rating."""
    split: SplitParams = SplitParams()
    max_characters: Annotated[int, Field(ge=1)] = 20_000
    """Longest prompt or answer; longer rows are bad rows."""
    on_bad_row: Literal["drop", "refuse"] = "drop"
    """Empty, undecodable, too long or repeated rows, broken conversations, pairs of equal answers: leave them out and
    count them, or stop with an error."""
    on_leak: Literal["drop", "refuse"] = "refuse"
    """Training rows with the first user message of a held-out row: leave them out, or stop with an error."""

    @model_validator(mode="after")
    def _source_has_its_block(self) -> "IngestParams":
        if getattr(self, self.source) is None:
            raise ValueError(f"source is {self.source}, so the block ingest.{self.source} is needed")
        return self
