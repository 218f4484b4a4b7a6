"""`leash chat`: reads messages from a terminal or a pipe, and prints the models' answers."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.environment import find_root
from rlhf_core.config.precision import Precision
from rlhf_core.errors import UserError
from rlhf_core.inspect.dialogue import ChatModel, Start, load_chat_model, require_language_model
from tasks.params.loader import read_yaml
from tasks.stage.trust import warn_of_code

HELP = "Ctrl-C stops an answer, /reset forgets the conversation, /quit or Ctrl-D leaves."


@dataclass(frozen=True)
class Settings:
    """Settings of a conversation and of sampling."""

    temperature: float
    max_new_tokens: int
    seed: int
    fresh: bool = False
    """Every message begins a new conversation."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise UserError(f"--temperature {self.temperature}: give a number above 0")


def run_chat(
    folder: Path, beside: Path | None, settings: Settings, system: str | None, interpolation: tuple[Path, float] | None
) -> None:
    """Answer until the input ends. `interpolation`: the start model's folder and eta, for the first model. Raises
    UserError for a folder that holds no language model, and for models that cannot be interpolated."""
    folders = [folder] + ([beside] if beside is not None else [])
    for path in folders:
        require_language_model(path, trusted(path))
    start, names = None, [str(path) for path in folders]
    if interpolation is not None:
        start = Start(*interpolation, trusted(interpolation[0]))
        names[0] = f"{folder} at eta {start.eta:g}"
    models = [
        load_chat_model(
            path,
            name,
            system,
            trust_remote_code=trusted(path),
            start=start if place == 0 else None,
            precision=precision_of(path),
        )
        for place, (path, name) in enumerate(zip(folders, names, strict=True))
    ]
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{' beside '.join(names)}, temperature {settings.temperature:g}. {HELP}", flush=True)
    converse(models, settings, from_terminal() if interactive else from_pipe(), interactive)


def converse(models: list[ChatModel], settings: Settings, messages: Iterator[str], interactive: bool) -> None:
    """One answer of every model to each message. Its randomness depends on the seed and on the number of messages
    before it, those before a /reset included."""
    turn = 0
    for message in messages:
        if message == "/quit":
            return
        if message == "/reset":
            for model in models:
                model.reset()
            note("the conversation is forgotten")
        elif message.startswith("/") and message.split()[0][1:].isalpha():
            note(f"{message.split()[0]} is not a command. {HELP}")
        elif message:
            for model in models if settings.fresh else ():
                model.reset()
            respond(models, settings, message, turn, interactive)
            turn += 1


def respond(models: list[ChatModel], settings: Settings, message: str, turn: int, interactive: bool) -> None:
    """Print each model's answer to the message, with its name where there are two."""
    width = max(len(model.name) for model in models)
    for model in models:
        try:
            forgotten = model.add_message(message, min(settings.max_new_tokens, model.context // 2))
        except UserError as error:
            note(str(error))
            continue
        if forgotten:
            note(f"{model.name}: its context of {model.context} tokens is full; the oldest {forgotten} messages go")
        label = f"{model.name:<{width}} | " if len(models) > 1 else ""
        show(model.answer((settings.seed, turn), settings.max_new_tokens, settings.temperature), label, interactive)


def show(pieces: Iterator[str], label: str, interactive: bool) -> None:
    """Print an answer as it is generated, each line after the label; Ctrl-C at a terminal ends the answer, not the
    conversation."""
    print(label, end="", flush=True)
    indent = " " * (len(label) - 2) + "| " if label else ""
    try:
        for piece in pieces:
            print(piece.replace("\n", "\n" + indent), end="", flush=True)
    except KeyboardInterrupt:
        if not interactive:
            raise
        print(" …", end="")
    finally:
        pieces.close()  # type: ignore[attr-defined]
        print(flush=True)


def from_terminal() -> Iterator[str]:
    """Messages typed at the terminal, with line editing and the history of this conversation."""
    with suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


def from_pipe() -> Iterator[str]:
    """One message a line. Raises UserError for bytes that are not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"standard input, line {number}: not UTF-8 (byte {error.start})") from None


def note(text: str) -> None:
    """One line on stderr that is not from a model."""
    print(f"({text})", file=sys.stderr, flush=True)


def trusted(folder: Path, warn: Callable[[str], None] = warn_of_code) -> bool:
    """Whether Python code in the folder may run: `trust_remote_code` of its project; False elsewhere."""
    if project_params(folder).get("trust_remote_code") is not True:
        return False
    warn("chat:")
    return True


def precision_of(folder: Path) -> Precision:
    """In which the folder's model is loaded: `precision` of its project; float32 elsewhere."""
    return "bfloat16" if project_params(folder).get("precision") == "bfloat16" else "float32"


def project_params(folder: Path) -> dict[str, Any]:
    """params.yaml of the project that contains both the current folder and this one; empty elsewhere."""
    try:
        root = find_root()
    except UserError:
        return {}
    if not folder.expanduser().resolve().is_relative_to(root) or not (root / "params.yaml").is_file():
        return {}
    return read_yaml(root / "params.yaml")
