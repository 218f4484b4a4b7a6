"""What a run needs before it starts: memory by formula, samples and tokens from the rows that exist, seconds from
earlier runs or by formula, disk, and what to change where it does not fit."""

import json
import math
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig

from rlhf_core.config.dpo import PairConfig
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.config.sft import SFTConfig
from rlhf_core.data.classifiers import model_folder
from rlhf_core.data.tokenizer import complete, encode_response, read_tokenizer
from rlhf_core.errors import UserError
from rlhf_core.gguf import gguf_in, load_gguf_config, load_gguf_tokenizer
from rlhf_core.loading import load_config, loading
from rlhf_core.models.hf import shapes_in
from rlhf_core.planning import (
    BFLOAT16,
    FLOAT32,
    WEIGHTS,
    Lengths,
    Model,
    Phase,
    evaluate_phases,
    pair_phases,
    ppo_phases,
    reward_phases,
    sampler_phases,
    sft_phases,
)
from rlhf_core.training.checkpoints import KEPT
from tasks.datasets.raw import below_raw
from tasks.datasets.sources.files import data_files, is_heldout
from tasks.datasets.sources.formats import kind_of, read_rows
from tasks.datasets.sources.splits import shares_prompts
from tasks.params.all import Params
from tasks.params.loader import PARAMS_FILE, SFT_ENABLED, parse
from tasks.params.methods import BY_NAME, VARIANTS
from tasks.params.scorer import JUDGES, REWARD_MODEL, uses_reward_model
from tasks.params.variant import merged
from tasks.speed import Speed, of_cpu, of_gpu
from tasks.stage.dvc_files import open_project
from tasks.stage.long_rows import prompts_once
from tasks.tracking import record

USABLE = 0.95
"""Share of the device that tensors may fill; the rest is for CUDA's context and fragments. An assumption: not run on a
GPU."""
SAMPLED = ("judge", "model", "both")
"""Sources of preferences that sample answers."""
SAVES = 0.01
"""A change that saves a smaller share of the peak is left out."""
SLOWER = 1.25
"""How much longer bfloat16 takes on this CPU where the plan says so."""
ANY_GPU = "GPU"
"""The device of a plan for a GPU that is not here."""
SPEED = ("processes", "sharding", "lora", "gradient_checkpointing", "engine")
"""Settings of a stage that change its speed and not the number of its tokens."""


@dataclass(frozen=True)
class Work:
    """Tokens that a stage processes, each times the models that process it. Where `ingest` has run, rows have the mean
    length of its rows, and sampled answers that of its demonstrations; else all have their longest length."""

    samples: int = 0
    sampled: int = 0
    read: int = 0
    trained: int = 0
    adapters: bool = False
    """Whether a backward pass goes through weights that are not trained, so that it costs half."""

    def seconds(self, model: Model, speed: Speed) -> float:
        """By formula."""
        trained = self.trained * (2 if self.adapters else 3)
        passes = self.sampled / speed.sampling + self.read / speed.reading + trained / speed.training
        return 2.0 * (model.products + model.head) * passes


@dataclass(frozen=True)
class PlannedStage:
    """A stage, its peak memory, and its work; None where it depends on the number of rows, which is not known."""

    name: str
    phases: Callable[[], list[Phase]]
    work: Work | None

    def peak(self) -> int:
        """Bytes."""
        return max(phase.peak for phase in self.phases())


