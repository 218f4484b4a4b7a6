"""Resumable state of loops that sample: an append-only file with a finished piece on each line. Each line has a
checksum; reading ends at the first line that does not match."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from rlhf_core import files
from rlhf_core.training.checkpoints import Log


class Journal:
    """The pieces of one loop, in order, as JSON values."""

    def __init__(self, path: Path, log: Log) -> None:
        self.path = path
        self.pieces: list[Any] = []
        content = path.read_bytes() if path.exists() else b""
        end = 0
        for line in content.splitlines(keepends=True):
            if not _is_intact(line):
                break
            self.pieces.append(json.loads(line[65:]))
            end += len(line)
        if end < len(content):
            log(f"{path.name} is damaged after piece {len(self.pieces)}; what comes later is done again")
            os.truncate(path, end)

    def append(self, piece: Any) -> None:
        """Add the next piece; it is on the disk when this returns."""
        text = json.dumps(piece, ensure_ascii=True, allow_nan=False).encode()
        files.append(self.path, _checksum(text) + b" " + text + b"\n")
        self.pieces.append(piece)


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _is_intact(line: bytes) -> bool:
    return line.endswith(b"\n") and line[64:65] == b" " and line[:64] == _checksum(line[65:-1])
