"""The code that each stage depends on, read from the imports of its file and of the runner, and `dvc.yaml` kept in step
with it.

`python tests/closure.py` prints what differs; `--write` puts the right dependencies into dvc.yaml.
"""

import argparse
import re
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from textwrap import fill

import grimp
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tasks.params.methods import METHODS, WITH_MODEL  # noqa: E402

PACKAGES = ("rlhf_core", "tasks")
DEPS = re.compile(r"    deps:.*?\n(?=    \w|  \w|\w|\Z)", re.S)
"""The dependencies of a stage in dvc.yaml."""

CANNOT_CHANGE_RESULTS = {
    "rlhf_core": "how threads wait for each other",
    "rlhf_core.errors": "the type of a user's error",
    "rlhf_core.files": "how bytes reach the disk, not which",
    "rlhf_core.finite": "stops at NaN and infinity, never changes a number",
    "rlhf_core.locks": "keeps processes apart",
    "rlhf_core.progress": "what is printed while a stage runs",
    "rlhf_core.training.checkpoints": "resumable state; a resumed run ends in the same bytes",
    "rlhf_core.config.block": "strictness of parameters: it refuses values and never changes one",
    "rlhf_core.config.paths": "refuses paths, never changes one",
    "rlhf_core.config.precision": "the types of parameters, which DVC tracks",
    "tasks.judging.budget": "stops, and never changes a verdict",
    "tasks.params.loader": "reads params.yaml; the values are tracked by DVC",
    "tasks.params.stages": "names the class of each stage's parameters; DVC tracks their values",
    "tasks.params.secrets": "hides the values of keys that `check` refuses anyway",
    "tasks.params.scorer": "the terms of the scorer; DVC tracks them, and whether the reward model is one of them",
    "tasks.params.runtime": "parameters that no stage tracks",
    "tasks.datasets.problems": "lists problems and refuses, never changes a row",
    "tasks.schemas*": "refuses rows and never changes one",
    "tasks.stage.definition": "reads dvc.yaml: inputs, outs and keys",
    "tasks.stage.dvc_files": "reads the graph and the hashes",
    "tasks.stage.gpus": "which GPUs a stage uses, and when; how many is a tracked parameter",
    "tasks.stage.interrupts": "when a stage stops",
    "tasks.stage.journal": "resumable state; a resumed run ends in the same bytes",
    "tasks.naming": "names on shared servers",
    "tasks.stage.pipeline_run": "tracking of the run as a whole",
    "tasks.stage.progress": "prints",
    "tasks.stage.run": "the contract around every stage; it writes no byte of an out",
    "tasks.stage.stage": "what a stage module is given; it writes no byte of an out",
    "tasks.stage.state": "keeps and removes the state folder",
    "tasks.stage.trust": "warns; the answer is a tracked parameter",
    "tasks.stage.versions": "refuses to run with other versions",
    "tasks.stage.workers": "starts the processes of a stage; how many is a tracked parameter",
    "tasks.tracking*": "sends to MLflow",
}
"""Patterns of modules that are no dependency of any stage that imports them: each with the reason. Inside a folder that
is a dependency as a whole they count all the same."""

FOLDERS = (
    *(
        "rlhf_core/data",
        "rlhf_core/demo",
        "rlhf_core/functions",
        "rlhf_core/models",
        "rlhf_core/ppo",
        "rlhf_core/training",
    ),
    *("tasks/datasets/sources", "tasks/page"),
)
"""Folders that are the unit of change: a stage that imports one of their modules depends on the whole folder."""

COMPARE = ("select", "evaluate")
FOLDERS_OF = {
    "rlhf_core/evaluation": COMPARE,
    "tasks/evaluation": COMPARE,
    "rlhf_core/config": ("check", *COMPARE),
    "tasks/params": ("check", *COMPARE),
    "tasks/judging": ("preferences", *COMPARE),
    "tasks/training": ("ppo", "hybrid", "reinforce", "rloo", "grpo", *COMPARE),
}
"""Folders that are the unit for these stages; others depend on the files that they import, so that an edit of the
evaluation, or a parameter of another stage, does not train a model again."""

READ_THE_TABLE_OF_METHODS = ("check", "evaluate", "report")
"""For every other stage the table only says that a block which is absent from params.yaml is off."""

