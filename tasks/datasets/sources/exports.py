"""Exports of annotation tools, whose records need each other or hold the work of several people: Label Studio, Argilla,
OpenAssistant. They become rows of labelled pairs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row, brief, brief_names
from tasks.datasets.problems import Log, Problems
from tasks.datasets.sources.dialogues import ShapeError, message, parse_conversation
from tasks.datasets.sources.verdicts import Verdict, answers_of, is_number, pairs_of, ranks_of

PROMPTS = ("prompt", "instruction", "question", "query")
CONTEXT = ("system", "system_prompt", "system_message", "history", "input", "context")
FLAT = ".responses"
"""Argilla's columns of responses in flat records."""
Json = Mapping[str, Any]
Numbered = tuple[int, Row]


class Judgement(NamedTuple):
    """What one person said about the answers to one prompt."""

    row: int
    prompt: Json
    """The columns of the question: the prompt, None where there is none, and those of `CONTEXT`."""
    answers: Mapping[str, str]
    """By name; the first one is the left one of two."""
    question: str
    verdict: Verdict
    label: Mapping[str, str | None]
    """The columns annotator, time and task, as far as they are known."""
    shown_in_order: bool = False
    """The tool showed the answers in this order."""


class Unpacked(NamedTuple):
    """The rows of a file, or those that an export became, with the numbers of their records."""

    rows: Iterable[Numbered]
    is_export: bool


def is_export(record: Json) -> bool:
    """Whether a record comes from an annotation tool, so that its columns are not those of a row."""
    return _is_tree(record) or any(is_one(record) for _, is_one, _ in TOOLS)


def unpack(rows: Iterable[Numbered], file: str, problems: Problems, log: Log) -> Unpacked:
    """The rows of a file as they are, or, where the first is a record of a tool, the pairs in all of its records; `log`
    prints what became of them. Judgements that cannot be read are added to `problems`.

    Raises UserError for a record of another form than the first, and where no question or several compare answers.
    """
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return Unpacked((), is_export=False)
    rows = chain([first], rows)
    if _is_tree(first[1]):
        records = list(rows)
        try:
            found = list(_openassistant(records, file))
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{file}: not as OpenAssistant writes it ({type(error).__name__}: {error})") from None
        log(f"{file}: {len(records):,} records of OpenAssistant: {len(found):,} rows; deleted messages are left out")
        return Unpacked(found, is_export=True)
    tool, read = next(((tool, read) for tool, is_one, read in TOOLS if is_one(first[1])), ("", None))
    if read is None:
        return Unpacked(rows, is_export=False)
    records, left_out = list(rows), Counter[str]()
    judgements: list[Judgement] = []
    for number, record in records:
        try:
            judgements += read(number, record, left_out)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{file}, record {number}: not as {tool} exports it ({type(error).__name__}: {error}); export it again "
                "in a format that docs/how-to/own-data.md names"
            ) from None
    question = _question_of(judgements, file) if judgements else ""
    pairs: list[Numbered] = []
    for judgement in judgements:
        if judgement.question == question:
            if problem := _problem(judgement):
                problems.add(f"{file}, record {judgement.row}: {problem}")
            else:
                pairs += _pairs(judgement)
    note = f" (question: {brief_names([question])})" if question else ""
    note += "".join(f"; left out: {count} {reason}" for reason, count in sorted(left_out.items()))
    if not pairs and not problems.count:
        raise UserError(f"{file}: an export of {tool} without a judgement{note}; nothing to import")
    log(f"{file}: an export of {tool}, {len(records):,} records: {len(pairs):,} pairs{note}")
    return Unpacked(pairs, is_export=True)


def _question_of(judgements: Sequence[Judgement], file: str) -> str:
    """The one question that compares the answers. Raises UserError where none does, or more than one."""
    questions = list(dict.fromkeys(judgement.question for judgement in judgements))
    ratings = {name for name in questions if _may_rate([j for j in judgements if j.question == name])}
    if len(questions) == 1:
        if ratings:
            raise UserError(
                f"{file}: {brief_names(questions)}: its numbers may be ratings; a number names an answer only where "
                "all labels are numbers of answers, or ties"
            )
        return questions[0]
    found = dict.fromkeys(j.question for j in judgements if j.answers and _ranks(j) is not None)
    comparing = [name for name in found if name not in ratings]
    if len(comparing) == 1:
        return comparing[0]
    problem = f"several questions compare the answers ({brief_names(comparing)})"
    if not comparing:
        problem = f"no question compares the answers (found: {brief_names(questions) or 'no answered question'})"
    raise UserError(f"{file}: {problem}; expected one, whose answers are the names of the texts, or left and right")


def _may_rate(judgements: Sequence[Judgement]) -> bool:
    """Whether labels of a question are numbers, and one of its labels is neither the number of an answer nor a tie."""
    of_two = [j for j in judgements if len(j.answers) == 2 and isinstance(j.verdict, str)]
    labels = [(str(j.verdict).strip(), _ranks(j)) for j in of_two]
    clear = [ranks is not None and (label.isdigit() or ranks == [0, 0]) for label, ranks in labels]
    return any(label.isdigit() for label, _ in labels) and not all(clear)


