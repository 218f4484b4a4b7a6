"""Files in the shapes of public data sets from `leash import` to `dvc repro ingest`, as a user would call them."""

import json
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Project

TOPICS = [f"number {number}" for number in range(20)]
SHAPES = {
    "kto.jsonl": lambda t: [
        {"prompt": f"Which is {t}?", "completion": f"It is {t}.", "label": True},
        {"prompt": f"Which is {t}?", "completion": "No idea.", "label": False},
    ],
    "votes.csv": lambda t: [
        {"question": f"What about {t}?", "answer_a": "No idea.", "answer_b": f"It is {t}.", "winner": "answer_b"}
    ],
    "system.json": lambda t: [
        {"system": "Be brief.", "prompt": f"Is there {t}?", "chosen": f"It is {t}.", "rejected": "No idea."}
    ],
}


def leash(project: "Project", *words: str) -> tuple[int, str, str]:
    done = project.run(sys.executable, "-m", "flows.cli", *words)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_several_imports_are_ingested_together(project: "Project") -> None:
    source = project.root.parent / "source"
    source.mkdir()
    for name, make in SHAPES.items():
        rows = [row for topic in TOPICS for row in make(topic)]
        text = json.dumps(rows, indent=1)
        if name.endswith(".jsonl"):
            text = "\n".join(map(json.dumps, rows))
        if name.endswith(".csv"):
            text = "\n".join(",".join(row) for row in [list(rows[0]), *(row.values() for row in rows)])
        (source / name).write_text(text + "\n", encoding="utf-8")
        code, out, err = leash(project, "import", str(source / name))
        assert code == 0, err
        assert f"data/raw/{name}: tracked by DVC" in out
    project.set("ingest.source", "files")
    project.set("ingest.files", {"path": list(SHAPES)})
    project.set("preferences.source", "dataset")
    project.dvc("repro", "ingest")

    assert project.json("metrics/ingest.json")["rows_read"] == 80
    demonstrations, pairs = (project.rows(f"data/ingest/{name}.jsonl") for name in ("demonstrations", "pairs"))
    assert demonstrations
    assert {row["response"] for row in demonstrations} <= {f"It is {topic}." for topic in TOPICS}
    assert {row["rejected"] for row in pairs} == {"No idea."}
    assert any(row["prompt"][0] == {"role": "system", "content": "Be brief."} for row in pairs)

    before = project.outputs()
    (source / "tools.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}\n')
    code, out, err = leash(project, "import", str(source / "tools.jsonl"))
    assert (code, err.count("\n")) == (2, 1)
    assert "row 1: messages: message 1 has tool_calls" in err
    assert not (project.root / "data/raw/tools.jsonl").exists()
    assert project.outputs() == before

    code, out, err = leash(project, "import", str(source / "votes.csv"), "--map", "prompt=question", "--force", "--try")
    assert code == 2
    assert "params.yaml: has changes that are not in git, and --try writes this file" in err
