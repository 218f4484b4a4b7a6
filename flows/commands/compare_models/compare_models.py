"""`leash compare-models`: the evaluation of any model folders and files of answers on the same prompts, without a
pipeline."""

import json
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flows.commands.chat import project_settings
from flows.commands.compare_models.judges import Judge, judge_of, load_model
from flows.text import table
from rlhf_core.data.chat import as_text
from rlhf_core.data.tokenizer import (
    answer_text,
    continues_text,
    decode_response,
    encode_prompt,
    encode_response,
    read_tokenizer,
    same_tokens,
)
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.evaluation.divergence import measure_divergence
from rlhf_core.evaluation.pair_judges import both_orders
from rlhf_core.evaluation.wins import wins
from rlhf_core.files import atomic
from rlhf_core.inspect.dialogue import ChatModel, require_language_model
from rlhf_core.models.sampling import sample
from rlhf_core.models.scorers import require_room
from rlhf_core.progress import listening
from tasks.datasets.jsonl import LONE_SURROGATE, Row, write_jsonl
from tasks.datasets.sources.example import Example
from tasks.datasets.sources.formats import TRUTH, read_rows
from tasks.datasets.sources.shapes import normalise, strip_repeated_prompts
from tasks.evaluation.evaluator import ScoredAnswers
from tasks.evaluation.results import Bootstrap, Results, win_rate_figures, with_interval
from tasks.stage.progress import Watch

RESAMPLES = 2000


@dataclass(frozen=True)
class Call:
    """What is compared, and how models are sampled."""

    sources: tuple[Path, ...]
    prompts: Path | None
    judge: Path
    seed: int
    temperature: float
    max_new_tokens: int
    batch_size: int
    out: Path | None


def compare_models(call: Call) -> tuple[dict[str, Any], str]:
    """(for `--json`, for a terminal); with `call.out` also a folder with the figures and every answer. Progress goes to
    stderr. In memory are the first model, one other and the judge.

    Raises UserError for sources, prompts or a judge that cannot be read, before any model answers, and for answers that
    the judge cannot score.
    """
    if not 0 < call.temperature < math.inf:
        raise UserError(f"--temperature {call.temperature}: give a number above 0")
    if call.out is not None and call.out.exists():
        raise UserError(f"--out {call.out}: is there already; remove it, or name another folder")
    if len(call.sources) < 2 or len(set(call.sources)) < len(call.sources):
        raise UserError("give two or more models or files of answers, each once")
    rows, files = read_inputs(call)
    folders = [source for source in call.sources if source not in files]
    trusted = {folder: project_settings(folder)[0] for folder in folders}
    for folder in folders:
        require_language_model(folder, trusted[folder])
    tokenizers = [read_tokenizer(folder, trust_remote_code=trusted[folder]) for folder in folders]
    continues = any(map(continues_text, tokenizers))
    make_deterministic(call.seed, torch.get_num_threads())
    prompts, bootstrap = [row["prompt"] for row in rows], Bootstrap(RESAMPLES, call.seed)
    watch = Watch("[compare-models]", 5.0, lambda text: print(f"WARNING {text}"))

    with redirect_stdout(sys.stderr), listening(watch):
        reserve = call.max_new_tokens if folders else 0  # files have their answers
        judge = judge_of(call.judge, prompts, reserve, call.batch_size, call.seed, continues)
        if folders:
            require_room(judge.scorer, prompts, reserve)
        counted = load_model(folders[0]) if folders else None  # its tokens are the unit of lengths
        reference = counted if counted and folders[0] == call.sources[0] else None
        unit = f"tokens of {folders[0]}" if folders else "words"
        answered, models = dict[Path, Results](), dict[str, dict[str, Any]]()
        for source in call.sources:
            kl, divergence = "not measured: answers of a file", None
            responses: list[list[int]] = []
            if source in files:
                given = [files[source][row["prompt_id"]] for row in rows]
                texts = [answer_text(one.response or "", continues) for one in given]
                ended = [has_ended(one, source) for one in given]
            else:
                model = counted if counted and source == folders[0] else load_model(source)
                ids, responses, ended = sampled(model, rows, call)
                texts = [decode_response(model.tokenizer, response, model.stop_ids) for response in responses]
                kl = "not measured: the first is a file" if reference is None else difference_of(model, reference)
                if reference is not None and not kl:
                    divergence = measure_divergence(
                        model.model, reference.model, ids, responses, pad_id=int(model.tokenizer.pad_token_id),
                        temperature=call.temperature, batch_size=call.batch_size,
                    )  # fmt: skip
                if counted is None or not same_tokens(model.tokenizer, counted.tokenizer):
                    responses = []
                del model  # free its memory before the next one is loaded
            if counted is None:
                lengths = [len(text.split()) for text in texts]
            else:
                read = [encode_response(counted.tokenizer, *one) for one in zip(texts, ended, strict=True)]
                lengths = [len(one) for one in (responses or read)]
            scores = judge.scores(rows, texts)
            scored = ScoredAnswers(responses, ended, texts, scores or [], scores, lengths, divergence)
            answered[source] = Results.of([scored])
            first = answered[call.sources[0]]
            figures = {
                **with_interval("score", bootstrap.of(answered[source], answered[source].table("gold"))),
                **compared(judge, prompts, answered[source], first, bootstrap),
                **with_interval("length", bootstrap.of(answered[source], answered[source].table("tokens"))),
                **with_interval("kl", bootstrap.of(answered[source], answered[source].table("kl"))),
                "kl_note": kl,
                "unfinished_share": 1 - sum(ended) / len(ended),
            }
            models[str(source)] = figures
    content = {
        "first": str(call.sources[0]),
        "judge": judge.name,
        "judged_by": "pairs" if judge.pairs else "scores",
        "prompts": len(rows),
        "length_unit": unit,
        "seed": call.seed,
        "temperature": call.temperature,
        "max_new_tokens": call.max_new_tokens,
        "models": models,
    }
    if call.out is not None:
        write(call.out, content, rows, answered)
    return content, render(content)


