"""`leash round`: closes the present round. Its policy and pairs are copied to rounds/N and put under DVC; git gets
rounds/N.dvc."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows import driver, workspace
from flows.commands.imports import importer
from flows.graph import Project, brief
from flows.text import table
from rlhf_core import files
from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, read_yaml
from tasks.records.recorded import recorded
from tasks.stage import provenance, rounds

FIGURES = {
    "evaluate": ("gold_policy", "win_rate", "kl_per_sequence", "reward_policy"),
    "reward": ("heldout_accuracy", "gold_agreement"),
    "preferences": ("pairs",),
}
"""What round.json has of metrics/<stage>.json."""
COLUMNS = {
    "pairs": "pairs",
    "heldout_accuracy": "reward accuracy",
    "gold_policy": "gold",
    "win_rate": "wins against SFT",
    "kl_per_sequence": "KL to SFT",
}
NAMED = 3
"""Uncommitted files that a message names."""


def close(root: Path) -> str:
    """Close the present round, or finish what a killed `leash round` began; returns what was done and what comes next.

    Raises UserError where a stage is not up to date, where the checkout has changes without a commit, or while another
    run works here.
    """
    with driver.exclusive(root) as project:
        known = workspace.git(root, "ls-files", f"{rounds.ROUNDS}/*.dvc").split()
        left = [path for path in (root / rounds.ROUNDS).glob("*.dvc") if path.relative_to(root).as_posix() not in known]
        number = next((int(path.stem) for path in left if path.stem.isdecimal()), None)
        if number is None:
            for folder in (root / rounds.ROUNDS).glob("*/"):  # copied, and not put under DVC
                if folder.name.isdecimal() and not folder.with_name(f"{folder.name}.dvc").exists():
                    shutil.rmtree(folder)
            number = rounds.last_closed(root) + 1
            commit = _require_finished(root, project, number)
            # `dvc add` replaces the copies by links to DVC's cache, where `cache.type` has links
            with files.atomic(root / rounds.ROUNDS / str(number)) as folder:
                shutil.copytree(root / rounds.MODEL, folder / rounds.POLICY)
                if (made_from := provenance.path_of(root / rounds.MODEL)).is_file():
                    shutil.copyfile(made_from, provenance.path_of(folder / rounds.POLICY))
                shutil.copyfile(root / rounds.PREFERENCES, folder / rounds.PAIRS)
                note = _note(root, number, commit)
                (folder / rounds.NOTE).write_text(json.dumps(note, indent=2) + "\n", "utf-8")
        importer.dvc_add(root / rounds.ROUNDS / str(number), root)
        workspace.git(root, "add", f"{rounds.ROUNDS}/{number}.dvc")
    pairs = rounds.read_note(root, number)["figures"]["pairs"]
    kept = "its policy is" if pairs is None else f"its policy and {pairs:,} pairs are"  # None: without a reward model
    return (
        f"round {number} is closed: {kept} in {rounds.ROUNDS}/{number}\n"
        f'commit it:       git commit -m "Close round {number}"\n'
        f"round {number + 1}, from its policy:  leash run"
    )


def _require_finished(root: Path, project: Project, number: int) -> str:
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


def _note(root: Path, number: int, commit: str) -> dict[str, Any]:
    """The content of round.json: what the round is made from, DVC's hashes, and its figures."""
    outs = {path: digest for record in recorded(root).values() for path, digest in record.outs.items()}
    figures: dict[str, Any] = {}
    for stage, names in FIGURES.items():
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

    def shown(value: float | None) -> str:
        return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3f}"

    last = rounds.last_closed(root)
    rows = [("round", "closed", "commit", *COLUMNS.values())]
    for number in range(1, last + 1):
        note = rounds.read_note(root, number)
        figures = (shown(note["figures"][name]) for name in COLUMNS)
        rows.append((str(number), note["time"][:10], note["commit"][:7], *figures))
    present = f"the present round is {last + 1}; `leash round` closes it when it is finished"
    return f"{table(rows)}\n{present}" if last else present