def config_of(params: Any, root: Path, folder: Path | None) -> PreTrainedConfig:
    """The configuration of the base model: of its settings, of `folder`, of a folder below data/raw/, or of the hub.
    Raises UserError where there is none to read."""
    if folder is None and params.base.source == "scratch":
        own = params.base.scratch
        return LlamaConfig(
            vocab_size=own.vocabulary, hidden_size=own.hidden, intermediate_size=own.intermediate,
            num_hidden_layers=own.layers, num_attention_heads=own.heads, num_key_value_heads=own.heads,
            max_position_embeddings=own.context, tie_word_embeddings=True,
        )  # fmt: skip
    if folder is not None and not folder.exists():
        raise UserError(f"--model {folder}: no such folder; make it, with the config.json of the base model")
    wanted = params.base.pretrained
    local = folder or below_raw(root / "data" / "raw", wanted.model, "base.pretrained.model")
    place, revision = (local, None) if folder is not None or local.exists() else (wanted.model, wanted.revision)
    if isinstance(place, str) and not re.fullmatch("[0-9a-f]{40}", revision or ""):
        raise UserError(f"base.pretrained: {place} needs the full commit hash as revision, or plan with --model FOLDER")
    if isinstance(place, Path) and (gguf := gguf_in(place)):
        return load_gguf_config(gguf)
    try:
        with loading(place):
            return load_config(place, revision, params.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"base.pretrained.model: cannot read the config.json of {place} ({reason}); without a network put it into "
            "a folder and plan with --model FOLDER"
        ) from None


@dataclass(frozen=True)
class Scoring:
    """Models that score answers and have another body than the policy."""

    bases: tuple[Model, ...] = ()
    """Those of `reward.base`, one for each reward model of the run; empty for the SFT model."""
    terms: int = 0
    """Parameters of the models below models/judges/ that are terms of `scorer`."""
    judge: int = 0
    """Parameters of the one that judges."""
    weight: int = FLOAT32
    """Bytes of a parameter of the models below models/judges/, at most."""

    def passes(self, model: Model, scorers: int, judges: bool = False) -> float:
        """Passes of the policy's model that cost as much as all models that score, `scorers` of which are reward models
        of the run."""
        own = sum(base.products for base in self.bases) / model.products if self.bases else scorers
        return own + (self.terms + judges * self.judge) / model.products

    def beside(self, phases: list[Phase], judges: bool = False) -> list[Phase]:
        """The phases with the weights of these models in memory."""
        own = sum(base.size(None, frozen=True) * base.scalar for base in self.bases)
        held = Counter({(WEIGHTS, "reward model"): own + self.weight * (self.terms + judges * self.judge)})
        return [Phase(phase.name, phase.parts + held) for phase in phases]  # `+` leaves out what is 0


def scoring_of(params: Any, root: Path, model: Model) -> Scoring:
    """The models that score beside those on the policy's body. Raises UserError where their folders are missing."""
    bases, trusted = list[Model](), params.trust_remote_code
    for name in params.reward.bases if uses_reward_model(params.scorer) else ():
        folder = below_raw(root / "data" / "raw", name, "reward.base")
        with loading(model_folder(folder, f"reward.base: data/raw/{name}")):
            bases.append(Model.of(load_config(folder, None, trusted), trusted, model.precision, model.accelerator))
    if params.reward.judge_share > 0:
        bases += bases[:1]

    def parameters(name: str, key: str) -> int:
        folder = model_folder(root / JUDGES / name, f"{key}: {JUDGES}/{name}")
        return sum(math.prod(shape) for file in folder.glob("*.safetensors") for shape in shapes_in(file).values())

    named, judge = [term for term in params.scorer if term.model], params.judge
    judges = judge.kind == "reward_model"
    narrow = all((how.precision or params.precision) == "bfloat16" for how in (*named, *([judge] if judges else [])))
    return Scoring(
        tuple(bases),
        sum(parameters(term.model, "scorer") for term in named),
        parameters(judge.model, "judge.model") if judges else 0,
        BFLOAT16 if narrow else FLOAT32,
    )