def read_inputs(call: Call) -> tuple[list[Row], dict[Path, dict[str, Example]]]:
    """The distinct prompts {prompt_id, prompt, extra}, and the answers of each file by the id of their prompt. Raises
    UserError, naming file and row, for rows that cannot be read, and for prompts with no answer or two."""
    files: dict[Path, dict[str, Example]] = {}
    for source in (one for one in call.sources if not one.is_dir()):
        found: dict[str, Example] = {}
        for example in read_examples(source):
            if example.response is None:
                raise UserError(f"{source}, row {example.row}: no answer; each row needs a prompt and a response")
            if example.prompt_id in found:
                before = found[example.prompt_id].row
                raise UserError(f"{source}, row {example.row}: a second answer to the prompt of row {before}; keep one")
            has_ended(example, source)  # refused before a model answers
            found[example.prompt_id] = example
        files[source] = found
    if call.prompts is None and not files:
        raise UserError('--prompts: models need prompts; name a file with one {"prompt": …} a row')
    examples = read_examples(call.prompts) if call.prompts else list(next(iter(files.values())).values())
    distinct: dict[str, Row] = {}
    for one in examples:
        row = {"prompt_id": one.prompt_id, "prompt": one.prompt, "extra": one.extra}
        if distinct.setdefault(one.prompt_id, row) != row and call.judge.suffix == ".py":  # which reads the columns
            raise UserError(f"{call.prompts}, row {one.row}: a prompt of an earlier row, with other columns; keep one")
    for source, answers in files.items():
        missing = [row for name, row in distinct.items() if name not in answers]
        if missing:
            raise UserError(
                f"{source}: no answer to {len(missing)} of {len(distinct)} prompts, first "
                f"{as_text(missing[0]['prompt'])[:60]!r}; add them, or leave these prompts out"
            )
        if extra := len(answers) - len(distinct):
            print(f"{source}: {extra} answers to other prompts are not used", file=sys.stderr, flush=True)
    return list(distinct.values()), files


def read_examples(path: Path) -> list[Example]:
    """The rows of a file, in the shapes that `leash import` reads. Raises UserError for a file without rows, or with
    rows that cannot be read. An empty answer is one."""
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder")
    examples = list(normalise(read_rows(path), str(path), heldout=True))
    repeated, answers = strip_repeated_prompts(examples)
    if repeated:
        done = "which was removed from them" if repeated == answers else "which is kept, because the others do not"
        for one in examples if repeated == answers else ():
            one.response = f" {one.response}"  # of a continuation it is a part; from an answer `answer_text` takes it
        print(f"{path}: {repeated} of {answers} answers begin with their prompt, {done}", file=sys.stderr, flush=True)
    for one in examples:
        prompt, problem = as_text(one.prompt), one.broken
        if not problem and not prompt.strip():
            problem = "the prompt is empty"
        if not problem and LONE_SURROGATE.search(prompt + (one.response or "")):
            problem = "half a surrogate pair, which no tokenizer reads"
        if problem:
            raise UserError(f"{path}, row {one.row}: {problem}; correct or remove the row")
    if not examples:
        raise UserError(f"{path}: no rows")
    return examples


def has_ended(one: Example, source: Path) -> bool:
    """The value of a column `ended`, as text in CSV; True without it. Raises UserError for another value."""
    value = str(one.extra.get("ended", "")).strip().casefold()
    if value not in {"", *TRUTH}:
        raise UserError(f"{source}, row {one.row}: ended: expected true, false or nothing, got {value}")
    return TRUTH.get(value, True)


