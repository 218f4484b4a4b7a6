"""Resumable state on disk: folders `checkpoint-<step>`, each sealed with the checksums of its files when it is
complete. A folder without a seal, or with other checksums, is never used."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core import files
from rlhf_core.errors import UserError

SEAL = "seal.json"
KEPT = 2
PREFIX = "checkpoint-"

Log = Callable[[str], None]


def seal(folder: Path) -> None:
    """Flush the folder to the disk and write the checksums of its files; from then on it counts as complete."""
    files.flush(folder)
    noted = json.dumps(_checksums(folder), indent=1)
    with files.atomic(folder / SEAL) as place:
        place.write_text(noted, encoding="utf-8")
    files.flush_entry(folder)


def damage(folder: Path) -> str | None:
    """The problem of a damaged checkpoint; None for a complete one."""
    try:
        noted = json.loads((folder / SEAL).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "was cut short"
    except (OSError, ValueError):
        return "has a broken seal"
    return None if noted == _checksums(folder) else "does not fit its checksums"


def missing(folder: Path) -> list[str]:
    """The files that an intact seal names and that are not in the folder."""
    try:
        noted = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        return [name for name in noted if not (folder / name).exists()]
    except (OSError, ValueError, TypeError):
        return []


def _remove(folder: Path) -> None:
    """The seal first, so that a kill in between leaves nothing that looks complete."""
    files.remove(folder / SEAL)
    files.remove(folder)


def _checksums(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / SEAL):
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


class Checkpoints:
    """The checkpoints in one folder. `log` is called with a message for each damaged one."""

    def __init__(self, folder: Path, log: Log = print) -> None:
        self.folder, self._log = folder, log

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """A temporary folder, which is sealed and renamed when the block ends. The last two are kept."""
        final = self.folder / f"{PREFIX}{step}"
        with files.atomic(final) as place:
            place.mkdir()
            yield place
            seal(place)
        self.prune()

    def prune(self) -> None:
        """Keep the last two."""
        for old in self._all()[:-KEPT]:
            _remove(old)

    def newest(self) -> Path | None:
        """The newest complete checkpoint, None where there is none. Damaged ones are reported and removed. Raises
        UserError for a sealed one without one of its files, which may lie on another disk, and removes nothing."""
        for folder in reversed(self._all()):
            problem = damage(folder)
            if problem is None:
                return folder
            if gone := missing(folder):
                raise UserError(
                    f"{folder / gone[0]}: this file of a checkpoint is missing ({len(gone)} in all); put it back, or "
                    f"remove {folder} to go on without that checkpoint"
                )
            self._log(f"{folder.name} {problem} and is not used")
            _remove(folder)
        return None

    def _all(self) -> list[Path]:
        found = [path for path in self.folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
        return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))
