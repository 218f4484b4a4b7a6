"""Reward models and classifiers from elsewhere, as far as the files of their folders show; without transformers, which
takes seconds to import."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError

TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""Files with a chat template; tokenizer_config.json may have it, too."""


def model_folder(folder: Path, key: str) -> Path:
    """The folder itself. Raises UserError where it holds no model; `key`: parameter and folder, for the message."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{key} is no Hugging Face folder (no config.json); put one there")
    return folder


def output_of(labels: Sequence[str], label: str | None, key: str) -> int | None:
    """The place of `label` among those of a classifier's outputs; None for a model with one output, a reward model.
    Raises UserError, naming the parameter `key`, for several outputs without a label and for an unknown one."""
    if len(labels) == 1:
        if label is not None:
            raise UserError(f"{key}: has one output, which is the score; remove label: {label}")
        return None
    if label is None:
        raise UserError(f"{key}: has {len(labels)} outputs; set label to one of {', '.join(labels)}")
    if labels.count(label) != 1:
        raise UserError(f"{key}: has no such label {label!r}; its labels are {', '.join(labels)}")
    return labels.index(label)


def require_classifier(folder: Path, label: str | None, conversation: bool, key: str) -> None:
    """Raise UserError for a folder that cannot score answers: without a model, with several outputs and no or an
    unknown label, or without a chat template where it is to read a `conversation`."""
    settings = _json(model_folder(folder, key) / "config.json", key)
    names = settings.get("id2label") or {str(i): f"LABEL_{i}" for i in range(settings.get("num_labels") or 2)}
    output_of([str(names[place]) for place in sorted(names, key=int)], label, key)
    has_template = any((folder / name).is_file() for name in TEMPLATES)
    if conversation and not has_template and not _json(folder / "tokenizer_config.json", key).get("chat_template"):
        raise no_template(key)


def no_template(key: str) -> UserError:
    """The error where a classifier has no chat template for a conversation."""
    return UserError(
        f"{key}: its tokenizer has no chat template, so that it cannot read a conversation; set reads: answer or "
        "reads: pair, or put its chat_template.jinja into the folder"
    )


def _json(path: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{key}: {path.name} is missing or no JSON; copy or download the model again") from None
    return content if isinstance(content, dict) else {}
