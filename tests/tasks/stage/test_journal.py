"""The journal of a long loop: what was appended comes back, up to the first damage."""

import random
from pathlib import Path
from typing import Any

import pytest

from tasks.stage.journal import Journal

PIECES: list[Any] = [[[1, 2], True], ["ü 🙂 \u2028 line", None], {"kl": 0.1 + 0.2, "n": 3}]


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def path(tmp_path: Path, messages: list[str]) -> Path:
    journal = Journal(tmp_path / "answers.journal", messages.append)
    for piece in PIECES:
        journal.append(piece)
    assert journal.pieces == PIECES
    return journal.path


def test_what_was_appended_comes_back(path: Path, messages: list[str]) -> None:
    assert Journal(path, messages.append).pieces == PIECES
    assert messages == []


def test_a_fresh_one_is_empty(tmp_path: Path, messages: list[str]) -> None:
    assert Journal(tmp_path / "none", messages.append).pieces == []
    assert messages == []


@pytest.mark.parametrize("seed", range(10))
def test_cut_anywhere_it_keeps_the_whole_pieces_before(path: Path, messages: list[str], seed: int) -> None:
    content = path.read_bytes()
    place = random.Random(seed).randrange(1, len(content))
    path.write_bytes(content[:place])
    whole = content[:place].count(b"\n")
    assert Journal(path, messages.append).pieces == PIECES[:whole]
    assert bool(messages) == (not content[:place].endswith(b"\n"))
    journal = Journal(path, messages.append)
    journal.append("more")
    assert Journal(path, messages.append).pieces == [*PIECES[:whole], "more"]


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_ends_what_is_read(path: Path, messages: list[str], seed: int) -> None:
    content = bytearray(path.read_bytes())
    draw = random.Random(seed)
    place = draw.randrange(len(content))
    line = bytes(content[:place]).count(b"\n")
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    assert Journal(path, messages.append).pieces == PIECES[:line]
    assert messages == [f"answers.journal is damaged after piece {line}; what comes later is done again"]
    assert path.read_bytes().count(b"\n") == line, "what is not read is removed"