def plan_run(
    content: dict[str, Any],
    root: Path,
    memory: float,
    device: str,
    folder: Path | None = None,
    prompt_tokens: int | None = None,
    file: Path = PARAMS_FILE,
) -> dict[str, Any]:
    """The plan of a parameter file's content for a device of `memory` bytes: "cpu", the name of a GPU, or ANY_GPU.
    Bytes and seconds; None for what depends on data that are not here. Raises UserError for invalid parameters, and as
    `config_of`."""
    params, accelerator = parse(Params, content, file=file), device != "cpu"
    model = Model.of(config_of(params, root, folder), params.trust_remote_code, params.precision, accelerator)
    rows, limit = rows_of(content, params, root), USABLE * memory
    if rows is not None and rows.of_ingest:
        rows = replace(rows, means=means_of(params, root, folder))
    earlier = earlier_runs(params, root, device) if folder is None else {}  # of a folder no run is known
    speed = of_gpu(params.precision) if accelerator else speed_here(model, params.precision, params.threads)
    others = scoring_of(params, root, model)
    planned, stages = list(stages_of(params, model, rows, prompt_tokens, others)), dict[str, Any]()
    works = {}
    for name, run in earlier.items():  # with the lengths of the present rows, so that both are scaled alike
        then = rows if run.rows is None else replace(rows or Rows({}), counts=run.rows)
        works[name] = {stage.name: stage.work for stage in stages_of(run.params, model, then, prompt_tokens, others)}
    times = times_of(planned, params, model, speed, earlier, {name: works[name].get(name) for name in works})
    for stage in planned:
        phases = stage.phases()
        peak = max(phase.peak for phase in phases)

        def replan(change: dict[str, Any], name: str = stage.name) -> int:
            changed = parse(Params, merged(content, change), file=file)
            other = replace(model, precision=changed.precision)
            scoring = scoring_of(changed, root, other)
            return next(s for s in stages_of(changed, other, rows, prompt_tokens, scoring) if s.name == name).peak()

        seconds, by = times.get(stage.name, (None, "no rows yet"))
        stages[stage.name] = {
            "peak": peak,
            "phases": {
                phase.name: {
                    "peak": phase.peak,
                    "parts": [{"kind": k, "model": m, "bytes": b} for (k, m), b in sorted(phase.parts.items())],
                }
                for phase in phases
            },
            "work": None if stage.work is None else asdict(stage.work),
            "seconds": seconds,
            "time_by": by,
            "changes": savings(stage.name, params, peak, limit, replan) if peak > limit else [],
        }
    scores = uses_reward_model(params.scorer) or params.ppo.needs_critic_model
    parameters = {
        "policy": model.parameters,
        "reward model": max(one.scalar for one in others.bases or (model,)) if scores else 0,
        "trained": model.trained(params.ppo.lora),
    }
    peak, slower = max(stage["peak"] for stage in stages.values()), 1.0
    if params.precision == "bfloat16" and not accelerator:
        slower = speed_here(model, "float32", params.threads).training / speed.training
    known = [stage["seconds"] for stage in stages.values()]
    return {
        "parameters": parameters,
        "prompt_tokens": prompt_tokens or longest_prompt(params),
        "rows": None if rows is None else rows.counts,
        "measured_lengths": bool(rows and rows.means),
        "lengths_after": "base" if params.base.source == "scratch" and folder is None else "ingest",
        "stages": stages,
        "seconds": None if None in known else sum(known),
        "flops": asdict(speed),
        "bfloat16_time": slower if slower > SLOWER else None,
        "disk": disk_of(model, params, others),
        "peak": peak,
        "memory": memory,
        "usable": limit,
        "fits": peak <= limit,
    }


# --- rows -------------------------------------------------------------------------------------------------------------

DATASETS = ("demonstrations", "pairs", "ratings", "preference_prompts", "ppo_prompts", "heldout")


