"""The command line `leash`: arguments, exit codes and what is printed at the end; each command imports what it needs.
Exit codes: 0; 2 for what the user can fix, with a line for each problem on stderr; 1 for a crash; 130 and 143 when it
was stopped."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, ParamSpec

import typer

from flows import processes
from flows.environment import find_root, use_own_prefect_home
from rlhf_core.errors import UserError
from tasks.tracking.settings import RUN_VARIABLE

P = ParamSpec("P")
Seed = partial(typer.Option, min=0, max=2**32 - 1)
"""As `seed` in params.yaml."""
AsJson = Annotated[bool, typer.Option("--json", "-j", help="Print one JSON object and nothing else.")]
Port = partial(typer.Option, min=1, max=65535)

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

    return app.command(function.__name__.strip("_"))(guarded)


@command
def run(
    stages: Annotated[list[str] | None, typer.Argument(help="Stages, each with what it needs. None: all.")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Run even what is up to date.")] = False,
    jobs: Annotated[
        int, typer.Option(help="Independent stages side by side; with GPUs, one GPU each (untested on GPUs).", min=1)
    ] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds that one stage may take.")] = None,
    retries: Annotated[int, typer.Option(help="How often to repeat a stage after a crash.", min=0)] = 2,
    retry_delay: Annotated[float, typer.Option(help="Seconds before a stage is repeated.", min=0.0)] = 10.0,
    pull: Annotated[bool, typer.Option("--pull", help="Fetch what DVC's remote has instead of computing it.")] = False,
    push: Annotated[bool, typer.Option("--push", help="Send the results to DVC's remote.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would run, and why.")] = False,
) -> None:
    """Run the stages that are not up to date.

    One at a time, in the order of the graph, each as a Prefect task with retries and live progress.
    """
    root = find_root()
    processes.install_signal_handlers()
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
def where() -> None:
    """Print the commit, and where report, models and MLflow page are."""
    print(_where(find_root()))


@command
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A JSONL, JSON, CSV or Parquet file, an export of Label Studio or Argilla, or a folder of such files.",
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace data imported before.")] = False,
    names: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="NEW=OLD", help="Give columns other names: prompt=question,chosen=best."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave out columns, or keys of messages; by commas.")
    ] = None,
    think: Annotated[bool, typer.Option("--think", help="Write reasoning into the text, as <think>…</think>.")] = False,
    parse_template: Annotated[
        bool, typer.Option("--parse-template", help="Make turns of texts that have a chat template's control tokens.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--try", help="Write params.yaml for a run of a few minutes with a tiny model.")
    ] = False,
) -> None:
    """Copy data files into data/raw/ and track them with DVC; print what was found in them."""
    root = find_root()
    from flows.commands.imports.importer import import_data
    from flows.commands.imports.rewriting import Rewriting, renamed
    from flows.commands.imports.trial import require_room, write_trial

    if quick:
        require_room(root)
    ignored = frozenset(name.strip() for listed in ignore or () for name in listed.split(","))
    rewriting = Rewriting(renamed(names or []), ignored, think, parse_template)
    target, examples = import_data(source, root, force, rewriting=rewriting if rewriting != Rewriting() else None)
    if quick:
        write_trial(root, [target.name], examples)


@command
def annotate(
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="JSONL of prompts with answers. None: the last run's.")
    ] = None,
    answers: Annotated[int, typer.Option(help="2 compares two answers; 4 ranks four.")] = 2,
    pairs: Annotated[int, typer.Option(help="How many pairs; a ranking of four answers is six.", min=1)] = 200,
    ask: Annotated[
        Literal["random", "margin", "disagreement"],
        typer.Option(help="Which first; the last two: where reward models are uncertain."),
    ] = "random",
    reward: Annotated[
        list[Path] | None, typer.Option(metavar="FOLDER", help="Reward model for --ask. None: models/reward.")
    ] = None,
    overlap: Annotated[int, typer.Option(help="How many annotators judge each task.", min=1)] = 1,
    gold: Annotated[Path | None, typer.Option(help="JSONL of pairs whose better answer is known.")] = None,
    gold_every: Annotated[int, typer.Option(help="A gold question after this many tasks.", min=1)] = 10,
    guidelines: Annotated[Path | None, typer.Option(help="Markdown file that the page shows.")] = None,
    share: Annotated[bool, typer.Option("--share", help="Let other machines of the network reach the page.")] = False,
    annotators: Annotated[str, typer.Option(help="Names, by commas. None: your user name.")] = "",
    port: Annotated[int, Port(help="Port of the page.")] = 8765,
    name: Annotated[str, typer.Option(help="Of the session, kept in work/annotate.")] = "labels",
    seed: Annotated[int, Seed(help="Of the choice and the order of tasks and answers.")] = 1,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the labels of the session and end.")
    ] = None,
) -> None:
    """Let people compare or rank answers, on a page of this machine.

    Every choice is stored at once; the same command continues. --export writes the labels for `leash import`.
    """
    root = find_root()
    processes.install_signal_handlers()
    from flows.commands.annotate import annotate as command

    if export is not None:
        command.export_labels(root, name, export.expanduser())
        return
    if ask != "random":
        _quiet_models()
    names = tuple(part.strip() for part in annotators.split(",") if part.strip())
    source, gold, guidelines = (path and path.expanduser().absolute() for path in (source, gold, guidelines))
    rewards = tuple(folder.expanduser().absolute() for folder in reward or [root / "models" / "reward"])
    command.annotate(
        root,
        command.Call(
            source=source,
            answers=answers,
            pairs=pairs,
            ask=ask,
            rewards=rewards,
            overlap=overlap,
            gold=gold,
            gold_every=gold_every,
            guidelines=guidelines,
            share=share,
            annotators=names,
            port=port,
            name=name,
            seed=seed,
        ),
    )


@command
def serve(
    cron: Annotated[str, typer.Option(help="Five fields: minute hour day month weekday.")] = "0 3 * * *",
    timezone: Annotated[str, typer.Option(help="Time zone of the fields, such as Europe/Berlin.")] = "UTC",
    branch: Annotated[
        str | None, typer.Option(help="Its commit at each start is run; origin/NAME is fetched. None: this branch.")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many runs may work at the same time.", min=1)] = 1,
    watch: Annotated[
        float | None, typer.Option(help="Seconds between two looks for new data (.dvc files) in the branch.", min=1.0)
    ] = None,
) -> None:
    """Run a branch on a schedule, until stopped.

    Each run works in a workspace of its own. Needs a Prefect server: `leash up`.
    """
    root = find_root()
    processes.install_signal_handlers()
    from flows import serve as nightly

    _exit(int(nightly.serve(root, cron, timezone, branch, limit, watch) != 0))


@command
def up(
    port: Annotated[int, Port(help="Port of the Prefect server.")] = 4200,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the server that `leash up` started.")] = False,
    notify: Annotated[
        str | None, typer.Option(metavar="URL", help='Post alerts, decisions and failed runs there, as {"text": …}.')
    ] = None,
    install: Annotated[
        bool,
        typer.Option("--install", help="Start none: set the server that PREFECT_API_URL names up for this project."),
    ] = False,
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
def ui(port: Annotated[int, Port(help="Port of the page.")] = 5000) -> None:
    """Show the MLflow page of this project's runs."""
    root = find_root()
    from flows.commands.ui import show

    show(root, port)


