"""`leash chat`: reads messages from a terminal or a pipe, and prints the models' answers."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    """0: always the likeliest token."""
    max_new_tokens: int
    seed: int
    fresh: bool = False
    """Every message begins a new conversation."""


def run_chat(
    folder: Path, beside: Path | None, settings: Settings, system: str | None, interpolation: tuple[Path, float] | None
) -> None:
    """Answer until the input ends. `interpolation`: the start model's folder and eta, for the first model. Raises
    UserError for a folder that holds no language model, and for models that cannot be interpolated."""
    models: list[ChatModel] = []
    found = [(path, *project_settings(path)) for path in (folder, beside) if path is not None]
    for path, trusted, _ in found:
        require_language_model(path, trusted)
    for path, trusted, precision in found:
        name, start = str(path), None
        if interpolation is not None and not models:
            start = Start(*interpolation, project_settings(interpolation[0])[0])
            name = f"{folder} at eta {start.eta:g}"
        model = load_chat_model(path, name, system, trust_remote_code=trusted, start=start, precision=precision)
        models.append(model)
    interactive = sys.stdin.isatty()
    if interactive:
        names = " beside ".join(model.name for model in models)
        print(f"{names}, temperature {settings.temperature:g}. {HELP}", flush=True)
    converse(models, settings, from_terminal() if interactive else from_pipe(), interactive)


def converse(models: list[ChatModel], settings: Settings, messages: Iterator[str], interactive: bool) -> None:
    """Print one answer of every model to each message, with its name where there are two. Its randomness depends on the
    seed and on the number of messages before it, those before a /reset included."""
    turn, width = 0, max(len(model.name) for model in models)
    for message in messages:
        if message == "/quit":
            return
        if message == "/reset" or settings.fresh:
            for model in models:
                model.reset()
        if message == "/reset":
            note("the conversation is forgotten")
        elif message.startswith("/") and message.split()[0][1:].isalpha():
            note(f"{message.split()[0]} is not a command. {HELP}")
        elif message:
            for model in models:
                try:
                    forgotten = model.add_message(message, min(settings.max_new_tokens, model.context // 2))
                except UserError as error:
                    note(str(error))
                    continue
                if forgotten:
                    note(
                        f"{model.name}: its context of {model.context} tokens is full; the oldest {forgotten} "
                        "messages go"
                    )
                label = f"{model.name:<{width}} | " if len(models) > 1 else ""
                pieces = model.answer((settings.seed, turn), settings.max_new_tokens, settings.temperature)
                show(pieces, label, interactive)
            turn += 1


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


def project_settings(folder: Path) -> tuple[bool, Precision]:
    """Whether Python code in the folder may run, which prints a warning, and in which precision its model is loaded:
    `trust_remote_code` and `precision` of the project that contains both the current folder and this one; False and
    float32 elsewhere."""
    try:
        root = find_root()
    except UserError:
        return False, "float32"
    if not folder.expanduser().resolve().is_relative_to(root) or not (root / "params.yaml").is_file():
        return False, "float32"
    params = read_yaml(root / "params.yaml")
    trusted = params.get("trust_remote_code") is True
    if trusted:
        warn_of_code("chat:")
    return trusted, "bfloat16" if params.get("precision") == "bfloat16" else "float32"
