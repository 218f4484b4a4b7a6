"""The closed rounds of a project: `rounds/N/` has the policy and all pairs of round N, and DVC tracks it by
`rounds/N.dvc`. The present round follows the last closed one."""

import hashlib
import json
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError

ROUNDS = "rounds"
SFT = "models/sft"
MODEL, PREFERENCES = "models/policy", "data/preferences/preferences.jsonl"
"""What a closed round is copied from."""
POLICY, PAIRS, NOTE = "policy", "preferences.jsonl", "round.json"
"""What a closed round has in its folder."""


def last_closed(root: Path) -> int:
    """The number of the last closed round; 0 where there is none. Raises UserError for a folder that is no closed
    round, for a missing number, and for a round whose files are not here."""
    folder = root / ROUNDS
    closed = {int(path.stem) for path in folder.glob("*.dvc") if path.stem.isdecimal()}
    here = {int(path.name) for path in folder.glob("*/") if path.name.isdecimal()}
    if half := sorted(here - closed):
        raise UserError(
            f"{ROUNDS}/{half[0]}: no closed round (there is no {ROUNDS}/{half[0]}.dvc); `leash round` finishes it, or "
            "`dvc checkout` removes one of another commit"
        )
    if gap := sorted(set(range(1, max(closed, default=0))) - closed):
        raise UserError(f"{ROUNDS}/{gap[0]}.dvc: missing, but round {max(closed)} is closed; `git checkout` brings it")
    if lost := sorted(number for number in closed if not (folder / str(number) / NOTE).is_file()):
        raise UserError(f"{ROUNDS}/{lost[0]}: its files are not here; `dvc checkout` or `dvc pull {ROUNDS}/*.dvc`")
    return max(closed, default=0)


def path_in(number: int, name: str) -> str:
    """The path of a file or folder of a closed round, relative to the project."""
    return f"{ROUNDS}/{number}/{name}"


def start_of(root: Path) -> str:
    """The model that samples, and that PPO begins with: the policy of the last closed round, or the SFT model."""
    last = last_closed(root)
    return path_in(last, POLICY) if last else SFT


def read_note(root: Path, number: int) -> dict[str, Any]:
    """The content of a round's round.json. Raises UserError for a round that is not closed."""
    if not 1 <= number <= (last := last_closed(root)):
        raise UserError(f"round {number} is not closed; closed rounds: {last or 'none'}; see `leash round --list`")
    content: dict[str, Any] = json.loads((root / path_in(number, NOTE)).read_text(encoding="utf-8"))
    return content


def seed_of(seed: int, number: int) -> int:
    """The seed of sampling and PPO in a round: `seed` itself in round 1, and another one in each later round, since
    equal prompts and equal random numbers would give answers like those that the policy has trained on."""
    if number == 1:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:round:{number}".encode()).digest()[:4], "big")
