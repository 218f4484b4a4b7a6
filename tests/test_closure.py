"""Each stage depends on exactly the code that can change its result: by its imports, and by what it really loads."""

import importlib.util
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from tasks.params.methods import VARIANTS
from tasks.tracking.record import shown_files
from tests.conftest import LIGHT

if TYPE_CHECKING:
    from tests.conftest import Project, TinyRun

ROOT = Path(__file__).resolve().parents[1]
GRAPH: dict[str, Any] = YAML(typ="safe", pure=True).load(ROOT / "dvc.yaml")["stages"]
PACKAGES = ("rlhf_core.", "tasks.", "flows.")


def load_closure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("closure", ROOT / "tests" / "closure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


closure = load_closure()


@pytest.mark.parametrize("stage", GRAPH)
def test_dvc_yaml_has_exactly_the_code_that_is_imported(stage: str) -> None:
    deps = GRAPH[stage]["deps"]
    assert deps == closure.expected(stage, deps), "run `python tests/closure.py --write`"


@pytest.mark.parametrize("stage", GRAPH)
def test_the_closure_alone_makes_the_list(stage: str) -> None:
    """A file too few or too many is noticed."""
    deps = GRAPH[stage]["deps"]
    code = [dep for dep in deps if closure.is_code(dep)]
    assert f"tasks/{stage}.py" in code
    data = [dep for dep in deps if dep not in code]
    assert closure.expected(stage, data) == deps
    assert closure.expected(stage, [*deps, "rlhf_core/unrelated.py"]) == deps


@pytest.mark.parametrize("pattern", closure.CANNOT_CHANGE_RESULTS)
def test_every_exemption_exists_and_has_a_reason(pattern: str) -> None:
    modules = [module for module in closure.graph().modules if fnmatchcase(module, pattern)]
    assert modules, "there is no module of this name"
    assert len(closure.CANNOT_CHANGE_RESULTS[pattern]) > 5
    paths = {closure.path_of(module) for module in modules}
    listed = [dep for stage in GRAPH.values() for dep in stage["deps"] if dep in paths]
    assert not listed, "what is exempt is no dependency"


def test_what_exempt_modules_import_is_not_exempt_with_them() -> None:
    """tasks.stage.run is exempt; how it writes the outs is not."""
    for stage in GRAPH:
        assert "tasks/stage/outputs.py" in GRAPH[stage]["deps"]


def test_no_shared_folder_imports_a_stage() -> None:
    stages = {f"tasks.{stage}" for stage in GRAPH}
    for module in closure.graph().modules - stages:
        assert not stages & closure.graph().find_modules_directly_imported_by(module), module


def test_stages_that_write_a_model_depend_on_how_its_provenance_is_written() -> None:
    for stage, definition in GRAPH.items():
        writes = any(isinstance(out, str) and out.startswith("models/") for out in definition["outs"])
        assert (stage in closure.MODELS) is writes, stage
        assert ("tasks/stage/provenance.py" in definition["deps"]) is writes, stage


def test_stages_that_use_torch_depend_on_its_version() -> None:
    loads = re.compile(r"^\s*(import|from) (torch|transformers|tokenizers)\b", re.MULTILINE)
    for stage, definition in GRAPH.items():
        own = [closure.path_of(name) for name in closure.modules(f"tasks.{stage}")]
        uses = any(path and loads.search((ROOT / path).read_text(encoding="utf-8")) for path in own)
        assert ("tasks/stage/versions.json" in definition["deps"]) is uses, stage


def closest(path: str) -> set[str]:
    """The stages that an edit of this file makes stale themselves; DVC finds those below them."""
    return {stage for stage, definition in GRAPH.items() if covered(definition["deps"], path)}


PPO = {"ppo", *VARIANTS}
JUDGING = {"select", "evaluate"}


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("rlhf_core/ppo/trainer.py", PPO | JUDGING),
        ("rlhf_core/evaluation/wins.py", JUDGING),
        ("tasks/evaluation/results.py", JUDGING),
        ("tasks/page/page.py", {"report"}),
        ("tasks/page/style.css.j2", {"report"}),
        ("tasks/schemas/columns.py", set()),
        ("tasks/tracking/exporter.py", set()),
        ("tasks/stage/run.py", set()),
        ("flows/pipeline.py", set()),
        ("flows/commands/doctor.py", set()),
        ("rlhf_core/config/sft.py", {"check", "sft", "rejection_sft"} | JUDGING),
        ("rlhf_core/config/ppo.py", PPO | JUDGING | {"check"}),
    ],
)
def test_an_edit_concerns_the_right_stages(file: str, stale: set[str]) -> None:
    assert (ROOT / file).is_file()
    assert closest(file) == stale


def test_evaluation_code_trains_no_model() -> None:
    trained = set(closure.MODELS) - {"select"}
    shared = {"rlhf_core/evaluation/judges.py"}  # the judge of the demo also labels preferences
    files = {file.relative_to(ROOT).as_posix() for file in (ROOT / "rlhf_core/evaluation").glob("*.py")}
    of_reward = {f"rlhf_core/evaluation/{name}.py" for name in ("agreement", "baselines", "calibration", "intervals")}
    for file in files - shared - of_reward:
        assert not closest(file) & trained, file


