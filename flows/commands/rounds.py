"""`leash round`: closes the present round. Its policy and pairs are copied to rounds/N and put under DVC; git gets
rounds/N.dvc."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows import driver, workspace
from flows.graph import Project, brief
from flows.text import table
from rlhf_core import files
from rlhf_core.errors import UserError

FIGURES = (
    ("evaluate", ("gold_policy", "win_rate", "kl_exact_per_sequence", "reward_policy")),
    ("reward", ("heldout_accuracy", "gold_agreement")),
    ("preferences", ("pairs",)),
)
"""What round.json has of metrics/<stage>.json."""
COLUMNS = {
    "pairs": "pairs",
    "heldout_accuracy": "reward accuracy",
    "gold_policy": "gold",
    "win_rate": "wins against SFT",
    "kl_exact_per_sequence": "KL to SFT",
}
NAMED = 3
"""Uncommitted files that a message names."""


def close(root: Path) -> str:
    """Close the present round, or finish what a killed `leash round` began; returns what was done and what comes next.

    Raises UserError where a stage is not up to date, where the checkout has changes without a commit, or while another
    run works here.
    """
    from flows.commands.imports.importer import dvc_add
    from tasks.stage import rounds

    with driver.exclusive(root) as project:
        begun = _unrecorded(root)
        if begun is None:
            _remove_half(root)
            begun = rounds.last_closed(root) + 1
            commit = _ready(root, project, begun)
            with _copy(root, begun) as folder:
                (folder / rounds.NOTE).write_text(json.dumps(_note(root, begun, commit), indent=2) + "\n", "utf-8")
        dvc_add(root / rounds.ROUNDS / str(begun), root)
        workspace.git(root, "add", f"{rounds.ROUNDS}/{begun}.dvc")
    pairs = rounds.read_note(root, begun)["figures"]["pairs"]
    held = "its policy is" if pairs is None else f"its policy and {pairs:,} pairs are"  # None: without a reward model
    return (
        f"round {begun} is closed: {held} in {rounds.ROUNDS}/{begun}\n"
        f'commit it:       git commit -m "Close round {begun}"\n'
        f"round {begun + 1}, from its policy:  leash run"
    )


def _unrecorded(root: Path) -> int | None:
    """A round whose .dvc file git does not have yet: a killed `leash round` has left it."""
    from tasks.stage.rounds import ROUNDS

    known = set(workspace.git(root, "ls-files", f"{ROUNDS}/*.dvc").split())
    here = [path for path in (root / ROUNDS).glob("*.dvc") if path.relative_to(root).as_posix() not in known]
    return next((int(path.stem) for path in here if path.stem.isdecimal()), None)


def _remove_half(root: Path) -> None:
    """Remove the folder of a round that a killed `leash round` has copied and not put under DVC."""
    from tasks.stage.rounds import ROUNDS

    for folder in (root / ROUNDS).glob("*/"):
        if folder.name.isdecimal() and not folder.with_name(f"{folder.name}.dvc").exists():
            shutil.rmtree(folder)


def _ready(root: Path, project: Project, number: int) -> str:
    """The commit that has the code, parameters and dvc.lock of the present results. Raises UserError where the run of
    the round is not finished, or no commit has it."""
    for stage in project.graph.stages:
        if why := project.reasons(stage):
            raise UserError(f"round {number} is not finished, stage {stage}: {brief(why)}; `leash run` finishes it")
    changed = [line[3:] for line in workspace.git(root, "status", "--porcelain").splitlines()]
    if changed:
        more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
        raise UserError(
            f"{', '.join(changed[:NAMED])}{more}: not committed, so no commit would name what round {number} was made "
            "from; `git add` and `git commit` them (or remove them, or name them in .gitignore), then close the round"
        )
    return workspace.resolve(root, "HEAD")


@contextmanager
def _copy(root: Path, number: int) -> Iterator[Path]:
    """A folder with copies of policy and pairs, which becomes rounds/N when the block ends. `dvc add` replaces them by
    links to DVC's cache, where `cache.type` has links."""
    from tasks.stage import provenance, rounds

    with files.atomic(root / rounds.ROUNDS / str(number)) as folder:
        shutil.copytree(root / rounds.MODEL, folder / rounds.POLICY)
        if (made_from := provenance.path_of(root / rounds.MODEL)).is_file():
            shutil.copyfile(made_from, provenance.path_of(folder / rounds.POLICY))
        shutil.copyfile(root / rounds.PREFERENCES, folder / rounds.PAIRS)
        yield folder


def _note(root: Path, number: int, commit: str) -> dict[str, Any]:
    """The content of round.json: what the round is made from, DVC's hashes, and its figures."""
    from tasks.params.loader import PARAMS_FILE, read_yaml
    from tasks.records.recorded import recorded
    from tasks.stage import rounds

    outs = {path: digest for record in recorded(root).values() for path, digest in record.outs.items()}
    figures: dict[str, Any] = {}
    for stage, names in FIGURES:
        content = json.loads((root / "metrics" / f"{stage}.json").read_text(encoding="utf-8"))
        figures |= {name: content.get(name) for name in names}
    return {
        "round": number,
        "commit": commit,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": read_yaml(root / PARAMS_FILE)["seed"],
        "policy": outs[rounds.MODEL],
        "preferences": outs[rounds.PREFERENCES],
        "figures": figures,
    }


def table_of(root: Path) -> str:
    """The closed rounds with their figures, and the number of the present one."""
    from tasks.stage import rounds

    last = rounds.last_closed(root)
    rows = [("round", "closed", "commit", *COLUMNS.values())]
    for number in range(1, last + 1):
        note = rounds.read_note(root, number)
        shown = (_shown(note["figures"][name]) for name in COLUMNS)
        rows.append((str(number), note["time"][:10], note["commit"][:7], *shown))
    present = f"the present round is {last + 1}; `leash round` closes it when it is finished"
    return f"{table(rows)}\n{present}" if last else present


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
