"""What a stage leaves that `enabled: false` switches off: each output that dvc.yaml declares, empty, and saying why."""

from pathlib import PurePosixPath
from typing import Any

from tasks.stage import Stage


def write_switched_off(stage: Stage[Any]) -> None:
    """Write each declared output without content: a folder with a README, `{"enabled": false}`, a table without
    rows."""
    stage.say(f"switched off ({stage.name}.enabled: false)")
    for out in stage.outputs.declared:
        kind = PurePosixPath(out).suffix
        if kind == ".json":
            stage.write_metrics({"enabled": False})
        elif kind in (".csv", ".jsonl"):
            stage.out(out).touch()
        else:
            folder = stage.out(out)
            folder.mkdir(parents=True)
            note = f"There is no model: `{stage.name}.enabled` is false.\n"
            (folder / "README.md").write_text(note, encoding="utf-8")
