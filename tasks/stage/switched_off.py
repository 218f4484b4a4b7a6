"""The empty outputs of a stage with `enabled: false`: the graph is the same whether an alternative runs or not."""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.stage.stage import Stage

NOTE = "README.md"


NO_REWARD_MODEL = "`scorer` in params.yaml has no term reward_model"
"""Why `preferences` and `reward` are switched off."""
NO_PAIRS = "preferences.source is ratings in params.yaml"
"""Why `preferences` alone is."""


def write_switched_off(
    stage: Stage[Any], columns: Mapping[str, Sequence[str]] | None = None, why: str | None = None
) -> None:
    """Write all declared outs, and print one line. `why`: by default that `enabled` is false.

    A folder gets a README.md of one line, metrics `{"enabled": false}`, a JSONL file no row, a CSV file its header:
    `columns` names those of each table, by its path. Raises ValueError for a table without columns, and for an out of
    another kind.
    """
    message = f"{stage.name} is switched off ({why or f'{stage.name}.enabled is false in params.yaml'})"
    for out in stage.outputs.declared:
        name = out.rpartition("/")[2]
        if out == f"metrics/{stage.name}.json":
            stage.write_metrics({"enabled": False})
        elif name.endswith(".jsonl"):
            stage.outputs.write_jsonl(out, [])
        elif name.endswith(".csv"):
            if out not in (columns or {}):
                raise ValueError(f"{out}: its columns are missing")
            stage.out(out).write_text(",".join((columns or {})[out]) + "\n", encoding="utf-8")
        elif "." not in name:
            stage.out(out).mkdir(parents=True)
            (stage.out(out) / NOTE).write_text(f"There is no model here: {message}.\n", encoding="utf-8")
        else:
            raise ValueError(f"{out}: no rule for what it holds where {stage.name} is switched off")
    stage.log(message)