@command
def doctor() -> None:
    """Check the machine and the project; print what to do."""
    root = find_root()
    from flows.commands.doctor import examine, render

    checks = examine(root)
    print(render(checks))
    _exit(int(any(check.verdict == "BROKEN" for check in checks)))


@command
def audit(
    as_json: AsJson = False,
    params: Annotated[Path | None, typer.Option(help="Parameter file. None: params.yaml of the project.")] = None,
    method: Annotated[str, typer.Option(help="ppo, or a method that runs its loop: rloo, grpo, reinforce.")] = "ppo",
) -> None:
    """Try the PPO settings on problems with a known optimum.

    Prints the total variation to the optimum, and the bias of the gradient.
    """
    path = params if params is not None else find_root() / "params.yaml"
    from flows.commands.audit import audit_file, render

    found = audit_file(path, method)
    _print(found, render, as_json)


@command
def plan(
    as_json: AsJson = False,
    params: Annotated[Path | None, typer.Option(help="Parameter file. None: params.yaml of the project.")] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(metavar="GB", help="Of each GPU. None: the GPU's here, else this machine's memory."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With the config.json of the base model, where a hub is out of reach."),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Longest prompt. None: reward.max_tokens less an answer.", min=1)
    ] = None,
) -> None:
    """Print the memory, tokens, time and disk of a run before it starts.

    Loads no weights. Exit code 1 where it does not fit, with what to change.
    """
    root = find_root()
    _quiet_models()
    from flows.commands.plan import plan_file, render

    path = params if params is not None else root / "params.yaml"
    found = plan_file(path, root, gpu_memory, model and model.expanduser().absolute(), prompt_tokens)
    _print(found, render, as_json)
    _exit(int(not found["fits"]))


