"""The order of `dvc.lock`: stages that run side by side are entered as they end, but `dvc repro` enters them in the
order of the graph. Entries are moved and never changed."""

from pathlib import Path

from flows.graph import Graph


def entries(root: Path) -> tuple[str, ...]:
    """The stages that `dvc.lock` names, in its order; none where there is no such file."""
    from tasks.stage.dvc_adapter import recorded_order

    return recorded_order(root)


def restore_order(root: Path, graph: Graph, before: tuple[str, ...]) -> bool:
    """Write `dvc.lock` in the order that one `dvc repro` gives it; returns whether that changed it.

    DVC keeps the place of an existing entry (`before`: the order when the run began) and appends new ones in the order
    of the graph. DVC's own loader and dumper are used, under its lock of the repository, so the bytes are the same.
    """
    now = entries(root)
    known = [name for name in before if name in now]
    new = [name for name in graph.stages if name in now and name not in before]
    wanted = (*known, *new, *(name for name in now if name not in known and name not in new))
    if wanted == now:
        return False
    from tasks.stage.dvc_adapter import reorder_lock_file

    reorder_lock_file(root, wanted)
    return True
