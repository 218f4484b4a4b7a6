"""Resumable state on disk: written whole or not at all, the last two kept, loaded without running any pickle."""

import os
from pathlib import Path
from typing import Any

import torch

KEPT = 2


class Checkpoints:
    """The checkpoints of one run in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write, flush to the disk, then rename: a kill at any moment leaves a whole checkpoint or none."""
        partial = self.folder / "checkpoint.partial"
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / f"checkpoint-{step:08d}.pt")
        for old in self._files()[:-KEPT]:
            old.unlink()

    def load(self) -> dict[str, Any] | None:
        """The newest state, or None in an empty folder."""
        files = self._files()
        if not files:
            return None
        state: dict[str, Any] = torch.load(files[-1], weights_only=True, map_location="cpu")
        return state

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("checkpoint-*.pt"))