@command
def chat(
    model: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder, such as models/policy.")],
    beside: Annotated[Path | None, typer.Option(help="A second model folder, to answer below the first.")] = None,
    temperature: Annotated[float, typer.Option(help="Of sampling; 1 is the model as PPO trains it.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, tokens.", min=1)] = 256,
    seed: Annotated[int, Seed(help="Equal seeds and messages give equal answers.")] = 1,
    system: Annotated[str | None, typer.Option(help="A system message for the whole conversation.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Every message begins a new conversation.")] = False,
    eta: Annotated[
        float | None, typer.Option(help="Use the weights START + eta·(FOLDER − START), from 0 to 1.")
    ] = None,
    start: Annotated[Path, typer.Option(help="With --eta: the model folder to start from.")] = Path("models/sft"),
) -> None:
    """Talk to a model, at a terminal or through a pipe.

    One message a line. With --fresh every message is a conversation of its own, as the demo's models were trained.
    """
    _quiet_models()
    from flows.commands.chat import Settings, run_chat

    interpolation = None if eta is None else (start, eta)
    run_chat(model, beside, Settings(temperature, max_new_tokens, seed, fresh), system, interpolation)


@command
def trace(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The user's message.")],
    at: Annotated[str | None, typer.Option(help="policy or sft: where the step starts. None: policy if made.")] = None,
    seed: Annotated[int | None, Seed(help="Of batch and answers. None: that of params.yaml.")] = None,
    page: Annotated[Path | None, typer.Option(help="The page to write. None: work/trace.html.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show one PPO step on one answer, token by token.

    Log-probabilities, KL, reward, value, advantage, ratio and loss of every token.
    """
    root = find_root()
    starts: dict[str | None, Literal["policy", "sft"] | None] = {None: None, "policy": "policy", "sft": "sft"}
    if at not in starts:
        raise UserError(f"--at {at}: choose policy or sft")
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
def score(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .jsonl or .parquet file of rows with a prompt and a response.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write. None: FILE with .scored before its ending.")
    ] = None,
) -> None:
    """Score the answers in a file, with this project's reward model and functions.

    Copies the rows, with the column `score` and, of several terms, one for each.
    """
    root = find_root()
    _quiet_models()
    from flows.commands.score import score_file

    print(score_file(root, file.expanduser().absolute(), out and out.expanduser().absolute()), flush=True)


@command
def lineage(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A model folder (or a copy), dataset or metrics file.")],
    as_json: AsJson = False,
) -> None:
    """Trace a result back to the raw data.

    Hashes, stages and parameters, and which of the files are still here.
    """
    root = find_root()
    from flows.commands.lineage import show

    content, text = show(root, path.expanduser().absolute())
    _print(content, lambda _: text, as_json)


@command
def study(
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-S", metavar="NAME=VALUES", help="A=1,2 or A=range(1,4); with --search A=interval(0,1)."
        ),
    ] = None,
    methods: Annotated[str, typer.Option(help="Alternatives to train, by commas; others off. None: as they are.")] = "",
    name: Annotated[str | None, typer.Option(help="Of the study; the same call continues it. None: made up.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Trials side by side. None: 1, or 8 with --pool.", min=1)] = None,
    pool: Annotated[str | None, typer.Option(help="Run the trials on the workers of this Prefect work pool.")] = None,
    search: Annotated[int | None, typer.Option(help="Let Optuna choose this many settings.", min=1)] = None,
    objective: Annotated[
        str | None, typer.Option(help="What is best, such as gold_policy or ppo.score - kl_per_sequence.")
    ] = None,
    constraint: Annotated[str | None, typer.Option(help="Such as 'kl_per_sequence < 3'.")] = None,
    minimise: Annotated[bool, typer.Option("--minimise", help="The lowest objective is best.")] = False,
    commit: Annotated[str, typer.Option(help="The branch or commit to study.")] = "HEAD",
    retries: Annotated[int, typer.Option(help="How often to repeat a stage after a crash.", min=0)] = 2,
) -> None:
    """Run several settings and seeds, and compare them.

    Each trial runs in a workspace of its own and becomes a DVC experiment and an MLflow run.
    """
    root = find_root()
    processes.install_signal_handlers()
    from flows.commands.study.study import study as run_study
    from flows.commands.study.trials import Call

    chosen = tuple(part.strip() for part in methods.split(",") if part.strip())
    call = Call(tuple(overrides or ()), chosen, search, objective, constraint, not minimise)
    _exit(run_study(root, call, name, commit, jobs, ("--retries", str(retries)), pool))


@command
def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="A folder, a git revision, a DVC experiment, or an MLflow run (id or name). None: this checkout.",
        ),
    ] = None,
    as_json: AsJson = False,
    models: Annotated[str, typer.Option(help="Names of models, separated by commas. None: all.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="All columns, models and parameters.")] = False,
) -> None:
    """Compare the models of one or several runs.

    Which parameters differ, the differences paired by prompt, and the report's table. `leash runs` lists the runs.
    """
    root = find_root()
    from flows.commands.compare.compare import compare as compare_runs

    chosen = [name.strip() for name in models.split(",") if name.strip()]
    content, text = compare_runs(root, runs or [], chosen, everything)
    _print(content, lambda _: text, as_json)


@command
def runs(
    number: Annotated[int, typer.Option("--number", "-n", help="How many, the newest first.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """List the runs, with the parameters that changed from each to the next.

    Of this checkout, the commits of this branch, DVC experiments and MLflow; `leash compare` takes their names.
    """
    root = find_root()
    from flows.commands.runs import listed, render

    _print(listed(root, number), render, as_json)


@command
def promote(
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="[VERSION|EXPERIMENT]",
            help="A version, whatever the rules say; or the experiment of a nightly run, by the rules.",
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Go back to the champion before the present one.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show the registered versions.")] = False,
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
        return
    if undo or (which and which.isdecimal()):
        print(promotion.undo(root, registry) if undo else promotion.by_hand(root, registry, str(which)))
        return
    decision = promotion.judge_named(root, which, registry)
    print(decision.text)
    _exit(int(not decision.promoted))


@command
def verify(
    stages: Annotated[list[str] | None, typer.Argument(help="Stages, without what they need. None: all.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the clone and print where it is.")] = False,
    closed: Annotated[
        int | None, typer.Option("--round", help="A closed round: rebuild its policy and pairs from its commit.", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the results in a clone and compare every hash.

    The clone starts with an empty cache; the hashes are compared with dvc.lock.
    """
    root = find_root()
    processes.install_signal_handlers()
    from flows.commands.verify import render, verify_round
    from flows.commands.verify import verify as rebuild
    from flows.terminal import print_line, screen

    if closed is not None and (stages or keep):
        raise UserError("--round rebuilds what its policy needs; leave out stages and --keep")
    with nullcontext() if as_json else screen():
        report = (
            rebuild(root, stages or [], keep, print_line) if closed is None else verify_round(root, closed, print_line)
        )
    print(json.dumps(report.as_dict(), ensure_ascii=False) if as_json else "\n" + render(report), flush=True)
    _exit(report.exit_code)


@command
def round_(
    listing: Annotated[bool, typer.Option("--list", help="Show the closed rounds with their figures.")] = False,
) -> None:
    """Close the present round and begin the next.

    Its policy and pairs go to rounds/N, under DVC; the next `leash run` goes on from that policy.
    """
    root = find_root()
    processes.install_signal_handlers()
    from flows.commands import rounds

    print(rounds.table_of(root) if listing else rounds.close(root))


@command
def clean(
    everything: Annotated[bool, typer.Option("--all", help="Also state from which a stopped stage continues.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without a question.")] = False,
) -> None:
    """Remove what dead runs have left behind."""
    root = find_root()
    from flows.commands.clean import clean as remove

    remove(root, everything, yes)


@command
def gc(
    keep: Annotated[int, typer.Option(help="How many nightly experiments stay, the newest first.", min=0)] = 7,
    studies: Annotated[str, typer.Option(help="Studies whose experiments go, too, separated by commas.")] = "",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Remove what the table marks. Else it is only printed.")
    ] = False,
) -> None:
    """Show which run needs how much of DVC's cache, and remove old runs."""
    root = find_root()
    processes.install_signal_handlers()
    from flows.commands.gc import gc as collect

    collect(root, keep, [name.strip() for name in studies.split(",") if name.strip()], yes)


@command
def sync(
    timeout: Annotated[float, typer.Option(help="Seconds that sending may take; 0: no limit.", min=0.0)] = 0.0,
) -> None:
    """Make MLflow agree with what was run here (work/tracking, dvc.lock, metrics, plots)."""
    root = find_root()
    from flows.commands.sync import sync as send

    text, done = send(root, timeout)
    print(text, flush=True)
    _exit(int(not done))


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


def _print(content: Any, render: Callable[[Any], str], as_json: bool) -> None:
    print(json.dumps(content, ensure_ascii=False, default=str) if as_json else render(content), flush=True)


def _quiet_models() -> None:
    """Switch off progress bars and notices of transformers, unless TRANSFORMERS_VERBOSITY is set."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


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
