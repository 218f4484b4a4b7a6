"""Types of settings that name files and folders. They check the text alone; stages check links on the disk."""

import re
from typing import Annotated

from pydantic import AfterValidator

CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def stay_below(value: str) -> str:
    """`value` itself. Raises ValueError unless it is a relative path that never leaves the folder it starts from."""
    parts = value.replace("\\", "/").split("/")
    if not value.strip() or CONTROL.search(value):
        raise ValueError("must be a path below data/raw/, without control characters")
    if value.startswith(("/", "\\", "~")) or ".." in parts or re.match(r"[A-Za-z]:", value):
        raise ValueError(
            "must stay below data/raw/: no absolute path, no `..`, no `~`; `leash import PATH` copies there"
        )
    return value


BelowRaw = Annotated[str, AfterValidator(stay_below)]
"""A path below data/raw/ (or the id of something on a hub)."""


def plain_name(value: str) -> str:
    """`value` itself. Raises ValueError unless it can only be the name of one folder."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", value):
        raise ValueError("must be the name of a folder: letters, digits, `.`, `_`, `-`, and no path")
    return value


FolderName = Annotated[str, AfterValidator(plain_name)]
"""The name of a single folder."""
