"""The user's models: models/extra/ for the comparison, models/judges/ for judges."""

from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from tasks.stage.stage import Stage

EXTRA = "models/extra"
JUDGES = "models/judges"


def folder_of(stage: Stage[Any], place: str, name: str, key: str) -> Path:
    """The Hugging Face folder `name` below `place`. Raises UserError with the parameter `key` if it is missing."""
    folder = stage.root / place / name
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}: {place}/{name} is no Hugging Face folder (no config.json); put one there")
    return folder
