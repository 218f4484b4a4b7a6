"""Settings of all stages that compute with a model: precision, and which activations are recomputed."""

from typing import Literal

from rlhf_core.config.block import Positive

Precision = Literal["float32", "bfloat16"]
"""Of matrix products, and of the weights of models that are not trained."""
Recomputed = bool | Positive
"""Layers whose activations are recomputed in the backward pass: none (false), all (true), every n-th."""
