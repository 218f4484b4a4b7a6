"""The order of `dvc.lock`: stages that run side by side are entered as they end, but `dvc repro` enters them in the
order of the graph. Entries are moved and never changed."""

from pathlib import Path

from flows.graph import Graph
from rlhf_core import files


def entries(root: Path) -> tuple[str, ...]:
    """The stages in `dvc.lock`, in its order; none where there is no such file."""
    path = root / "dvc.lock"
    if not path.is_file():
        return ()
    from dvc.utils.serialize import load_yaml

    return tuple(load_yaml(str(path)).get("stages") or {})


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
    from dvc.repo import Repo

    with Repo(str(root)) as repo, repo.lock:
        _rewrite(root / "dvc.lock", wanted)
    return True


def _rewrite(path: Path, order: tuple[str, ...]) -> None:
    from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update

    content = parse_yaml_for_update(path.read_text(encoding="utf-8"), str(path))
    stages = content["stages"]
    for name in order:
        stages.move_to_end(name)
    with files.whole(path) as place:
        place.write_text(dumps_yaml(content), encoding="utf-8")
        place.chmod(path.stat().st_mode)
