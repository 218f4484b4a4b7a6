"""Paths below data/raw/, and what `ingest` makes from those that parameters of later stages name. Links and names that
lead out of it are refused; `rlhf_core.config.paths` refuses what can be seen in the parameter alone."""

import hashlib
import re
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError

EVALUATION_PROMPTS = "data/ingest/evaluation_prompts.jsonl"
TEXTS = "data/ingest/ptx"
PRETRAINED = "data/ingest/pretrained.json"
"""SHA-256 of each file of a pretrained model below data/raw/; empty where there is none."""
REWARD_BASE = "data/ingest/reward_base.json"
"""The same for the model that `reward.base` names; where it lists several, by their names."""
CACHED = re.compile(r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$")
"""The end of a path in DVC's cache, the target of links with `cache.type symlink`."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def below_raw(raw: Path, value: str, key: str) -> Path:
    """`raw`/`value`, which need not exist. Raises UserError, naming the parameter `key`, when it or a link below it
    leads out of `raw`."""
    place = raw / value
    require_inside(place, raw, key)
    for path in place.rglob("*") if place.is_dir() else ():
        if path.is_symlink():
            require_inside(path, raw, key)
    return place


def require_inside(path: Path, raw: Path, key: str) -> None:
    """Raise UserError when `path`, all links followed, lies neither below `raw` nor in DVC's cache."""
    target = path.resolve()
    if not target.is_relative_to(raw.resolve()) and not CACHED.search(target.as_posix()):
        raise UserError(f"{key}: {path} leads out of data/raw/; `leash import PATH` copies data there")


def require_hub_id(value: str, key: str) -> None:
    """Raise UserError unless `value`, which is no folder below data/raw/, can only be an id of the hub.

    A library would also take a folder of this name at the root of the repository, or one of its own builders.
    """
    if not HUB_ID.fullmatch(value) or Path(value).exists():
        raise UserError(f"{key}: {value} is neither a folder below data/raw/ nor an id of the hub (owner/name)")


def hashes_of_files(raw: Path, name: str | None, key: str = "base.pretrained.model") -> dict[str, str]:
    """SHA-256 of each file in the model folder `name` below `raw`, or of the GGUF file of that name; empty where there
    is neither: then the name is an id of the hub, and its revision is a parameter. Raises UserError, naming the
    parameter `key`, for a link out of `raw`."""
    if name is None or not (place := below_raw(raw, name, key)).exists():
        return {}
    folder, found = place if place.is_dir() else place.parent, {}
    for path in sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]:
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def hashes_of_reward_base(raw: Path, name: str | list[str] | None) -> dict[str, Any]:
    """`hashes_of_files` of the folder that `reward.base` names, or of each one that it lists, by its name. Raises
    UserError where one is no model's."""
    if isinstance(name, list):
        return {one: hashes_of_reward_base(raw, one) for one in name}
    if name is not None and not (below_raw(raw, name, "reward.base") / "config.json").is_file():
        raise UserError(f"reward.base: data/raw/{name} is no Hugging Face folder (no config.json); put one there")
    return hashes_of_files(raw, name, "reward.base")


def as_noted(raw: Path, name: str, noted: dict[str, str], key: str) -> Path:
    """The model folder `name` below `raw`. Raises UserError, naming the parameter `key`, where it has other files than
    those `noted` by `ingest`."""
    folder = below_raw(raw, name, key)
    if hashes_of_files(raw, name, key) != noted:
        raise UserError(
            f"{key}: data/raw/{name} has other files than when `ingest` ran; run `ingest` again, or get the files by "
            "`dvc pull`"
        )
    return folder
