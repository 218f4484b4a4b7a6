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

from rlhf_core.config.dpo import PairConfig
from tasks.params.methods import METHODS, VARIANTS

if TYPE_CHECKING:
    from tests.conftest import Project, TinyRun

ROOT = Path(__file__).resolve().parents[1]
GRAPH: dict[str, Any] = YAML(typ="safe", pure=True).load(ROOT / "dvc.yaml")["stages"]
PACKAGES = ("rlhf_core.", "tasks.", "flows.")
ON_PAIRS = [method.name for method in METHODS if issubclass(method.model(), PairConfig)]


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
    """Taking a file away, or adding one too many, is noticed."""
    deps = GRAPH[stage]["deps"]
    code = [dep for dep in deps if closure.is_code(dep)]
    assert f"tasks/{stage}.py" in code
    data = [dep for dep in deps if dep not in code]
    assert closure.expected(stage, data) == deps
    assert closure.expected(stage, [*deps, "rlhf_core/unrelated.py"]) == deps


@pytest.mark.parametrize("pattern", closure.CANNOT_CHANGE_RESULTS)
def test_every_exemption_exists_and_has_a_reason(pattern: str) -> None:
    modules = [module for module in closure.graph().modules if fnmatchcase(module, pattern)]
    assert modules, "nothing of this name is left"
    assert len(closure.CANNOT_CHANGE_RESULTS[pattern]) > 5
    paths = {closure.path_of(module) for module in modules}
    listed = [dep for stage in GRAPH.values() for dep in stage["deps"] if dep in paths]
    assert not listed, "what is exempt is no dependency"


def test_what_exempt_modules_import_is_not_exempt_with_them() -> None:
    """tasks.stage.run is exempt; how it writes the outs is not."""
    for stage in GRAPH:
        assert "tasks/stage/outputs.py" in GRAPH[stage]["deps"]


def test_stages_that_write_a_model_depend_on_how_its_provenance_is_written() -> None:
    for stage, definition in GRAPH.items():
        writes = any(isinstance(out, str) and out.startswith("models/") for out in definition["outs"])
        assert (stage in closure.MODELS) is writes, stage
        assert ("tasks/stage/provenance.py" in definition["deps"]) is writes, stage


def test_stages_that_use_torch_depend_on_its_version() -> None:
    for stage, definition in GRAPH.items():
        sources = [(ROOT / dep).read_text(encoding="utf-8") for dep in definition["deps"] if dep.endswith(".py")]
        uses = any(
            re.search(r"^(import|from) (torch|transformers|tokenizers)\b", text, re.MULTILINE) for text in sources
        )
        assert ("tasks/stage/versions.json" in definition["deps"]) is uses, stage


@pytest.mark.pipeline
@pytest.mark.parametrize("stage", GRAPH)
def test_modules_loaded_at_run_time_are_dependencies(tiny_run: "TinyRun", stage: str) -> None:
    """Lazy imports and imports by name, too."""
    loaded = seen(tiny_run, stage)["modules"]
    own = [name for name in loaded if name.startswith(PACKAGES)]
    assert own, "the recorder saw nothing"
    missing = []
    for name in own:
        path = closure.path_of(name)
        if path and not closure.exempt(name, stage) and path not in GRAPH[stage]["deps"]:
            missing.append(path)
    assert not missing


@pytest.mark.pipeline
@pytest.mark.parametrize("stage", GRAPH)
def test_files_opened_at_run_time_are_dependencies(tiny_run: "TinyRun", stage: str) -> None:
    root = tiny_run.project.root
    opened = [Path(name) for name in seen(tiny_run, stage)["opened"]]
    inside = {path.relative_to(root).as_posix() for path in opened if path.is_relative_to(root)}
    assert "params.yaml" in inside, "the recorder saw nothing"
    foreign = {name for name in inside if not allowed(stage, name) and not covered(GRAPH[stage]["deps"], name)}
    assert not foreign


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
    if stage == "report" and name.startswith("metrics/"):  # what it tells MLflow of the whole run
        return True
    outs = outs_of(stage)
    return covered(outs, name.replace(".partial", "").replace("/.", "/").removeprefix("."))


def outs_of(stage: str) -> list[str]:
    listed = [out for kind in ("outs", "metrics", "plots") for out in GRAPH[stage].get(kind, [])]
    return [out if isinstance(out, str) else next(iter(out)) for out in listed]


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("rlhf_core/models/token_logprobs.py", {"ppo", "select", *ON_PAIRS, *VARIANTS, "evaluate"}),
        ("rlhf_core/ppo/trainer.py", {"ppo", *VARIANTS}),
        ("tasks/page/page.py", {"report"}),
        ("tasks/schemas/heldout.py", {"ppo", "best_of_n", *VARIANTS, "evaluate"}),
        ("tasks/params/evaluate.py", {"check", "best_of_n", "evaluate"}),
        ("tasks/params/methods.py", {"check", "evaluate", "report"}),
        ("tasks/tracking/tracker.py", set()),
        ("tasks/stage/run.py", set()),
        ("flows/pipeline.py", set()),
    ],
)
def test_an_edit_makes_stale_what_it_concerns(finished: "Project", file: str, stale: set[str]) -> None:
    with (finished.root / file).open("a", encoding="utf-8") as text:
        text.write("\n# a remark\n")
    said = finished.dvc("status").stdout.splitlines()
    assert {line.removesuffix(":") for line in said if line.endswith(":") and not line.startswith("\t")} == stale
