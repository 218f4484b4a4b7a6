"""Reads `params.yaml` into strict models; every wrong key has a line of its own. YAML 1.2, as DVC reads it: PyYAML
would read `1e-4` as text and `off` as false."""

from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.errors import UserError, did_you_mean
from tasks.params.methods import METHODS, VARIANTS
from tasks.params.scorer import DEFAULT, MADE_FOR_IT, REWARD_MODEL

PARAMS_FILE = Path("params.yaml")
HELDOUT, PTX_FILE = "heldout", "ptx.txt"
"""The defaults of `evaluate.prompts` and `ppo.ptx.file`."""
LARGEST_BYTES = 2**20
MOST_VALUES = 10_000

Model = TypeVar("Model", bound=BaseModel)


def read_yaml(path: Path = PARAMS_FILE) -> dict[str, Any]:
    """The file as plain dictionaries, as `parse_yaml`. Raises UserError also when it is missing or too large."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UserError(f"{path}: larger than {LARGEST_BYTES // 2**10} KiB; that is no parameter file")
        return parse_yaml(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        raise UserError(f"{path}: file not found; copy one of examples/*.yaml there") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a parameter file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the file as UTF-8") from None


def parse_yaml(text: str, path: Path) -> dict[str, Any]:
    """The text of the parameter file `path` as plain dictionaries. Without its block a method is switched off, and
    `round` is empty. Raises UserError when it is not YAML, is not a mapping, or has a tag such as `!!python/object`.
    """
    try:
        content = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise UserError(f"{path}: no valid YAML ({_problem(error)})") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; parameters have a few levels") from None
    except ValueError as error:
        raise UserError(f"{path}: a value cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping of blocks (ingest, base, sft, …)")
    _refuse_bomb(content, path)
    return with_absent(content)


def with_absent(content: dict[str, Any]) -> dict[str, Any]:
    """The content, in which a method without its block is switched off, and `round` is there."""
    absent: dict[str, Any] = {"round": {}, **{method.name: {"enabled": False} for method in METHODS}}
    return content | {name: block for name, block in absent.items() if name not in content}


NUMERICS: dict[str, Any] = {"precision": "float32", "deterministic": True}
"""Parameters outside all blocks that may be absent, and their defaults."""


RAW_FILES, ANSWERS, SFT_ENABLED = "raw_files", "answers", "sft_enabled"
ANSWERING = (
    *("batch_size", "max_new_tokens", "max_prompt_tokens", "max_prompts", "prompts", "stop_tokens", "temperature"),
)
"""The keys of `evaluate` with which `best_of_n` samples; the others do not concern it."""


def with_derived(content: dict[str, Any]) -> dict[str, Any]:
    """The content with the parameters that may be absent, `scorer` and those of `NUMERICS`, and four that follow from
    the others: `reward_model`, whether one of the terms of `scorer` is the reward model, `sft_enabled`, `raw_files`,
    and `answers`, how `evaluate` samples. `check` writes them where DVC can track them."""
    scorer = content.get("scorer", DEFAULT)
    terms = [term.get("term") for term in scorer if isinstance(term, dict)] if isinstance(scorer, list) else []
    evaluate = content.get("evaluate")
    answers = {key: evaluate[key] for key in ANSWERING if key in evaluate} if isinstance(evaluate, dict) else {}
    sft = content.get("sft")
    derived = {
        REWARD_MODEL: REWARD_MODEL in terms,
        SFT_ENABLED: not isinstance(sft, dict) or sft.get("enabled") is not False,
        RAW_FILES: _raw_files(content),
        ANSWERS: answers,
    }
    return NUMERICS | content | {"scorer": scorer} | derived


def _raw_files(content: dict[str, Any]) -> dict[str, Any]:
    """The files and folders below data/raw/ that other blocks than `ingest` name; null and empty where they do not. A
    variant of PPO can name a text of its own."""

    def block(of: Any, *names: str) -> dict[str, Any]:
        for name in names:
            of = of.get(name) if isinstance(of, dict) else None
        return of if isinstance(of, dict) else {}

    base, prompts = block(content, "base"), block(content, "evaluate").get("prompts", HELDOUT)
    texts = set()
    for changed in ({}, *(block(content, name, "settings", "ptx") for name in VARIANTS)):
        ptx = block(content, "ppo", "ptx") | changed
        if ptx.get("coef"):
            texts.add(str(ptx.get("file", PTX_FILE)))
    return {
        "prompts": None if prompts == HELDOUT else prompts,
        "texts": sorted(texts),
        "pretrained": block(base, "pretrained").get("model") if base.get("source") == "pretrained" else None,
        "reward_base": block(content, "reward").get("base"),
    }


def why_switched_off(content: dict[str, Any], stage: str) -> str:
    """Why the stage only writes empty outputs: `enabled` is false, it is for a reward model that is not used, or it
    would make pairs where the reward model learns from ratings. Empty where it runs; `sft` always does, and makes the
    base model its model where it is not enabled."""
    found = content.get(stage)
    block = found if isinstance(found, dict) else {}
    if stage in MADE_FOR_IT and not with_derived(content)[REWARD_MODEL]:
        return f"`scorer` in {PARAMS_FILE} has no term {REWARD_MODEL}"
    if stage == "preferences" and block.get("source") == "ratings":
        return f"preferences.source is ratings in {PARAMS_FILE}"
    return f"{stage}.enabled is false in {PARAMS_FILE}" if block.get("enabled") is False and stage != "sft" else ""


def read_threads(path: Path) -> int | None:
    """`threads` of the file; None where it cannot be read."""
    with suppress(UserError):
        threads = read_yaml(path).get("threads")
        return threads if isinstance(threads, int) else None
    return None


def _problem(error: YAMLError) -> str:
    """What is wrong, and in which line; the line is not quoted, because it may hold a secret."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "context", None) or str(error)
    where = f", line {mark.line + 1}" if mark is not None else ""
    return " ".join(str(problem).split(" with value ")[0].split()) + where