def sampled(model: ChatModel, rows: Sequence[Row], call: Call) -> tuple[list[list[int]], list[list[int]], list[bool]]:
    """The prompts' token ids, and one answer to each: its token ids and whether it ended. The randomness depends on the
    seed, the name of the model and the number of the prompt. Raises UserError where the context is too short."""
    ids = [encode_prompt(model.tokenizer, row["prompt"]) for row in rows]
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    if (tokens := len(ids[longest]) + call.max_new_tokens) > model.context:
        raise UserError(
            f"{model.name}: prompt {longest + 1} with {call.max_new_tokens} new tokens is {tokens} tokens long, and "
            f"its context holds {model.context}; lower --max-new-tokens, or leave the prompt out"
        )
    noise = int.from_bytes(sha256(model.name.encode()).digest()[:8], "big")
    drawn = sample(
        model.model, ids, [(call.seed, noise, i) for i in range(len(ids))], max_new_tokens=call.max_new_tokens,
        temperature=call.temperature, stop_ids=model.stop_ids, pad_id=int(model.tokenizer.pad_token_id),
        batch_size=call.batch_size,
    )  # fmt: skip
    return ids, drawn.responses, drawn.ended


def difference_of(model: ChatModel, reference: ChatModel) -> str:
    """Why there is no KL of a model to the reference; empty where there is one."""
    if not same_tokens(model.tokenizer, reference.tokenizer):
        return "not measured: tokenizers differ"
    sizes = [one.model.get_output_embeddings().weight.shape[0] for one in (model, reference)]
    return "" if sizes[0] == sizes[1] else f"not measured: {sizes[0]} and {sizes[1]} logits"


def compared(
    judge: Judge, prompts: list[Any], results: Results, first: Results, bootstrap: Bootstrap
) -> dict[str, Any]:
    """Win rate against the first, ties, and the rate at equal length; of a judge of pairs, which sees each pair in both
    orders, also its position bias and what it did not answer. None values for the first itself."""
    if results is first:
        return win_rate_figures(results, first, None, bootstrap)
    scored, other = results.columns[0], first.columns[0]
    if judge.pairs is None:
        assert scored.gold is not None
        assert other.gold is not None
        return win_rate_figures(results, first, np.array([wins(other.gold, scored.gold)]).T, bootstrap)
    verdicts = both_orders(judge.pairs, prompts, other.texts, scored.texts)
    if all(verdicts.unread):
        raise UserError(f"the judge {judge.name}: not one of {verdicts.pairs} verdicts can be read; use another model")
    own = {name: getattr(verdicts, name) for name in ("position_bias", "self_agreement")}
    found = win_rate_figures(results, first, np.array([verdicts.preference]).T, bootstrap)
    return {**found, **own, "unread": sum(verdicts.unread)}


def write(out: Path, content: dict[str, Any], rows: Sequence[Row], answered: dict[Path, Results]) -> None:
    """Make the folder: comparison.json, and the answers of each source as a file that the command reads again. Raises
    UserError where it cannot be written."""
    try:
        with atomic(out) as fresh:
            fresh.mkdir()
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (fresh / "comparison.json").write_text(text + "\n", encoding="utf-8")
            for number, (source, results) in enumerate(answered.items(), start=1):
                one = results.columns[0]
                lines = [
                    {"prompt": row["prompt"], "response": one.texts[i], "ended": one.ended[i], "tokens": one.tokens[i],
                     "score": one.gold and one.gold[i], "kl": one.divergence and one.divergence.kl[i]}
                    for i, row in enumerate(rows)
                ]  # fmt: skip
                write_jsonl(fresh / f"{number}-{source.name.removesuffix('.jsonl')}.jsonl", lines)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror or error}); name another folder") from None


def render(content: dict[str, Any]) -> str:
    """The table, and who judged."""

    def cell(figures: dict[str, Any], key: str, percent: bool = False) -> str:
        found = [figures[f"{key}{end}"] for end in ("", "_low", "_high")]
        if found[0] is None:
            return "–"
        texts = [f"{100 * one:.1f}%" if percent else f"{one:.2f}" for one in found]
        return f"{texts[0]} ({texts[1]} to {texts[2]})"

    heading = ("model", "score", f"win rate against {content['first']}", "at equal length", "length", "KL, nats")
    lines = [heading]
    for name, one in content["models"].items():
        rates = [cell(one, key, percent=True) for key in ("win_rate", "win_rate_controlled")]
        kl = one["kl_note"] or cell(one, "kl")
        lines.append((name, cell(one, "score"), *rates, cell(one, "length"), kl))
    notes = [f"{content['prompts']} prompts, judge {content['judge']}; 95% intervals over prompts; lengths in "
             f"{content['length_unit']}; KL to {content['first']}"]  # fmt: skip
    for name, one in content["models"].items():
        if "position_bias" in one:
            notes.append(
                f"{name}: the judge gives both orders the same verdict in {one['self_agreement']:.0%} of pairs, "
                f"position bias {one['position_bias']:+.2f}, unread {one['unread']}"
            )
        if one["unfinished_share"] > 0:
            notes.append(f"{name}: {one['unfinished_share']:.0%} of answers have no end")
    return "\n".join([table(lines), "", *notes])
