"""Registered models load from another folder: from DVC's cache, else from its remote, and never with other bytes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from transformers import AutoModelForCausalLM

from tasks.dvc_artifacts import PROJECT_VARIABLE
from tasks.tracking.exporter import export
from tests.rlhf_core.conftest import tiny_lm, tiny_tokenizer
from tests.tasks.tracking.conftest import evaluate, pipeline

REMOTE = "[core]\n    no_scm = true\n    analytics = false\n    remote = store\n['remote \"store\"']\n    url = {}\n"


def dvc(root: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "dvc", *words], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A DVC project whose cache and remote hold a policy, and the policy's hash. Not to be changed."""
    root = tmp_path_factory.mktemp("project")
    (root / ".dvc").mkdir()
    config = REMOTE.format(tmp_path_factory.mktemp("remote"))
    (root / ".dvc/config").write_text(config, encoding="utf-8")
    tiny_lm().save_pretrained(root / "models/policy")
    tiny_tokenizer().save_pretrained(root / "models/policy")
    (root / "models/policy/provenance.json").write_text("{}", encoding="utf-8")
    dvc(root, "add", "--quiet", "models/policy")
    dvc(root, "push", "--quiet")
    digest = (root / "models/policy.dvc").read_text(encoding="utf-8").split("md5: ")[1].split()[0]
    return root, digest


@pytest.fixture
def project(root: Path, made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository with the policy in its DVC cache, but not in the workspace; the current folder is elsewhere."""
    shutil.copytree(made[0] / ".dvc", root / ".dvc")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    for module in ("_tracking_service", "_model_registry"):  # a server that ran in this process has set them
        monkeypatch.setattr(f"mlflow.tracking.{module}.utils._{module.split('_')[1]}_uri", None, raising=False)
    return root


@pytest.fixture
def registered(project: Path, made: tuple[Path, str]) -> Path:
    """The same with the policy in MLflow's registry."""
    register(project, made[1])
    return project


def register(root: Path, digest: str) -> None:
    evaluate(root, pipeline(root), digest)
    assert export(root) == []


def damage(root: Path) -> Path:
    """Change one byte of the largest object in the cache; its path."""
    blob = max(
        (path for path in (root / ".dvc/cache").rglob("*") if path.is_file()), key=lambda one: one.stat().st_size
    )
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)
    return blob


def test_the_policy_loads_as_a_pipeline_from_another_folder(registered: Path) -> None:
    generator = mlflow.transformers.load_model("models:/a-repository-policy@current")
    (answer,) = generator("a b", max_new_tokens=3, do_sample=False)
    assert answer["generated_text"].startswith("a b")
    again = mlflow.transformers.load_model("models:/a-repository-policy/1", return_type="components")
    assert set(again) == {"task", "model", "tokenizer"}


def test_the_downloaded_folder_is_the_one_dvc_keeps(registered: Path, made: tuple[Path, str], tmp_path: Path) -> None:
    folder = Path(mlflow.artifacts.download_artifacts("models:/a-repository-policy@current", dst_path=str(tmp_path)))
    original = made[0] / "models/policy"
    assert {path.name for path in original.iterdir()} < {path.name for path in folder.iterdir()}
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in original.iterdir())
    AutoModelForCausalLM.from_pretrained(folder)
    one = mlflow.artifacts.download_artifacts(
        "models:/a-repository-policy@current/config.json", dst_path=str(tmp_path / "elsewhere")
    )
    assert Path(one).read_bytes() == (original / "config.json").read_bytes()


def test_what_the_cache_lacks_comes_from_the_remote(registered: Path) -> None:
    shutil.rmtree(registered / ".dvc/cache")
    mlflow.transformers.load_model("models:/a-repository-policy@current")
    assert (registered / ".dvc/cache").is_dir()


def test_what_neither_has_is_an_error_of_one_line(registered: Path, tmp_path: Path) -> None:
    shutil.rmtree(registered / ".dvc/cache")
    (registered / ".dvc/config").write_text(REMOTE.format("https://user:hunter2@127.0.0.1:1/store"), encoding="utf-8")
    with pytest.raises(MlflowException, match=r"neither the DVC cache of .* nor its remote has it") as caught:
        mlflow.artifacts.download_artifacts("models:/a-repository-policy@current", dst_path=str(tmp_path))
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_damaged_cache_is_an_error_of_one_line_and_hands_nothing_out(registered: Path, tmp_path: Path) -> None:
    blob = damage(registered)
    (tmp_path / "out").mkdir()
    with pytest.raises(MlflowException, match="other bytes than those of its hash") as caught:
        mlflow.artifacts.download_artifacts("models:/a-repository-policy@current", dst_path=str(tmp_path / "out"))
    assert str(blob) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out/model.safetensors").exists()


def test_another_machine_names_its_clone_or_is_in_it(
    registered: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(registered / ".dvc", clone / ".dvc")
    shutil.rmtree(registered / ".dvc")
    with pytest.raises(MlflowException, match="set LEASH_PROJECT to the folder of a clone of Leash"):
        mlflow.artifacts.download_artifacts("models:/a-repository-policy@current")
    monkeypatch.setenv(PROJECT_VARIABLE, str(clone))
    mlflow.artifacts.download_artifacts("models:/a-repository-policy@current")
    monkeypatch.delenv(PROJECT_VARIABLE)
    (clone / "notebooks").mkdir()
    monkeypatch.chdir(clone / "notebooks")
    mlflow.artifacts.download_artifacts("models:/a-repository-policy@current")


def test_a_model_with_code_of_its_own_is_downloaded_and_not_loaded(project: Path, tmp_path: Path) -> None:
    tiny_lm().save_pretrained(project / "models/own")
    tiny_tokenizer().save_pretrained(project / "models/own")
    config = project / "models/own/config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("{", '{"auto_map": {"AutoModel": "own.Own"},', 1))
    dvc(project, "add", "--quiet", "models/own")
    register(project, (project / "models/own.dvc").read_text().split("md5: ")[1].split()[0])
    folder = mlflow.artifacts.download_artifacts("models:/a-repository-policy@current", dst_path=str(tmp_path))
    assert (Path(folder) / "model.safetensors").is_file()
    with pytest.raises(MlflowException, match="MLmodel"):
        mlflow.transformers.load_model("models:/a-repository-policy@current")


def test_the_policy_answers_through_mlflows_python_function(registered: Path) -> None:
    """And so by `mlflow models serve`, which calls it."""
    model = mlflow.pyfunc.load_model("models:/a-repository-policy/1")
    first, second = model.predict(["a b", "a b"])
    assert first.startswith("a b")
    assert second.startswith("a b")


def test_importing_mlflow_elsewhere_changes_nothing() -> None:
    """MLflow imports the plugin in every program of the environment."""
    script = """
import os, sys
before = dict(os.environ)
import mlflow
names = ("dvc", "transformers", "torch", "flows", "prefect", "rlhf_core", "tasks.tracking", "tasks.stage")
new = sorted(name for name in os.environ if name not in before and not name.startswith("_MLFLOW"))
print([one for one in names if one in sys.modules], new)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
    assert "artifact repository" not in done.stderr
