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
    """Number of distinct prompts, divided by `ingest.split`."""
    domains: Annotated[int, Field(ge=1, le=9)] = 2
    """Domains of life in the prompts; a small model learns a small world better."""
    needs: Annotated[int, Field(ge=2, le=7)] = 2
    """Number of needs that the prompts of each domain name (for someone with diabetes, on a small budget, …)."""
    demonstrations_per_prompt: Annotated[int, Field(ge=1)] = 6
    """Answers of mixed quality to each SFT prompt."""


class FilesParams(Block):
    """Local files below `data/raw/`, copied there by `leash import PATH`."""

    path: str | list[str]
    """A folder or a file below data/raw/, the name that `leash import` prints; or a list of them."""
    heldout_files: list[str] = Field(default_factory=lambda: ["test*", "heldout*"])
    """Patterns of file names whose rows are held out. Where no file matches, `ingest.split.heldout` applies."""

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
    """A dataset of the Hugging Face hub at a fixed revision, or a local dataset folder below data/raw/."""

    dataset: BelowRaw
    """`owner/name` on the hub, or a folder below data/raw/."""
    revision: str | None = None
    """Commit hash, 40 hexadecimal digits; required for a hub id, because a branch can change."""
    name: str | None = None
    """Configuration, for a dataset that has several."""
    train_split: str = "train"
    """Split to train on."""
    heldout_split: str | None = "test"
    """Its rows are held out; null: `ingest.split.heldout` applies."""

    @model_validator(mode="after")
    def _pinned(self) -> "HuggingFaceParams":
        if self.revision is not None and not re.fullmatch("[0-9a-f]{40}", self.revision):
            raise ValueError(f"revision must be a commit hash of 40 hexadecimal digits, not {self.revision!r}")
        return self


class SplitParams(Block):
    """Shares of the training prompts (they sum to 1), and what is taken from them. In data with demonstrations, pairs
    and bare prompts, each kind goes to its own share; a share without rows of its own kind takes from the others."""

    share: bool | None = None
    """`true`: SFT, reward model and PPO use all training prompts that have rows of their kind, and `demonstrations`,
    `preferences` and `ppo` are not used; one set of validation prompts is kept from all three. `false`: a prompt serves
    one purpose. null: true with fewer than 3,000 training prompts, where a part of them is too few for a reward
    model, and where no reward model is trained, which would leave its part unused."""
    demonstrations: Fraction = 0.5
    """Share of the training prompts for SFT; with `sft.enabled: false` it goes to the other two."""
    preferences: Fraction = 0.3
    """Share for the pairs of the reward model."""
    ppo: Fraction = 0.2
    """Share of the training prompts for PPO's rollouts."""
    heldout: Fraction = 0.1
    """Share of all prompts that is held out, where the data have no held-out file."""
    validation: Fraction = 0.1
    """Share of the SFT and preference prompts used for validation."""

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
    """`demo`: the built-in data. `files`: local files. `huggingface`: a dataset of the hub."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Seed of the built-in data and of every split. The run's `seed` is another one: training can be repeated on the
    same data."""
    demo: DemoParams | None = None
    files: FilesParams | None = None
    huggingface: HuggingFaceParams | None = None
    labels: BelowRaw | None = None
    """Labelled pairs that are added to the source: a file or a folder below data/raw/, as `leash import` prints it.
    They go to the reward model, and no other prompt changes its share. Pairs of held-out prompts are leaks."""
    opening_words: Annotated[int, Field(ge=1)] = 4
    """In data of texts (rows with the column `text`): how many words, separated by white space, are the prompt. The
    rest is what SFT learns to continue it with. A text without further words is a bad row (`too_short`)."""
    rating_column: Annotated[str, Field(min_length=1)] | None = None
    """The column of demonstrations with a number for each (0 and 1, or a score; higher is better), which the reward
    model learns from with `preferences.source: ratings`."""
    sft_rating_above: float | None = None
    """Of rated demonstrations SFT imitates those with a higher rating. null: halfway between the lowest and the highest
    rating. A rating is a value of `rating_column`, or the `label` (true or false, 1 or 0) of a demonstration."""
    split: SplitParams = SplitParams()
    max_characters: Annotated[int, Field(ge=1)] = 20_000
    """A row whose prompt or answer is longer than this is a bad row."""
    on_bad_row: Literal["drop", "refuse"] = "drop"
    """Rows with empty or undecodable text, broken conversations, chosen == rejected, too long rows and duplicates:
    leave them out and count them (`drop`), or stop with an error (`refuse`)."""
    on_leak: Literal["drop", "refuse"] = "refuse"
    """A held-out prompt that is also a training prompt: leave out the training row (`drop`), or stop with an error
    (`refuse`)."""

    @model_validator(mode="after")
    def _source_has_its_block(self) -> "IngestParams":
        if getattr(self, self.source) is None:
            raise ValueError(f"source is {self.source}, so the block ingest.{self.source} is needed")
        return self
