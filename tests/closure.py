"""The code that each stage depends on, read from its imports, and `dvc.yaml` kept in step with it.

`python tests/closure.py` prints what differs; `--write` puts the right dependencies into dvc.yaml.
"""

import argparse
import importlib.util
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import grimp
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tasks.params.methods import METHODS, WITH_MODEL  # noqa: E402

PACKAGES = ("rlhf_core", "tasks")

CANNOT_CHANGE_RESULTS = {
    "rlhf_core": "how threads wait for each other",
    "rlhf_core.errors": "the type of a user's error",
    "rlhf_core.files": "how bytes reach the disk, not which",
    "rlhf_core.training.checkpoints": "resumable state; a resumed run ends in the same bytes",
    "rlhf_core.config.block": "strictness of parameters: it refuses values, it never changes one",
    "tasks.stage.run": "the contract around every stage; it writes no byte of an out",
    "tasks.stage.stage": "what a stage module is given; it writes no byte of an out",
    "rlhf_core.locks": "who works where",
    "tasks.stage.state": "whose the state folder is, and when it goes",
    "tasks.stage.journal": "resumable state; a resumed run ends in the same bytes",
    "tasks.stage.interrupts": "when a stage stops",
    "tasks.stage.workers": "starts the other processes of a stage; how many is a tracked parameter",
    "tasks.stage.definition": "reads dvc.yaml: inputs, outs and keys",
    "tasks.stage.dvc_adapter": "reads the graph and the hashes",
    "tasks.stage.progress": "prints",
    "tasks.stage.trust": "warns; what it answers is a tracked parameter",
    "tasks.stage.versions": "refuses to run with other versions",
    "tasks.params.loader": "reads params.yaml; the values are tracked by DVC",
    "tasks.params.secrets": "hides the values of keys that `check` refuses anyway",
    "tasks.params.runtime": "parameters that no stage tracks",
    "tasks.schemas.validation": "refuses bad rows, never changes one",
    "tasks.datasets.problems": "lists problems and refuses, never changes a row",
    "tasks.stage.pipeline_run": "tells MLflow about the run as a whole",
    "tasks.tracking*": "tells MLflow",
}
"""Patterns of modules that every stage imports and that are no dependency of any: each with the reason."""

EXTRA = {
    "report": ["tasks/page/samples.js", "tasks/page/style.css.j2", "tasks/page/template.html.j2", "params.yaml"],
}
"""Files that a stage opens at run time, beside data: imports do not show them."""

READ_THE_TABLE_OF_METHODS = ("check", "evaluate", "report")
"""For every other stage the table only says that a block which is absent from params.yaml is off."""

TRAINING = (
    *("base", "sft", "preferences", "reward", "ppo", "select"),
    *(method.name for method in METHODS),
    "evaluate",
)
"""Stages whose results depend on the library versions declared in tasks/stage/versions.json."""

MODELS = ("base", "sft", "reward", "ppo", "select", *(method.name for method in WITH_MODEL))
"""Stages that write a model folder, and with it provenance.json: for the others its module does nothing."""


@cache
def graph() -> grimp.ImportGraph:
    """The import graph of the project's own packages."""
    return grimp.build_graph(*PACKAGES, include_external_packages=False, cache_dir=None)


def exempt(module: str, stage: str) -> bool:
    """Whether a module stands on the list of those that cannot change results, or has no part in this stage's."""
    if module == "tasks.stage.provenance":
        return stage not in MODELS
    if module == "tasks.params.methods":
        return stage not in READ_THE_TABLE_OF_METHODS
    return any(fnmatchcase(module, pattern) for pattern in CANNOT_CHANGE_RESULTS)


def schemas_of(deps: list[str]) -> set[str]:
    """Schema modules of a stage's datasets: the wrapper imports them by name, so imports do not show them."""
    from tasks.schemas.validation import schema_module

    modules = (schema_module(dep) for dep in deps if dep.endswith(".jsonl"))
    return {module for module in modules if importlib.util.find_spec(module)}


def closure(stage: str, deps: list[str]) -> list[str]:
    """Paths of the code that `tasks.<stage>` imports, directly or through others, without the exempt modules (what
    those import counts)."""
    start = {f"tasks.{stage}", *schemas_of(deps)}
    if stage == "check":  # the table names these modules, it does not import them
        start |= {method.params.partition(":")[0] for method in METHODS}
    seen: set[str] = set()
    todo = list(start)
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        todo += graph().find_modules_directly_imported_by(module)
        parent = module.rpartition(".")[0]
        if parent:
            todo.append(parent)
    return sorted(filter(None, (path_of(module) for module in seen if not exempt(module, stage))))


def path_of(module: str) -> str | None:
    """The file of a module; None for a package whose `__init__.py` is empty."""
    path = ROOT / Path(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    if file.name == "__init__.py" and not file.read_text(encoding="utf-8").strip():
        return None
    return file.relative_to(ROOT).as_posix()


def is_code(dep: str) -> bool:
    """Whether a dependency of dvc.yaml is code (or a file beside it) rather than data or a model."""
    return dep.startswith(("tasks/", "rlhf_core/", "flows/"))


def expected(stage: str, deps: list[str]) -> list[str]:
    """All dependencies that a stage should have: its data and models as they are, and its code."""
    data = [dep for dep in deps if not is_code(dep)]
    code = closure(stage, deps) + [file for file in EXTRA.get(stage, []) if is_code(file)]
    versions = ["tasks/stage/versions.json"] if stage in TRAINING else []
    return data + sorted(code + versions)


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    path = ROOT / "dvc.yaml"
    content = yaml.load(path.read_text(encoding="utf-8"))
    stale = 0
    for name, stage in content["stages"].items():
        right = expected(name, list(stage["deps"]))
        for sign, files in (("+", set(right) - set(stage["deps"])), ("-", set(stage["deps"]) - set(right))):
            for file in sorted(files):
                stale += 1
                print(f"{name}: {sign} {file}")
        stage["deps"] = right
    if write:
        with path.open("w", encoding="utf-8") as file:
            yaml.dump(content, file)
        return 0
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
