"""Parameters of the stage `base`: tokenizer and base model."""

import re
from typing import Literal

from pydantic import model_validator

from rlhf_core.config.base import PretrainConfig, ScratchConfig
from rlhf_core.config.block import Block
from rlhf_core.config.paths import BelowRaw

MARKER = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
"""What the chat template writes; the same as `rlhf_core.data.tokenizer.ROLES`, which is slow to import."""


class PretrainedParams(Block):
    """A causal language model of the hub, or a folder below data/raw/."""

    model: BelowRaw
    """`owner/name` on the hub, or a folder below data/raw/."""
    revision: str | None = None
    """Commit hash; required for a hub id, because a branch name moves."""


class BaseParams(Block):
    """From scratch or pretrained."""

    source: Literal["scratch", "pretrained"]
    """A model with random weights, or one that exists."""
    scratch: ScratchConfig | None = None
    pretrained: PretrainedParams | None = None
    pretrain: PretrainConfig | None = None
    pad_token: str = "<|pad|>"
    """Fills rows of a batch; must not be `eos_token`."""
    eos_token: str = "<|end|>"
    """Tokens of a tokenizer trained from scratch; a pretrained one keeps its own eos and gets this pad token if it
    has none."""

    @model_validator(mode="after")
    def _consistent(self) -> "BaseParams":
        if getattr(self, self.source) is None:
            raise ValueError(f"source is {self.source}, so the block base.{self.source} is needed")
        for token in (self.pad_token, self.eos_token):
            if not MARKER.fullmatch(token) or token in ROLES:
                raise ValueError(
                    f"{token!r} cannot be pad_token or eos_token: choose a marker such as <|pad|> that is no text and "
                    f"no role ({', '.join(ROLES)})"
                )
        if self.pad_token == self.eos_token:
            raise ValueError(
                "pad_token must differ from eos_token: a model cannot learn to stop on a token that is masked as "
                "padding"
            )
        return self