@dataclass(frozen=True)
class Rows:
    """The rows of a run."""

    counts: Mapping[str, int]
    """Of each dataset."""
    of_ingest: bool = False
    """Whether they are those of `ingest`, not an estimate."""
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Mean tokens of a prompt and of an answer of each dataset, where they are known; 0 for no answer."""

    def lengths(self, dataset: str, longest: Lengths, sampled: bool = False) -> Lengths:
        """The mean lengths of a dataset's rows, at most the `longest`, which are returned where none are known.
        `sampled`: the answers are those of a model, about as long as the demonstrations."""
        prompt, answer = self.means.get(dataset, (longest.prompt, longest.response))
        if sampled:
            answer = self.means.get("demonstrations", (0, longest.response))[1]
        return Lengths(min(round(prompt), longest.prompt), min(round(answer), longest.response))


def means_of(params: Any, root: Path, folder: Path | None) -> dict[str, tuple[float, float]]:
    """`Rows.means` from up to 500 rows of each dataset of `ingest`; empty without a tokenizer on this machine, or with
    one that refuses a row: the stages name it, and here the longest lengths are planned."""
    scratch = params.base.source == "scratch"
    place = folder or (root / "models/base" if scratch else root / "data/raw" / params.base.pretrained.model)
    try:
        if gguf := gguf_in(place):
            tokenizer = load_gguf_tokenizer(gguf)
        elif place.is_dir():
            tokenizer = read_tokenizer(place)
        else:
            return {}
        plain = params.base.format == "text"
        tokenizer, _ = complete(tokenizer, params.base.pad_token, plain, params.base.chat_template_kwargs)
    except (UserError, OSError, ValueError):
        return {}
    found, ids = dict[str, tuple[float, float]](), prompts_once(tokenizer)
    for name in DATASETS:
        with (root / "data" / "ingest" / f"{name}.jsonl").open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in islice(file, 500) if line.strip()]
        texts = [row[key] for row in rows for key in ("response", "chosen", "rejected") if key in row]
        try:
            answers = [len(encode_response(tokenizer, text)) for text in texts]
            found |= {name: (mean(len(ids(row)) for row in rows), mean(answers or [0]))} if rows else {}
        except UserError:
            return {}
    return found


def speed_here(model: Model, precision: Precision, threads: int) -> Speed:
    """`of_cpu` for the model's layers."""
    return of_cpu(model.hidden, model.intermediate, precision, threads)


def rows_of(content: Mapping[str, Any], params: Any, root: Path) -> Rows | None:
    """Rows of each dataset, without lengths: of `ingest` if dvc.lock has it with these parameters and the hashes of the
    present files, else by the shares of `ingest.split` from the settings of the demo data or the files that the
    parameters name. None where these are not here. Raises UserError where a file of DVC's is broken."""
    ingest, split, raw = params.ingest, params.ingest.split, root / "data" / "raw"
    sft, rewarded = params.sft.enabled, uses_reward_model(params.scorer)
    made = {name: root / "data" / "ingest" / f"{name}.jsonl" for name in DATASETS}
    if all(path.is_file() for path in made.values()):
        with open_project(root) as project:
            stage = next((stage for stage in project.stages if stage.name == "ingest"), None)
            recorded = {} if stage is None else stage.recorded_params
            trained = recorded.get(SFT_ENABLED, True), recorded.get(REWARD_MODEL, True)
            if stage is not None and recorded.get("ingest") == content.get("ingest") and trained == (sft, rewarded):
                used = [file for file in stage.inputs if file.path == "data/raw"]
                used += [file for file in stage.outs if Path(file.path).stem in DATASETS]
                if all(file.exists and file.known_hash() == file.recorded for file in used):
                    return Rows({name: _lines(path) for name, path in made.items()}, of_ingest=True)
    files: list[Path] = []
    if ingest.source == "files":
        places = [below_raw(raw, path, "ingest.files.path") for path in ingest.files.paths]
        files = [file for place in places if place.exists() for file in data_files(place)]
    elif ingest.source == "huggingface":
        place = below_raw(raw, ingest.huggingface.dataset, "ingest.huggingface.dataset")
        files = data_files(place) if place.is_dir() else []
    if ingest.source == "demo":
        heldout = ingest.demo.prompts * split.heldout
        prompts = ingest.demo.prompts - heldout
        each, pairs = ingest.demo.demonstrations_per_prompt, 0
    elif files:
        patterns = ingest.files.heldout_files if ingest.files is not None else ["test*"]
        counted = {file: _lines(file) for file in files}
        heldout = sum(count for file, count in counted.items() if is_heldout(file.name, patterns))
        prompts = sum(counted.values()) - heldout
        if not heldout:
            heldout, prompts = prompts * split.heldout, prompts * (1 - split.heldout)
        each, pairs = 1, 1
    else:
        return None
    fractions = (split.demonstrations if sft else 0.0, split.preferences, split.ppo)
    imitated, compared, rolled_out = (fraction / sum(fractions) for fraction in fractions)
    if shares_prompts(split, prompts, rewarded):
        imitated, compared, rolled_out = float(sft), 1.0, 1.0 - split.validation
    counts = {"demonstrations": prompts * imitated * each, "pairs": prompts * compared * pairs}
    counts |= dict.fromkeys(("ratings", "preference_prompts"), prompts * compared)
    counts |= {"ppo_prompts": prompts * rolled_out, "heldout": heldout}
    return Rows({name: round(counts[name]) for name in DATASETS})