def _ranks(judgement: Judgement) -> list[int] | None:
    return ranks_of(judgement.verdict, list(judgement.answers))


def _problem(judgement: Judgement) -> str | None:
    """What makes a judgement unreadable, and what is expected."""
    if len(judgement.answers) < 2:
        return "no answers to compare; expected a prompt and two or more texts such as answer1, answer2"
    asked = next(iter(judgement.prompt.values()))
    if asked is None:
        return f"no prompt; expected a column {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}"
    try:
        parse_conversation(asked)
    except ShapeError as error:
        return f"prompt: {error}"
    if _ranks(judgement) is None:
        names = brief_names(judgement.answers)
        expected = "one of them, left, right or tie" if len(judgement.answers) == 2 else "a ranking of all of them"
        found = "its value" if judgement.verdict is None else brief(judgement.verdict)
        return f"{judgement.question}: {found} does not compare the answers {names}; expected {expected}"
    return None


def _pairs(judgement: Judgement) -> Iterator[Numbered]:
    texts = list(judgement.answers.values())
    label = {name: value for name, value in judgement.label.items() if value is not None}
    for best, worst, tie in pairs_of(texts, _ranks(judgement) or []):
        order = {"order": [best + 1, worst + 1]} if judgement.shown_in_order else {}
        pair = {**judgement.prompt, "chosen": texts[best], "rejected": texts[worst], "tie": tie}
        yield judgement.row, pair | label | order


def _prompt_of(data: Json) -> Json:
    """The prompt, with columns beside it that say more of the question: read or refused as in other files."""
    asked = next((name for name in PROMPTS if data.get(name)), "prompt")
    return {asked: data.get(asked) or None} | {name: data[name] for name in CONTEXT if data.get(name)}


def _texts_of(data: Json) -> dict[str, str]:
    """The answers of a record by name."""
    return {name: data[name] for name in answers_of(name for name, value in data.items() if isinstance(value, str))}


# Label Studio, export format JSON: tasks with `data` and `annotations`. The controls Pairwise (value.selected), Choices
# (value.choices) and Ranker without buckets (value.ranker) are read; see https://labelstud.io/guide/task_format and
# https://labelstud.io/tags/ranker.


def _is_label_studio(record: Json) -> bool:
    return "data" in record and "annotations" in record


def _label_studio(row: int, task: Json, left_out: Counter[str]) -> Iterator[Judgement]:
    """The judgements of all annotations that were not cancelled."""
    for annotation in task["annotations"]:
        results = [r for r in annotation.get("result") or [] if r["type"] in ("pairwise", "choices", "ranker")]
        if annotation.get("was_cancelled"):
            left_out["cancelled annotations"] += 1
        elif not results:
            left_out["annotations that compare nothing"] += 1
        else:
            who, time = annotation.get("completed_by"), annotation.get("updated_at") or annotation.get("created_at")
            who = (who.get("email") or who["id"]) if isinstance(who, Mapping) else who
            label = {
                "annotator": None if who is None else str(who),
                "time": time if isinstance(time, str) else None,
                "task": str(task["id"]),
            }
            for result in results:
                answers, in_order = _shown(task["data"], result)
                question, verdict = str(result["from_name"]), _selected(result)
                yield Judgement(row, _prompt_of(task["data"]), answers, question, verdict, label, in_order)


def _selected(result: Json) -> Verdict:
    value = result["value"]
    if result["type"] == "pairwise":
        return str(value["selected"])
    if result["type"] == "choices":
        return str(value["choices"][0]) if len(value["choices"]) == 1 else None
    lists = list(value["ranker"].values())
    return [[str(name)] for name in lists[0]] if len(lists) == 1 else None  # with buckets: which is better is unknown


def _shown(data: Json, result: Json) -> tuple[dict[str, str], bool]:
    """The answers, and whether they were shown in this order: the items of a Ranker, and the texts that the `to_name`
    of a Pairwise lists, the left one first. Others are in the order of their numbers."""
    if result["type"] == "ranker":
        lists = [v for v in data.values() if isinstance(v, list) and v and isinstance(v[0], Mapping) and "id" in v[0]]
        items = lists[0] if len(lists) == 1 else []
        return {str(item["id"]): item["body"] for item in items if isinstance(item.get("body"), str)}, True
    answers, shown = _texts_of(data), str(result.get("to_name")).split(",")
    if answers.keys() != set(shown):
        return answers, False
    return {name: answers[name] for name in shown}, result["type"] == "pairwise"


# Argilla: `Dataset.records.to_json` (nested), `to_datasets` and the hub (flat columns), the records of its server
# (responses with `values`), and version 1 (a column of responses for each question). Label and ranking questions are
# read.


def _is_argilla(record: Json) -> bool:
    nested = "fields" in record and "responses" in record
    return nested or any(str(name).endswith(FLAT) or _is_argilla_1(value) for name, value in record.items())


