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
    """A causal language model on the Hugging Face Hub, or below data/raw/."""

    model: BelowRaw
    """`owner/name` on the Hub, or a folder or GGUF file below data/raw/ (or the folder of a single one). GGUF needs the
    package gguf; its weights become float32."""
    revision: str | None = None
    """Commit hash, 40 hexadecimal digits. Required on the Hub, because a branch can change."""


class BaseParams(Block):
    """The base model."""

    source: Literal["scratch", "pretrained"]
    """Random weights, or an existing model. The block of this name is required."""
    scratch: ScratchConfig | None = None
    pretrained: PretrainedParams | None = None
    pretrain: PretrainConfig | None = None
    format: Literal["chat", "text"] = "chat"
    """`chat`: prompts are conversations in the tokenizer's chat template, or Leash's if it has none. `text`: the model
    continues the bare prompt; a prompt of several turns is an error."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """Variables of the pretrained chat template, such as `{enable_thinking: false}` for Qwen 3. They become defaults of
    the saved template. A name that the template does not use is an error."""
    pad_token: str = "<|pad|>"
    """Padding token; must differ from `eos_token`. A pretrained tokenizer keeps its own, or uses one of its control
    tokens."""
    eos_token: str = "<|end|>"
    """End-of-sequence token. A pretrained tokenizer keeps its own, or uses the one that ends an answer in its chat
    template."""

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