def _lines(path: Path) -> int:
    """Rows of a data file."""
    if kind_of(path) == ".jsonl" and path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    return sum(1 for _ in read_rows(path, lambda _: None))


# --- time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EarlierRun:
    """A stage that ran to its end without an interruption, on this host, with the same model and settings of speed."""

    seconds: float
    ended: float
    """Seconds since 1970."""
    device: str | None
    """The name of a GPU, or "cpu"; None in a record of an older version."""
    params: Any
    rows: dict[str, int] | None


def earlier_runs(params: Any, root: Path, device: str) -> dict[str, EarlierRun]:
    """The last run of each stage on `device` in the records for MLflow: "cpu", the name of a GPU, or ANY_GPU. It ran to
    its end without a break, on this host, with the same model, precision, number of threads and settings in SPEED."""
    found: dict[str, EarlierRun] = {}
    for folder in (path.parent for path in record.folder_of(root).glob(f"*/{record.RUN}")):
        usable = []
        for facts in record.executions(folder):
            broken = any(facts.get(key) for key in ("restored", "restarts", "resumed"))
            if facts["status"] != "FINISHED" or broken or facts.get("host") != socket.gethostname():
                continue
            before = facts.get("device")  # none in records of older versions
            if before not in (None, "cpu") if device == ANY_GPU else before in (None, device):
                usable.append(facts)
        if not usable:
            continue
        nested: dict[str, Any] = {}
        for name, text in (record.read(folder / record.RUN).get("params") or {}).items():
            *blocks, key = name.split(".")
            place = nested
            for block in blocks:
                place = place.setdefault(block, {})
            try:
                place[key] = json.loads(text)
            except ValueError:
                place[key] = text
        try:
            ran = parse(Params, nested)
        except UserError:  # of another version
            continue
        if any(getattr(ran, key) != getattr(params, key) for key in ("base", "precision", "threads")):
            continue
        counted = record.read(next(folder.glob(f"ingest-*/{record.FILES}/metrics/ingest.json"), folder))
        rows = {name: int(counted.get(name, 0)) for name in DATASETS} if "demonstrations" in counted else None
        for facts in usable:
            stage, ended = facts["stage"], facts["ended"] / 1000
            now, then = settings_of(params, stage), settings_of(ran, stage)
            same = all(getattr(now, key, None) == getattr(then, key, None) for key in SPEED)
            if same and (stage not in found or found[stage].ended <= ended):
                seconds = ended - facts["started"] / 1000
                found[stage] = EarlierRun(seconds, ended, facts.get("device"), ran, rows)
    return found


def times_of(
    planned: Iterable[PlannedStage],
    params: Any,
    model: Model,
    speed: Speed,
    earlier: Mapping[str, EarlierRun],
    before: Mapping[str, Work | None],
) -> dict[str, tuple[float, str]]:
    """Seconds of each stage whose work is known, and what they are from: its earlier run, scaled by tokens (`before`:
    the work of that run); or the formula, scaled as the stages with runs took more or less than theirs."""
    works = {stage.name: stage.work for stage in planned if stage.work is not None}
    formula = {
        name: work.seconds(model, speed) / getattr(settings_of(params, name), "processes", 1)
        for name, work in works.items()
    }
    measured = {
        name: earlier[name].seconds * work.seconds(model, speed) / done.seconds(model, speed)
        for name, work in works.items()
        if (done := before.get(name)) is not None and done.seconds(model, speed)
    }
    expected = sum(formula[name] for name in measured)
    factor = sum(measured.values()) / expected if expected else 1.0
    by = f"formula × {factor:.3g} by runs" if expected else "formula"
    found = {name: (seconds * factor, by) for name, seconds in formula.items()}
    for name, seconds in measured.items():
        day, device = time.strftime("%Y-%m-%d", time.localtime(earlier[name].ended)), earlier[name].device
        found[name] = seconds, f"run of {day}" + (f" on {device}" if device not in (None, "cpu") else "")
    return found


