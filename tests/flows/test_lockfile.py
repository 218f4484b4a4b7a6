"""dvc.lock comes out as one `dvc repro` would have written it, byte for byte."""

from collections.abc import Callable
from pathlib import Path

from flows.graph import read_graph
from flows.lockfile import entries, restore_order

LONG = "work " + " ".join(["a-command-line-that-yaml-must-fold"] * 5)
STAGES = {"one": ("work", []), "two": (LONG, ["one"]), "three": ("work", ["one"]), "four": ("work", ["two", "three"])}


def shuffle(root: Path, order: list[str]) -> None:
    """Another order of the same entries, as text: what DVC wrote of each stage is left alone."""
    head, *blocks = (root / "dvc.lock").read_text().split("\n  ")
    texts: dict[str, list[str]] = {}
    for block in blocks:
        if not block.startswith(" "):
            name = block.split(":")[0]
        texts.setdefault(name, []).append(block.rstrip("\n"))
    (root / "dvc.lock").write_text("\n  ".join([head, *(text for name in order for text in texts[name])]) + "\n")


def test_order_and_bytes(toy: Callable[..., Path], serial: Callable[[Path], None]) -> None:
    root = toy(STAGES)
    serial(root)
    wanted = (root / "dvc.lock").read_bytes()
    graph = read_graph(root)
    assert restore_order(root, graph, ()) is False
    shuffle(root, ["three", "one", "four", "two"])
    assert entries(root) == ("three", "one", "four", "two")
    assert restore_order(root, graph, ()) is True
    assert (root / "dvc.lock").read_bytes() == wanted


def test_entries_found_keep_their_place_as_with_dvc(toy: Callable[..., Path], serial: Callable[[Path], None]) -> None:
    root = toy(STAGES)
    serial(root)
    shuffle(root, ["two", "one", "four", "three"])
    assert restore_order(root, read_graph(root), ("two", "one")) is True
    assert entries(root) == ("two", "one", "three", "four")


def test_no_lock_file_is_no_trouble(toy: Callable[..., Path]) -> None:
    root = toy(STAGES)
    assert restore_order(root, read_graph(root), ()) is False
