"""Parameters of the stage `preferences`: sampling from the SFT model and judging."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.block import Block

Positive = Annotated[int, Field(ge=1)]


class AnnotatorParams(Block):
    """The demo's simulated annotators: Bradley-Terry choices on the hidden score."""

    temperature: Annotated[float, Field(ge=0)] = 0.1
    """Noise of the choice, in units of the hidden score. 0: always the better answer."""
    flip_rate: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """Share of choices that are reversed by mistake."""


class PreferencesParams(Block):
    """The preference pairs for the reward model."""

    source: Literal["judge", "model", "dataset", "both", "ratings"]
    """`judge`: answers of the SFT model, compared by the demo's annotators. `model`: the same, compared by the language
    model of `judge`. `dataset`: pairs of the data. `both`: `judge` and `dataset`. `ratings`: no pairs; the reward model
    learns from `ingest.rating_column`."""
    agreement_pairs: Annotated[int, Field(ge=0)] = 200
    """With `source: model`: pairs with a known order, on which the judge's agreement is measured first."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    """Sampled answers per prompt; every two are a pair. Not used with `dataset` or `ratings`."""
    temperature: Annotated[float, Field(gt=0)] = 0.9
    """Sampling temperature."""
    max_new_tokens: Positive = 256
    """Longest answer, in tokens."""
    batch_size: Positive = 128
    """Answers sampled at once. Changes only rounding."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Must equal `ppo.stop_tokens`."""
    annotators: AnnotatorParams = AnnotatorParams()
