"""The command line `leash`: arguments, exit codes and what is printed at the end. Everything heavy is imported by the
command that needs it. Exit codes: 0; 2 for what the user can mend, with one line on stderr; 1 for a crash; 130 and 143
when it was stopped."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn, ParamSpec

import typer

from flows.environment import find_root
from rlhf_core.errors import UserError

P = ParamSpec("P")
Seed = partial(typer.Option, min=0, max=2**32 - 1)
"""As `seed` in params.yaml."""

app = typer.Typer(
    help="Leash: preferences in, an evaluated policy out, every step reproducible.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Register a command; a UserError ends it with its one line and exit code 2, an interrupt with 130."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        from flows.terminal import complain

        try:
            function(*args, **kwargs)
        except UserError as error:
            complain(str(error))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            complain("stopped; nothing is left running")
            raise typer.Exit(130) from None
        except SystemExit:
            complain("stopped by a signal; nothing is left running")
            raise

    return app.command(function.__name__.strip("_"))(guarded)


@command
def run(
    stages: Annotated[list[str] | None, typer.Argument(help="Stages, each with what it needs. None: all.")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Run even what is up to date.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds that one stage may take.")] = None,
    retries: Annotated[int, typer.Option(help="How often to try again after a failure that may pass.", min=0)] = 2,
    retry_delay: Annotated[float, typer.Option(help="Seconds before trying again.", min=0.0)] = 10.0,
) -> None:
    """Run the pipeline: each stage a Prefect task, each result from DVC's cache where DVC has it."""
    root = find_root()
    install_signal_handlers()
    _quiet_prefect()
    from flows import driver, runner
    from flows.graph import read_graph
    from flows.terminal import open_screen
    from tasks.params.all import Params
    from tasks.params.loader import PARAMS_FILE, parse, read_yaml

    graph = read_graph(root)
    graph.select(stages)
    if "check" in graph.stages:  # which would refuse the same, after a server has started
        parse(Params, read_yaml(root / PARAMS_FILE), file=PARAMS_FILE)
    open_screen()
    with driver.sole(root):
        code = runner.run(root, stages or None, force, retries, retry_delay, timeout)
    if code:
        raise typer.Exit(code)
    print("\n" + _where(root))


@command
def where() -> None:
    """Say where report, models and the MLflow page are."""
    print(_where(find_root()))


@command
def import_(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="A JSONL or Parquet file, or a folder of them.")],
    force: Annotated[bool, typer.Option("--force", help="Replace data imported before.")] = False,
) -> None:
    """Bring data files into data/raw/ and have DVC track them."""
    root = find_root()
    from tasks.datasets.importer import import_data

    import_data(source.expanduser().resolve(), root, force)


@command
def serve(
    cron: Annotated[str, typer.Option(help="Five fields: minute hour day month weekday.")] = "0 3 * * *",
    timezone: Annotated[str, typer.Option(help="Time zone of the fields, such as Europe/Berlin.")] = "UTC",
) -> None:
    """Run the pipeline on a schedule, one run at a time, until stopped. Needs a Prefect server (leash up)."""
    root = find_root()
    install_signal_handlers()
    from flows import serve as nightly

    if nightly.serve(root, cron, timezone) != 0:
        raise typer.Exit(1)


@command
def up(
    port: Annotated[int, typer.Option(help="Port of the Prefect server.", min=1, max=65535)] = 4200,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the server that `leash up` started.")] = False,
) -> None:
    """Start a Prefect server in the background, on this machine only."""
    root = find_root()
    from flows import server

    if stop:
        print("Prefect server stopped" if server.down(root) else "no server to stop: `leash up` has started none")
        return
    url = server.up(root, port)
    print(f"Prefect server: {url.removesuffix('/api')}  (log: work/prefect-server.log; stop: leash up --stop)")
    print("`leash run` and `leash serve` in this project find it by themselves. For other shells and tools:")
    print(f"  export PREFECT_API_URL={url}")
    print(f"  prefect config set PREFECT_API_URL={url}")


@command
def ui(port: Annotated[int, typer.Option(help="Port of the page.", min=1, max=65535)] = 5000) -> None:
    """Show the MLflow page of this project's runs."""
    root = find_root()
    from flows.commands.ui import show

    show(root, port)


@command
def doctor() -> None:
    """Check versions, device, disk, git, DVC, parameters and servers, and say what to do."""
    root = find_root()
    from flows.commands.doctor import examine, render

    checks = examine(root)
    print(render(checks))
    if any(check.verdict == "BROKEN" for check in checks):
        raise typer.Exit(1)


@command
def audit(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    params: Annotated[Path | None, typer.Option(help="Parameter file. None: params.yaml of the project.")] = None,
) -> None:
    """Try the PPO settings on problems whose optimum is known: total variation to it, and the gradient's bias."""
    path = params if params is not None else find_root() / "params.yaml"
    from flows.commands.audit.audit import audit_file
    from flows.commands.audit.terminal import render

    found = audit_file(path)
    print(json.dumps(found, ensure_ascii=False) if as_json else render(found), flush=True)


@command
def chat(
    model: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder, such as models/policy.")],
    beside: Annotated[Path | None, typer.Option(help="A second model folder, whose answers stand below.")] = None,
    temperature: Annotated[float, typer.Option(help="Of sampling; 1 is the model as PPO trains it.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, tokens.", min=1)] = 256,
    seed: Annotated[int, Seed(help="Equal seeds and messages give equal answers.")] = 1,
    system: Annotated[str | None, typer.Option(help="A system message, which stays.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Every message begins a conversation of its own.")] = False,
) -> None:
    """Talk to a model: at a terminal, or one message a line through a pipe. It is one conversation, or with --fresh
    one a message: that is how the models of the demo were trained."""
    _quiet_models()
    from flows.commands.chat import Rules
    from flows.commands.chat import chat as talk

    talk(model, beside, Rules(temperature, max_new_tokens, seed, fresh), system)


