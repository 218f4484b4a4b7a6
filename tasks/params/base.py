"""Parameters of the stage `base`: tokenizer and base model."""

import re
from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import PretrainConfig, ScratchConfig
from rlhf_core.config.block import Block
from rlhf_core.config.paths import BelowRaw

MARKER = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
"""What the chat template writes; the same as `rlhf_core.data.tokenizer.ROLES`, which is slow to import."""


class PretrainedParams(Block):
    """A causal language model from the Hugging Face hub, or below data/raw/."""

    model: BelowRaw
    """`owner/name` on the hub, or a folder below data/raw/, or a GGUF file there (the only one of a folder needs no
    name). GGUF files need the package gguf; their weights become float32."""
    revision: str | None = None
    """Commit hash; required for a hub id, because a branch name can move."""


class BaseParams(Block):
    """The base model: from scratch, or pretrained."""

    source: Literal["scratch", "pretrained"]
    """`scratch`: a model with random weights. `pretrained`: an existing model."""
    scratch: ScratchConfig | None = None
    pretrained: PretrainedParams | None = None
    pretrain: PretrainConfig | None = None
    format: Literal["chat", "text"] = "chat"
    """`chat`: prompts are conversations, written by the tokenizer's chat template, or by Leash's where it has none.
    `text`: there are no turns; the model reads the bare prompt and continues it. A prompt of several turns is then an
    error."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """Values of variables that the pretrained tokenizer's chat template reads, such as `{enable_thinking: false}` for
    Qwen 3, which thinks by default. They become the defaults of the saved template, so that every stage and every later
    program renders the same prompts. A name that the template does not read is an error."""
    pad_token: str = "<|pad|>"
    """Token that fills the rows of a batch; must differ from `eos_token`. A pretrained tokenizer keeps its own, or uses
    a control token that it has."""
    eos_token: str = "<|end|>"
    """End-of-sequence token of a tokenizer trained from scratch. A pretrained tokenizer keeps its own, or gets the
    token with which its chat template closes an answer."""

    @model_validator(mode="after")
    def _consistent(self) -> "BaseParams":
        if getattr(self, self.source) is None:
            raise ValueError(f"source is {self.source}, so the block base.{self.source} is needed")
        if self.chat_template_kwargs and (self.source == "scratch" or self.format == "text"):
            raise ValueError(
                f"chat_template_kwargs names {', '.join(self.chat_template_kwargs)}, which no template of Leash reads; "
                "it needs source: pretrained and format: chat"
            )
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