# --- stages -----------------------------------------------------------------------------------------------------------


def longest_prompt(params: Any) -> int:
    """Tokens of a prompt that leaves the reward model room for an answer, of `preferences` if it samples or of PPO."""
    sampler = params.preferences if params.preferences.source in SAMPLED else params.ppo
    return max(1, int(params.reward.max_tokens) - int(sampler.max_new_tokens))


def settings_of(params: Any, stage: str) -> Any:
    """The settings of a stage's training; of a variant of PPO those of `ppo` with its own. None for other stages."""
    if stage in VARIANTS:
        return getattr(params, stage).applied_to(params.ppo, stage)
    return params.rejection_sft.training if stage == "rejection_sft" else getattr(params, stage, None)


def stages_of(
    params: Any,
    model: Model,
    known: Rows | None,
    prompt_tokens: int | None = None,
    others: Scoring = Scoring(),
) -> Iterator[PlannedStage]:
    """The stages of valid parameters that compute with a model, in the order of the graph."""
    prompt, judged = prompt_tokens or longest_prompt(params), params.preferences
    samples, rated = judged.source in SAMPLED, judged.source == "ratings"
    answers = judged.samples_per_prompt if samples else 1 if rated else 2
    rows, known = (None, Rows({})) if known is None else (known.counts, known)
    learns = uses_reward_model(params.scorer)
    scorers = (params.reward.members + (params.reward.judge_share > 0)) if learns else 0
    on_body = 0 if others.bases else scorers  # as many scorers have the policy's body
    training = 1 - params.ingest.split.validation
    compared = None  # prompts with their answers, of the reward model and of DPO
    if rows is not None:
        compared = rows["ratings"] if rated else rows["preference_prompts"] if samples else rows["pairs"]
        compared = round(training * (compared + (rows["pairs"] if judged.source == "both" else 0)))

    def sft(name: str, config: SFTConfig, count: float | None) -> PlannedStage:
        lengths = _within(prompt, config.max_tokens)
        whole = known.lengths("demonstrations", lengths).whole
        work = (
            None
            if count is None
            else Work(trained=round(count * config.epochs) * whole, adapters=config.lora is not None)
        )
        return PlannedStage(name, lambda: sft_phases(model, config, lengths), work)

    def pairs(name: str, config: Any) -> PlannedStage:
        lengths, is_policy = _within(prompt, config.max_tokens), isinstance(config, PairConfig)
        plan, members = pair_phases if is_policy else reward_phases, [model]
        if not is_policy:
            members = list(others.bases[: config.members]) or [model] * config.members
        largest, work = max(members, key=lambda member: member.scalar), None
        if compared is not None:
            prompts = compared if is_policy else min(compared, config.max_pairs or compared)
            usual = known.lengths(
                "ratings" if rated else "preference_prompts" if samples else "pairs", lengths, samples
            )
            tokens = prompts * (usual.prompt + answers * usual.response)
            passes = sum(member.products for member in members) / model.products
            work = Work(
                trained=round(config.epochs * tokens * passes),
                read=tokens * is_policy,
                adapters=config.lora is not None,
            )
        return PlannedStage(name, lambda: plan(largest, config, lengths, answers), work)

    def loop(name: str, config: PPOConfig) -> PlannedStage:
        lengths = Lengths(min(prompt, config.max_prompt_tokens or prompt), config.max_new_tokens)
        critic = int(config.needs_critic_model)
        count = config.steps * config.batch_size
        usual = known.lengths("ppo_prompts", lengths, sampled=True)
        tokens = count * usual.whole
        work = Work(
            samples=count,
            sampled=count * usual.response,
            read=round(tokens * (3 + critic + others.passes(model, scorers))),
            trained=tokens * config.ppo_epochs * (1 + critic),
            adapters=config.lora is not None,
        )
        adapters = params.reward.lora if on_body else None

        def phases() -> list[Phase]:
            return others.beside(ppo_phases(model, config, lengths, on_body, adapters))

        return PlannedStage(name, phases, work)

    if params.sft.enabled:
        yield sft("sft", params.sft, None if rows is None else training * rows["demonstrations"])
    if learns and samples:
        lengths = Lengths(prompt, judged.max_new_tokens)
        count = None if rows is None else rows["preference_prompts"] * answers
        response = known.lengths("preference_prompts", lengths, sampled=True).response
        work = None if count is None else Work(count, count * response)
        yield PlannedStage("preferences", lambda: sampler_phases(model, judged.batch_size, lengths, answers), work)
    if learns:
        yield pairs("reward", params.reward)
    yield loop("ppo", params.ppo)
    for name, method in params.enabled_methods():
        if name in VARIANTS:
            yield loop(name, method.applied_to(params.ppo, name))
        elif isinstance(method, PairConfig):
            yield pairs(name, method)
        elif name == "rejection_sft":
            count = None if rows is None else rows["ppo_prompts"] * (1 - method.validation)
            stage = sft(name, method.training, count)
            if rows is not None and stage.work is not None:
                drawn = rows["ppo_prompts"] * method.samples_per_prompt
                usual = known.lengths("ppo_prompts", Lengths(prompt, method.max_new_tokens), sampled=True)
                read = round(drawn * others.passes(model, scorers) * usual.whole)
                stage = replace(
                    stage, work=replace(stage.work, samples=drawn, sampled=drawn * usual.response, read=read)
                )
            yield stage

    # The answers of every candidate, at most: SFT model, policy, methods and the user's models with each seed;
    # interpolated policies and PPO's snapshots with the first; more of SFT model and policy for the optimum.
    settings, ppo = params.evaluate, params.ppo
    seeds, size, between = len(settings.seeds), settings.batch_size, bool(settings.interpolation)
    methods = sum(BY_NAME[name].has_model for name, _ in params.enabled_methods())
    snapshots = math.ceil(ppo.steps / (ppo.snapshot_every or ppo.steps))
    once = len(settings.interpolation) + min(settings.snapshots, snapshots)
    each = (2 + methods + len(settings.extra_models)) * seeds + once + 2 * max(0, settings.optimum_samples - seeds)
    drawn = each * min(settings.max_prompts, settings.max_prompts if rows is None else rows["heldout"])
    whole = Lengths(min(prompt, settings.max_prompt_tokens or prompt), settings.max_new_tokens)
    usual = known.lengths("heldout", whole, sampled=True)
    read = round(drawn * usual.whole * (2 + others.passes(model, scorers, judges=True)))

    def evaluation() -> list[Phase]:
        return others.beside(evaluate_phases(model, size, whole, seeds, on_body, between), judges=True)

    yield PlannedStage("evaluate", evaluation, Work(drawn, drawn * usual.response, read))