TRAINING = (
    *("base", "sft", "preferences", "reward", "ppo", "select"),
    *(method.name for method in METHODS),
    "evaluate",
)
"""Stages whose results depend on the library versions declared in tasks/stage/versions.json."""

MODELS = ("base", "sft", "reward", "ppo", "select", *(method.name for method in WITH_MODEL))
"""Stages that write a model folder, and with it its provenance: for the others its module does nothing."""

SWITCHED_OFF = ("preferences", "reward", *(method.name for method in METHODS))
"""Stages that can be switched off, and then write what the module of this name says."""

RUNNER = "tasks.stage.run"


@cache
def graph() -> grimp.ImportGraph:
    """The import graph of the project's own packages."""
    return grimp.build_graph(*PACKAGES, include_external_packages=False, cache_dir=None)


def exempt(module: str, stage: str) -> bool:
    """Whether a module is on the list of those that cannot change results, or has no part in this stage's."""
    if module == "tasks.stage.provenance":
        return stage not in MODELS
    if module == "tasks.stage.switched_off":
        return stage not in SWITCHED_OFF
    if module == "tasks.params.methods":
        return stage not in READ_THE_TABLE_OF_METHODS
    if module == "tasks.summary":  # for the others it is a part of tracking
        return stage not in ("evaluate", "report")
    return any(fnmatchcase(module, pattern) for pattern in CANNOT_CHANGE_RESULTS)


def closure(stage: str) -> list[str]:
    """Files and folders of the code that `tasks.<stage>` and the runner import, directly or through others, without
    exempt modules (what those import counts)."""
    found = modules(f"tasks.{stage}") | modules(RUNNER)
    paths = {path_of(module) for module in found if not exempt(module, stage)}
    return sorted({unit_of(path, stage) for path in paths if path})


def modules(start: str) -> set[str]:
    """A module, all that it imports, directly or through others, and the packages that hold them."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        todo += graph().find_modules_directly_imported_by(module)
        parent = module.rpartition(".")[0]
        if parent:
            todo.append(parent)
    return seen


def path_of(module: str) -> str | None:
    """The file of a module; None for a package whose `__init__.py` is empty."""
    path = ROOT / Path(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    if file.name == "__init__.py" and not file.read_text(encoding="utf-8").strip():
        return None
    return file.relative_to(ROOT).as_posix()


def unit_of(path: str, stage: str) -> str:
    """The folder that is the unit of change for this file in this stage, else the file."""
    folders = [*FOLDERS, *(folder for folder, stages in FOLDERS_OF.items() if stage in stages)]
    return next((folder for folder in folders if path.startswith(f"{folder}/")), path)


def is_code(dep: str) -> bool:
    """Whether a dependency of dvc.yaml is code (or a file beside it) rather than data or a model."""
    return dep.startswith(("tasks/", "rlhf_core/", "flows/"))


def expected(stage: str, deps: list[str]) -> list[str]:
    """All dependencies that a stage should have: its data and models as they are, and its code."""
    data = [dep for dep in deps if not is_code(dep)]
    versions = ["tasks/stage/versions.json"] if stage in TRAINING else []
    return data + sorted(closure(stage) + versions)


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    path = ROOT / "dvc.yaml"
    text = path.read_text(encoding="utf-8")
    stale = 0
    for name, stage in YAML(typ="safe", pure=True).load(text)["stages"].items():
        now, right = stage["deps"], expected(name, stage["deps"])
        for sign, files in (("+", set(right) - set(now)), ("-", set(now) - set(right))):
            for file in sorted(files):
                stale += 1
                print(f"{name}: {sign} {file}")
        before, head, after = text.partition(f"\n  {name}:\n")
        text = before + head + DEPS.sub(lambda _, deps=right: _listed(deps), after, count=1)
    if write:
        path.write_text(text, encoding="utf-8")
        return 0
    return 1 if stale else 0


def _listed(deps: list[str]) -> str:
    """The dependencies as they are written in dvc.yaml: data, then code."""
    text = "    deps: [" + ", ".join(deps) + "]"
    return fill(text, 120, subsequent_indent=" " * 6, break_on_hyphens=False, break_long_words=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