@command
def trace(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the user asks.")],
    at: Annotated[str | None, typer.Option(help="policy or sft: where the step starts. None: policy if made.")] = None,
    seed: Annotated[int | None, Seed(help="Of batch and answers. None: that of params.yaml.")] = None,
    page: Annotated[Path | None, typer.Option(help="The page to write. None: work/trace.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", "-j", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """One answer through one PPO step, token by token: log-probabilities, KL, reward, value, advantage, ratio, loss."""
    root = find_root()
    starts: dict[str | None, Literal["policy", "sft"] | None] = {None: None, "policy": "policy", "sft": "sft"}
    if at not in starts:
        raise UserError(f"--at {at}: there are policy and sft")
    _quiet_models()
    from flows.commands.trace import terminal as shown
    from flows.commands.trace.page import write_trace
    from flows.commands.trace.trace import trace_prompt

    traced = trace_prompt(root, prompt, starts[at], seed)
    path = (page.expanduser() if page is not None else root / "work" / "trace.html").absolute()
    write_trace(traced, path)
    if as_json:
        print(json.dumps(shown.as_dict(traced), ensure_ascii=False), flush=True)
    else:
        print(f"{shown.render(traced)}\n\npage  {path}", flush=True)


@command
def lineage(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A model folder (a copy, too), dataset or metrics file.")
    ],
    as_json: Annotated[bool, typer.Option("--json", "-j", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Walk from a result back to the raw data: hashes, stages, parameters, and whether they still lie here."""
    root = find_root()
    from flows.commands.lineage import show

    content, text = show(root, path.expanduser().absolute())
    print(json.dumps(content, ensure_ascii=False, default=str) if as_json else text, flush=True)


@command
def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="A folder, a git revision, or an MLflow run (id or name). None: this checkout."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", "-j", help="Print one JSON object and nothing else.")] = False,
    models: Annotated[str, typer.Option(help="Names of models, separated by commas. None: all.")] = "",
) -> None:
    """Compare all models of one or several runs: the report's table, and what parameters differ."""
    root = find_root()
    from flows.commands.compare.compare import compare as look

    content, text = look(root, runs or [], [name.strip() for name in models.split(",") if name.strip()])
    print(json.dumps(content, ensure_ascii=False) if as_json else text, flush=True)


@command
def verify(
    stages: Annotated[list[str] | None, typer.Argument(help="Stages, without what they need. None: all.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the clone and say where it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", "-j", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Rebuild the recorded results from nothing, in a temporary clone, and compare every hash with dvc.lock."""
    root = find_root()
    install_signal_handlers()
    from flows.commands.verify.verify import render
    from flows.commands.verify.verify import verify as rebuild
    from flows.terminal import open_screen, say

    if not as_json:
        open_screen()
    report = rebuild(root, stages or [], keep, say)
    print(json.dumps(report.as_dict(), ensure_ascii=False) if as_json else "\n" + render(report), flush=True)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


@command
def clean(
    everything: Annotated[bool, typer.Option("--all", help="Also state from which a stopped stage continues.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
) -> None:
    """List what dead runs have left in work/ and beside outputs, and remove it after a yes."""
    root = find_root()
    from flows.commands.clean import look, question, remove, render

    found = look(root, everything)
    print(render(root, found), flush=True)
    if not found.leftovers:
        return
    if yes or (sys.stdin.isatty() and typer.confirm(question(found.leftovers))):
        print(remove(root, found.leftovers, everything))
    else:
        print("nothing was removed; `leash clean --yes` removes what the table lists")


@command
def sync(timeout: Annotated[float, typer.Option(help="Seconds that sending may take.", min=0.0)] = 600.0) -> None:
    """Send to MLflow what it has not received (work/outbox)."""
    root = find_root()
    from flows.commands.sync import sync as send

    said, done = send(root, timeout)
    print(said, flush=True)
    if not done:
        raise typer.Exit(1)


def main() -> NoReturn:
    """Entry point of `leash` and of `python -m flows.cli`."""
    app(prog_name="leash")
    sys.exit(0)


def _quiet_prefect() -> None:
    """Prefect's console log off, our live lines instead; its own log of the run keeps everything."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")


def _quiet_models() -> None:
    """No bars and notices of transformers between what we say; TRANSFORMERS_VERBOSITY brings them back."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def install_signal_handlers() -> None:
    """SIGTERM and a closed terminal unwind the run as Ctrl-C does, so that every stage is stopped on the way."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, leave)


def _where(root: Path) -> str:
    """Where a person finds the results."""
    from tasks.tracking.settings import tracking_uri, without_credentials

    report, models = root / "report" / "index.html", root / "models"
    found = sorted(path.parent.name for path in models.glob("*/config.json"))
    uri = tracking_uri(root)
    page = without_credentials(uri) if uri.startswith("http") else "leash ui (it says the address)"
    lines = [f"report  {report}"] if report.is_file() else []
    lines += [f"models  {models}: {', '.join(found)}"] if found else []
    return "\n".join([*lines, f"MLflow  {page}"])


if __name__ == "__main__":
    main()
