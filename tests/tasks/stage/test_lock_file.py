"""dvc.lock comes out as one `dvc repro` would have written it, byte for byte."""

from collections.abc import Callable
from pathlib import Path

from tasks.stage.dvc_files import recorded_order, restore_order

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
    restore_order(root, list(STAGES), ())
    assert (root / "dvc.lock").read_bytes() == wanted
    shuffle(root, ["three", "one", "four", "two"])
    assert recorded_order(root) == ("three", "one", "four", "two")
    restore_order(root, list(STAGES), ())
    assert (root / "dvc.lock").read_bytes() == wanted
    shuffle(root, ["two", "one", "four", "three"])
    restore_order(root, list(STAGES), ("two", "one"))
    assert recorded_order(root) == ("two", "one", "three", "four"), "an existing entry keeps its place"


def test_without_a_lock_file_there_is_no_order(toy: Callable[..., Path]) -> None:
    root = toy(STAGES)
    restore_order(root, list(STAGES), ())
    assert recorded_order(root) == ()