def test_dvc_yaml_can_be_read_by_a_person() -> None:
    assert len((ROOT / "dvc.yaml").read_text(encoding="utf-8").splitlines()) <= 300


def test_a_cache_of_python_does_not_make_a_folder_dirty() -> None:
    assert "__pycache__" in (ROOT / ".dvcignore").read_text(encoding="utf-8").splitlines()


def test_the_page_of_a_folder_is_no_part_of_what_stages_depend_on() -> None:
    """All but that of data/raw, which is in the hash of the raw data."""
    pages = {f"/{dep}/README.md" for definition in GRAPH.values() for dep in definition["deps"]} - {
        f"/{out}/README.md" for stage in GRAPH for out in outs_of(stage)
    }
    here = {page for page in pages if (ROOT / page[1:]).is_file()} - {"/data/raw/README.md"}
    assert len(here) > 1
    assert here <= set((ROOT / ".dvcignore").read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("stage", GRAPH)
def test_modules_loaded_at_run_time_are_dependencies(tiny_run: "TinyRun", stage: str) -> None:
    """Lazy imports and imports by name, too."""
    loaded = seen(tiny_run, stage)["modules"]
    own = [name for name in loaded if name.startswith(PACKAGES)]
    assert own, "the recorder saw nothing"
    missing = []
    for name in own:
        path = closure.path_of(name)
        if path and not closure.exempt(name, stage) and not covered(GRAPH[stage]["deps"], path):
            missing.append(path)
    assert not missing


@pytest.mark.parametrize("stage", GRAPH)
def test_files_opened_at_run_time_are_dependencies(tiny_run: "TinyRun", stage: str) -> None:
    root = tiny_run.project.root
    opened = [Path(name) for name in seen(tiny_run, stage)["opened"]]
    inside = {path.relative_to(root).as_posix() for path in opened if path.is_relative_to(root)}
    assert "params.yaml" in inside, "the recorder saw nothing"
    foreign = {name for name in inside if not allowed(stage, name) and not covered(GRAPH[stage]["deps"], name)}
    assert not foreign


@pytest.mark.parametrize("stage", LIGHT)
def test_a_stage_that_is_switched_off_or_only_reads_files_loads_no_heavy_library(
    tiny_run: "TinyRun", stage: str
) -> None:
    loaded = set(seen(tiny_run, stage)["modules"])
    assert "tasks.stage.run" in loaded, "the recorder saw nothing"
    assert not loaded & {"torch", "transformers", "mlflow"}


def seen(tiny_run: "TinyRun", stage: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((tiny_run.record / f"{stage}.json").read_text(encoding="utf-8"))
    return found


def covered(deps: list[str], name: str) -> bool:
    return any(name == dep or name.startswith(f"{dep}/") for dep in deps)


def allowed(stage: str, name: str) -> bool:
    """What a stage may open besides: code (its modules are checked by name), DVC's own files, its own state and outs,
    and params.yaml, of which DVC tracks the values."""
    if name.endswith((".py", ".pyc", ".gitignore", ".dvcignore", ".dvc")) or "/.dvc" in name:
        return True
    if name in {"params.yaml", "dvc.yaml", "dvc.lock"} or name.startswith((".dvc/", ".git/", "work/")):
        return True
    if stage == "report" and any(covered(list(shown_files(other)), name) for other in GRAPH):  # copied for MLflow
        return True
    outs = outs_of(stage)
    return covered(outs, name.replace(".partial", "").replace("/.", "/").removeprefix("."))


def outs_of(stage: str) -> list[str]:
    listed = [out for kind in ("outs", "metrics", "plots") for out in GRAPH[stage].get(kind, [])]
    return [out if isinstance(out, str) else next(iter(out)) for out in listed]


STALE_AFTER: dict[str, set[str]] = {
    "rlhf_core/ppo/trainer.py": PPO | JUDGING,
    "tasks/page/page.py": {"report"},
    "tasks/schemas/validation.py": set(),
    "tasks/params/evaluate.py": {"check", "best_of_n", "select", "evaluate"},
    "tasks/params/methods.py": {"check", "select", "evaluate", "report"},
    "tasks/tracking/record.py": set(),
    "tasks/stage/run.py": set(),
    "flows/pipeline.py": set(),
    "models/judges/README.md": set(),
    "rewards/README.md": set(),
    "rounds/README.md": set(),
}


@pytest.mark.slow
def test_an_edit_makes_stale_what_it_concerns(finished: "Project") -> None:
    def stale_after(*files: str) -> set[str]:
        before = {finished.root / file: (finished.root / file).read_bytes() for file in files}
        for path, content in before.items():
            path.write_bytes(content + b"\n# a remark\n")
        stale = finished.stale()
        for path, content in before.items():
            path.write_bytes(content)
        return stale

    harmless = [file for file, stale in STALE_AFTER.items() if not stale]
    assert len(harmless) > 4
    assert stale_after(*harmless) == set(), {file: stale_after(file) for file in harmless}
    for file, stale in STALE_AFTER.items():
        assert file in harmless or stale_after(file) == stale, file
