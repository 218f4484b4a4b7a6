"""What the code of the packages may not contain: every exception is named, with its reason."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "rlhf_core")

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.spawnl", "os.spawnv", "subprocess.getoutput",
    "subprocess.getstatusoutput", "torch.jit.load", "torch.hub.load", "pd.read_pickle", "pandas.read_pickle",
    "tempfile.mktemp",
}  # fmt: skip
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("rlhf_core/ppo/vllm_engine.py", "pickle"): "writes handles of GPU memory for a server of its own; reads no pickle",
    (
        "flows/commands/imports/trial.py",
        "YAML that is not safe",
    ): "reads the project's own example for the places of its "
    "values; the round-trip loader makes no objects of other classes",
}
"""(file, what) -> why it is harmless there."""


def sources() -> dict[str, ast.Module]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute; nothing for anything else."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> Any:
    """The literal value of a keyword of a call; None where it is missing or computed."""
    found = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return found.value if isinstance(found, ast.Constant) else None


def faults(tree: ast.Module) -> Iterator[str]:
    """Everything in a module that could run untrusted code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from faults_of_call(node)


def faults_of_call(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    if name in FORBIDDEN_CALLS:
        yield name
    if name == "torch.load" and keyword(call, "weights_only") is not True:
        yield "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and keyword(call, "allow_pickle") is not False:
        yield "np.load without allow_pickle=False"
    if keyword(call, "shell") not in (None, False):
        yield "shell=True"
    if name == "YAML" and keyword(call, "typ") != "safe":
        yield "YAML that is not safe"
    last = name.rpartition(".")[2]
    if last == "from_pretrained" and "trust_remote_code" not in {keyword.arg for keyword in call.keywords}:
        yield "from_pretrained without trust_remote_code"
    if keyword(call, "trust_remote_code") is True:
        yield "trust_remote_code=True"


def test_nothing_in_the_packages_runs_what_others_wrote() -> None:
    found = {(file, fault) for file, tree in sources().items() for fault in faults(tree)}
    assert len(sources()) > 100
    assert found == set(EXCEPTIONS)
    assert all(len(reason) > 10 for reason in EXCEPTIONS.values())


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "eval(text)",
        "import os; os.system(text)",
        "subprocess.run(text, shell=True)",
        "torch.load(path)",
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "np.load(path, None, flag)",
        "torch.load(path, weights_only=False)",
        "YAML()",
        "YAML(typ='unsafe')",
        "AutoModel.from_pretrained(path)",
        "load_causal_lm(path, trust_remote_code=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert list(faults(ast.parse(line)))


def test_every_model_is_loaded_from_safetensors_and_every_seed_of_weights_says_so() -> None:
    text = (ROOT / "rlhf_core" / "models" / "hf.py").read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if dotted(call.func).endswith("from_pretrained")]
    assert loads
    assert all(keyword(call, "use_safetensors") is True for call in loads)


def test_templates_escape_everything() -> None:
    for path in (ROOT / "tasks" / "page").glob("*.j2"):
        assert not re.search(r"\|\s*safe\b|autoescape|Markup", path.read_text(encoding="utf-8")), path.name


def test_commands_of_stages_are_constants() -> None:
    """No parameter reaches a shell: no `${…}` of DVC's templating, no `vars`, no `foreach`."""
    text = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    assert "${" not in text
    graph = YAML(typ="safe", pure=True).load(text)
    assert set(graph) == {"stages", "artifacts", "plots"}
    assert {name: stage["cmd"] for name, stage in graph["stages"].items()} == {
        name: f"python -m tasks {name}" for name in graph["stages"]
    }