def _refuse_bomb(content: Any, path: Path) -> None:
    """Raise UserError when the values, every alias (`*name`) written out, are more than `MOST_VALUES`, or endless.

    A few lines of aliases of aliases are billions of values when they are expanded.
    """
    sizes: dict[int, int] = {}
    open_: set[int] = set()

    def size(value: Any) -> int:
        if not isinstance(value, dict | list):
            return 1
        if id(value) in open_:
            raise UserError(f"{path}: an alias (*name) is inside what it names; write the values out")
        if id(value) not in sizes:
            open_.add(id(value))
            sizes[id(value)] = 1 + sum(map(size, value.values() if isinstance(value, dict) else value))
            open_.discard(id(value))
        return sizes[id(value)]

    if size(content) > MOST_VALUES:
        raise UserError(f"{path}: more than {MOST_VALUES} values, aliases (*name) written out; write fewer")


def parse(model: type[Model], content: Any, where: str = "", file: Path = PARAMS_FILE) -> Model:
    """`content` of `file` as `model`. Raises UserError naming every wrong key, its value and what is allowed, in a line
    each."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = ";\n".join(_describe(problem, where, model) for problem in error.errors())
        raise UserError(f"{file}: {problems}") from None


def _describe(problem: Any, where: str, model: type[BaseModel]) -> str:
    key = ".".join([where, *(str(part) for part in problem["loc"])]).strip(".")
    if problem["type"] == "extra_forbidden":
        *above, name = problem["loc"]
        return f"{key}: unknown parameter{did_you_mean(str(name), _names(model, above)) or '; remove it'}"
    if problem["type"] == "missing":
        return f"{key}: missing parameter; see docs/parameters.md"
    message = problem["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(problem["input"], dict) else f" (got {problem['input']!r})"
    return f"{key}: {message}{shown}" if key else message


def _names(model: type[BaseModel], path: list[Any]) -> list[str]:
    """The parameters of the block at `path` below `model`; none where the path leads through something else."""
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        found = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
        blocks = [one for one in found if issubclass(one, BaseModel)]
        if not blocks:
            return []
        model = blocks[0]
    return list(model.model_fields)