def _within(prompt: int, longest: int) -> Lengths:
    prompt = min(prompt, longest - 1)
    return Lengths(prompt, longest - prompt)


# --- changes and disk -------------------------------------------------------------------------------------------------


def changes_of(stage: str, params: Any) -> Iterator[dict[str, Any]]:
    """Parameters that need less memory, in the order in which they are tried, each beside those before it: the
    precision, what changes no result, and then what is another training (adapters, a shared critic, fewer rows per
    optimizer step)."""
    block = "ppo" if stage in VARIANTS else stage
    yield {"precision": "bfloat16"}
    if block == "ppo":
        config = params.ppo
        whole = longest_prompt(params) + config.max_new_tokens
        tokens = min(config.micro_batch_tokens or config.micro_batch_size * whole, config.micro_batch_size * whole)
        if config.processes > 1:
            yield {"ppo": {"sharding": "fsdp"}}
        yield {"ppo": {"gradient_checkpointing": True}}
        for part in (4, 16):
            yield {"ppo": {"micro_batch_tokens": max(1, tokens // part)}}
        yield {"ppo": {"sampler_rows": max(1, (config.sampler_rows or config.batch_size) // 4)}}
        yield {"ppo": {"lora": {}}}
        yield {"ppo": {"critic": {"kind": "shared"}}}
        return
    settings = params.rejection_sft.training if block == "rejection_sft" else getattr(params, block)
    processes = getattr(settings, "processes", params.ppo.processes)
    found: list[dict[str, Any]] = [{"processes": params.ppo.processes}] if processes < params.ppo.processes else []
    if "gradient_checkpointing" in type(settings).model_fields:
        found.append({"gradient_checkpointing": True})
    lora: list[dict[str, Any]] = [{"lora": {}}] if "lora" in type(settings).model_fields else []
    sizes = [key for key in ("micro_batch_size", "micro_batch_tokens", "batch_size") if hasattr(settings, key)]
    now = getattr(settings, sizes[0])
    rows = [{sizes[0]: now // part} for part in (4, 16) if now % part == 0]
    for change in found + rows + lora:
        yield {block: {"training": change} if block == "rejection_sft" else change}


def savings(
    stage: str, params: Any, peak: int, limit: float, replan: Callable[[dict[str, Any]], int]
) -> list[dict[str, Any]]:
    """Changes that bring the peak of a stage below `limit` bytes, or as near as they can: each with the bytes it saves
    beside those before it, and the peak after it, which `replan` returns."""
    found: list[dict[str, Any]] = []
    together: dict[str, Any] = {}
    for change in changes_of(stage, params):
        if peak <= limit:
            break
        try:
            after = replan(merged(together, change))
        except UserError:  # parameters that do not fit together
            continue
        if peak - after >= SAVES * peak:
            found.append({"change": change, "saves": peak - after, "peak": after})
            together, peak = merged(together, change), after
    return found


def disk_of(model: Model, params: Any, others: Scoring = Scoring()) -> dict[str, int]:
    """Bytes of files: models of the checkout in float32, PPO's snapshots, DVC's cache (a copy of both), checkpoints of
    the stage that keeps most, and their sum."""
    ppo, trained = params.ppo, model.trained(params.ppo.lora)
    methods = sum(BY_NAME[name].has_model for name, _ in params.enabled_methods())
    scalars = params.reward.members + (params.reward.judge_share > 0) if uses_reward_model(params.scorer) else 0
    reward = params.reward.lora if scalars else None
    trained_models = 2 + params.sft.enabled + methods  # beside them the base model, or SFT that is a link to it
    scored = others.bases or (model,) * scalars
    of_scorers = sum(one.scalar for one in scored)
    models = FLOAT32 * (model.parameters * trained_models + of_scorers + model.scalar * ppo.has_critic)
    in_bfloat16 = ppo.lora is None and params.precision == "bfloat16"
    each = trained * (BFLOAT16 if in_bfloat16 else FLOAT32)
    snapshots = each * math.ceil(ppo.steps / (ppo.snapshot_every or ppo.steps))
    critic = model.trained(ppo.lora, scalar=True) * ppo.needs_critic_model
    checkpoints = (KEPT + 1) * max(  # SFT and the reward model keep the whole model, PPO what it trains
        params.sft.enabled
        * (model.size(params.sft.lora) * model.parameters + 2 * FLOAT32 * model.trained(params.sft.lora)),
        *(one.size(reward) * one.scalar + 2 * FLOAT32 * one.trained(reward, scalar=True) for one in scored),
        (trained + critic) * 3 * FLOAT32 + (ppo.reference_ema is not None) * trained * FLOAT32,
    )
    sizes = {"models": models, "snapshots": snapshots, "cache": models + snapshots, "checkpoints": checkpoints}
    return sizes | {"total": sum(sizes.values())}
