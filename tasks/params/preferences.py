"""Parameters of the stage `preferences`: sampling from the SFT model and judging."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.block import Block

Positive = Annotated[int, Field(ge=1)]


class AnnotatorParams(Block):
    """The simulated annotators of the demo: Bradley-Terry choices on the hidden score."""

    temperature: Annotated[float, Field(ge=0)] = 0.1
    """Noise of the choice, in units of the hidden score; 0 always takes the better answer."""
    flip_rate: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """Share of choices that are reversed by mistake."""


class PreferencesParams(Block):
    """The preference pairs that the reward model learns from."""

    source: Literal["judge", "model", "dataset", "both", "ratings"]
    """`judge`: pairs of the SFT model's samples, judged by the demo's simulated annotators. `model`: the same pairs,
    judged by the language model of the block `judge`. `dataset`: the pairs of the data. `both`: `judge` and
    `dataset`. `ratings`: no pairs are made, since the reward model learns from the ratings of single answers
    (`ingest.rating_column`)."""
    agreement_pairs: Annotated[int, Field(ge=0)] = 200
    """With `source: model`: how many pairs the judge's agreement is measured on before its labels are used: pairs of
    the data, or of the demo's rubric."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    """Answers of the SFT model to each prompt; every two are a pair. With `source: dataset` or `ratings` none is
    sampled."""
    temperature: Annotated[float, Field(gt=0)] = 0.9
    """Sampling temperature; 1 is the model's own distribution."""
    max_new_tokens: Positive = 256
    """Longest answer, in tokens."""
    batch_size: Positive = 128
    """Responses sampled together; changes no sample."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Texts that end a response, besides end-of-sequence; must equal `ppo.stop_tokens`."""
    annotators: AnnotatorParams = AnnotatorParams()