def _is_argilla_1(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], Mapping)
        and {"user_id", "value"} <= value[0].keys()
    )


def _argilla(row: int, record: Json, left_out: Counter[str]) -> Iterator[Judgement]:
    """The judgements of all submitted responses; the nested export has no status of single responses."""
    data = record.get("fields") or record
    task = str(record.get("id") or record.get("_server_id") or "") or None
    for question, value, user, status in _responses(record):
        if status not in (None, "submitted"):
            left_out[f"{status} responses"] += 1
        elif status is None and record.get("status") == "pending":
            left_out["responses of pending records"] += 1
        elif value is not None:
            label = {"annotator": None if user is None else str(user), "task": task}
            yield Judgement(row, _prompt_of(data), _texts_of(data), question, _ranking(value), label)


def _responses(record: Json) -> Iterator[tuple[str, Any, object, str | None]]:
    """Question, value, user and status of each response."""
    nested = record.get("responses")
    if isinstance(nested, Mapping):
        for question, answers in nested.items():
            for answer in answers:
                yield question, answer["value"], answer.get("user_id"), answer.get("status")
    elif nested is not None:
        for user in nested:
            for question, answer in (user.get("values") or {}).items():
                yield question, answer["value"], user.get("user_id"), user["status"]
    for name, column in record.items():
        if name.endswith(FLAT) and column:
            for value, one, status in zip(column, record[f"{name}.users"], record[f"{name}.status"], strict=True):
                yield name.removesuffix(FLAT), value, one, status
        elif name != "responses" and _is_argilla_1(column):
            for answer in column:
                yield name, answer["value"], answer["user_id"], answer.get("status")


def _ranking(value: object) -> Verdict:
    """A label, or a ranking: names in order, or {value, rank} where ranks can be equal."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(one, str) for one in value):
        return [[one] for one in value]
    if not all(isinstance(one, Mapping) and one.get("rank") is not None and "value" in one for one in value):
        return None
    ranks = sorted({one["rank"] for one in value})
    return [[one["value"] for one in value if one["rank"] == rank] for rank in ranks]


# OpenAssistant: messages that name their parents, or trees of messages with their replies.


def _is_tree(record: Json) -> bool:
    return {"message_id", "parent_id", "text", "role"} <= record.keys() or (
        "message_tree_id" in record and isinstance(record.get("prompt"), Mapping)
    )


def _openassistant(records: Sequence[Numbered], file: str) -> Iterator[Numbered]:
    """A pair for every two replies with different ranks (0 is the best); a prompt without such replies and its first
    reply are a demonstration. What was said before is the prompt; without it a message is left out. Raises UserError
    for a message of another form."""
    found: list[tuple[int, Json]] = []
    for number, record in records:
        stack: list[tuple[Any, Any]] = [(record, record.get("parent_id"))]
        if isinstance(record.get("prompt"), Mapping):
            stack = [(record["prompt"], None)]
        while stack:
            said, parent = stack.pop(0)
            if not isinstance(said, Mapping) or not isinstance(said.get("text"), str) or "message_id" not in said:
                raise UserError(
                    f"{file}, record {number}: not a message of OpenAssistant; expected message_id and text"
                )
            found.append((number, {**said, "parent_id": parent}))
            stack += [(reply, said["message_id"]) for reply in said.get("replies") or []]
    kept = {
        said["message_id"]: (number, said) for number, said in found if str(said.get("deleted")).casefold() != "true"
    }
    replies: dict[Any, list[Json]] = {}
    for _, said in kept.values():
        replies.setdefault(said["parent_id"], []).append(said)
    for name, (number, said) in kept.items():
        answers = [reply for reply in replies.get(name, []) if reply["role"] == "assistant"]
        if said["role"] != "prompter" or not answers:
            continue
        prompt = [message("user", said["text"])]
        above = said["parent_id"]
        while above in kept and len(prompt) <= len(kept):
            earlier = kept[above][1]
            prompt.insert(0, message("user" if earlier["role"] == "prompter" else "assistant", earlier["text"]))
            above = earlier["parent_id"]
        if above is not None:  # what it answers is not in the file, or was deleted
            continue
        ranked = [{**reply, "rank": float(reply["rank"])} for reply in answers if is_number(reply.get("rank"))]
        pairs = [
            {"prompt": prompt, "chosen": ranked[best]["text"], "rejected": ranked[worst]["text"]}
            for best, worst, tie in pairs_of(ranked, [reply["rank"] for reply in ranked])
            if not tie
        ]
        for pair in pairs or [{"prompt": prompt, "response": (ranked or answers)[0]["text"]}]:
            yield number, pair


Reader = Callable[[int, Json, Counter[str]], Iterator[Judgement]]
TOOLS: tuple[tuple[str, Callable[[Json], bool], Reader], ...] = (
    ("Label Studio", _is_label_studio, _label_studio),
    ("Argilla", _is_argilla, _argilla),
)
