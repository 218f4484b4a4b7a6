"""MLflow's artifact repository for `dvc://`: the files of registered models, from the DVC cache of a project or its
remote.

MLflow finds it through the entry point in pyproject.toml, and imports it with every `import mlflow`, in programs that
have nothing to do with Leash, too: it imports next to nothing and changes nothing. DVC and transformers, which take
seconds, are imported when a file is read.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from functools import cached_property
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from mlflow.entities import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository

if TYPE_CHECKING:
    from tasks.stage.dvc_files import Stored

PROJECT_VARIABLE = "LEASH_PROJECT"
"""Environment variable of a reader of registered models: the project whose DVC cache and remote hold them."""
MLMODEL, REQUIREMENTS = "MLmodel", "requirements.txt"
TOKENIZER = "components/tokenizer/"
"""Where MLflow's loader expects the files of the tokenizer; the model's are at the root, as in `models/policy`."""
NOT_OF_THE_TOKENIZER = ("config.json", "generation_config.json", "provenance.json")
WEIGHTS = (".safetensors", ".bin", ".index.json")


class DvcArtifactRepository(ArtifactRepository):
    """The files of `dvc://models/policy?md5=HASH&project=FOLDER`, with an `MLmodel` beside them, so that
    `mlflow.transformers.load_model`, `mlflow.pyfunc.load_model` and `mlflow models serve` read the folder. Read-only;
    every byte is checked against its hash."""

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        super().__init__(artifact_uri, tracking_uri, registry_uri)
        query = parse_qs(urlsplit(artifact_uri).query)
        self._digest = query.get("md5", [""])[0]
        self._hint = query.get("project", [""])[0]

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """Files and folders directly below `path`; their sizes in bytes."""
        inside = PurePosixPath(path or "")
        found: dict[str, FileInfo] = {}
        for name, source in self._files.items():
            place = PurePosixPath(name)
            if inside not in place.parents:
                continue
            child = inside / place.relative_to(inside).parts[0]
            found[str(child)] = FileInfo(str(child), child != place, _size(source) if child == place else None)
        return list(found.values())

    def download_artifacts(self, artifact_path: str | None = None, dst_path: str | None = None) -> str:
        """Copy the file or folder `artifact_path` (None: all) below `dst_path` (None: a new folder). Returns its path.
        Raises MlflowException with one line where it is missing or damaged."""
        inside = PurePosixPath(artifact_path or "")
        wanted = [
            name for name in self._files if inside == PurePosixPath(name) or inside in PurePosixPath(name).parents
        ]
        if not wanted:
            raise MlflowException(f"{artifact_path}: no such file in {self.artifact_uri}")
        folder = Path(dst_path or tempfile.mkdtemp(prefix="leash-"))
        for name in wanted:
            self._download_file(name, str(folder / name))
        return str((folder / inside).resolve())

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        from rlhf_core.errors import UserError

        source, target = self._files[remote_file_path], Path(local_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.write_bytes(source) if isinstance(source, bytes) else source.copy(target)
        except (UserError, OSError) as error:
            raise MlflowException(f"{remote_file_path}: {error}") from None

    @cached_property
    def _files(self) -> dict[str, Stored | bytes]:
        """Path in the folder of the model -> file in the cache, or the content of a file that is made here."""
        from rlhf_core.errors import UserError
        from tasks.stage.dvc_adapter import stored_files

        if not self._digest:
            raise MlflowException(f"{self.artifact_uri}: no md5; expected dvc://models/policy?md5=HASH")
        try:
            stored = stored_files(_project(self._hint), self._digest)
            return {**stored, **_for_the_loader(stored)}
        except (UserError, OSError) as error:
            raise MlflowException(str(error)) from None

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        """Always raises MlflowException."""
        raise MlflowException("dvc:// is read-only; DVC writes models when the pipeline runs")

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Always raises MlflowException."""
        self.log_artifact(local_dir)


def _size(source: Stored | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.path.stat().st_size


def _project(hint: str) -> Path:
    """The project whose cache is read: `LEASH_PROJECT`, else the one that registered the model, else the current
    folder or the nearest above it. Raises MlflowException."""
    here = Path.cwd()
    named = os.environ.get(PROJECT_VARIABLE)
    candidates = [Path(named)] if named else [*([Path(hint)] if hint else []), here, *here.parents]
    for folder in candidates:
        if (folder / ".dvc").is_dir():
            return folder.resolve()
    places = named or " or ".join(filter(None, (hint, f"{here} or above")))
    raise MlflowException(f"no DVC project at {places}; set {PROJECT_VARIABLE} to the folder of a clone of Leash")


def _for_the_loader(stored: dict[str, Stored]) -> dict[str, Stored | bytes]:
    """What MLflow's flavors transformers and python_function need beside a Hugging Face folder: `MLmodel`, the versions
    of the packages, and the tokenizer's files in a folder of their own. Empty for what is no causal language model, or
    a model with Python code of its own, which MLflow would execute."""
    if "config.json" not in stored or "tokenizer_config.json" not in stored:
        return {}
    import mlflow
    import transformers

    config = json.loads(stored["config.json"].read())
    tokenizer = json.loads(stored["tokenizer_config.json"].read()).get("tokenizer_class", "")
    architecture = (config.get("architectures") or [""])[0]
    known = "auto_map" not in config and all(hasattr(transformers, name) for name in (architecture, tokenizer))
    if not known or not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return {}
    flavor = {
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": architecture,
        "model_binary": ".",
        "components": ["tokenizer"],
        "tokenizer_type": tokenizer,
        "transformers_version": transformers.__version__,
        "code": None,
    }
    function = {
        "loader_module": "mlflow.transformers",
        "python_version": platform.python_version(),
        "env": {"virtualenv": "python_env.yaml"},
    }
    text = json.dumps([{"type": "string", "required": True}])
    made: dict[str, Any] = {
        "flavors": {"transformers": flavor, "python_function": function},
        "signature": {"inputs": text, "outputs": text, "params": None},
        "mlflow_version": mlflow.__version__,
    }
    packages = "".join(f"{name}=={version(name)}\n" for name in ("mlflow", "torch", "transformers"))
    environment = {"python": platform.python_version(), "dependencies": [f"-r {REQUIREMENTS}"]}
    copies = {
        TOKENIZER + name: file
        for name, file in stored.items()
        if "/" not in name and name not in NOT_OF_THE_TOKENIZER and not name.endswith(WEIGHTS)
    }
    return {
        MLMODEL: json.dumps(made, indent=2).encode(),
        REQUIREMENTS: packages.encode(),
        "python_env.yaml": json.dumps(environment).encode(),
        **copies,
    }
