"""Label Studio's JSON export: tasks with `data` and `annotations`.

The controls Pairwise (value.selected), Choices (value.choices) and Ranker without buckets (value.ranker) are read; see
https://labelstud.io/guide/task_format and https://labelstud.io/tags/ranker."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.datasets.exports.judgements import Export, Judgement, Verdict, answers_of, prompt_of, read_export

TYPES = ("pairwise", "choices", "ranker")
Json = Mapping[str, Any]


def is_export(record: Json) -> bool:
    """Whether a record is a task of Label Studio."""
    return "data" in record and "annotations" in record


def read(tasks: Sequence[Json], path: str) -> Export:
    """The judgements of all annotations that were not cancelled. Raises UserError for a task of another form."""
    return read_export("Label Studio", tasks, path, _judgements)


def _judgements(task: Json, where: str, export: Export) -> Iterator[Judgement]:
    for annotation in task["annotations"]:
        results = [result for result in annotation.get("result") or [] if result["type"] in TYPES]
        if annotation.get("was_cancelled"):
            export.left_out["cancelled annotations"] += 1
        elif not results:
            export.left_out["annotations that compare nothing"] += 1
        else:
            label = {"annotator": _annotator(annotation), "time": _time(annotation), "task": str(task["id"])}
            for result in results:
                answers, in_order = _answers(task["data"], result)
                yield Judgement(
                    where, prompt_of(task["data"]), answers, str(result["from_name"]), _verdict(result), label, in_order
                )


def _annotator(annotation: Json) -> str | None:
    who = annotation.get("completed_by")
    if isinstance(who, Mapping):
        who = who.get("email") or who["id"]
    return None if who is None else str(who)


def _time(annotation: Json) -> str | None:
    time = annotation.get("updated_at") or annotation.get("created_at")
    return time if isinstance(time, str) else None


def _verdict(result: Json) -> Verdict:
    value = result["value"]
    if result["type"] == "pairwise":
        return str(value["selected"])
    if result["type"] == "choices":
        return str(value["choices"][0]) if len(value["choices"]) == 1 else None
    lists = list(value["ranker"].values())
    return [[str(name)] for name in lists[0]] if len(lists) == 1 else None  # with buckets: which is better is unknown


def _answers(data: Json, result: Json) -> tuple[dict[str, str], bool]:
    """The answers, and whether they were shown in this order: the items of a Ranker, and the texts that the `to_name`
    of a Pairwise lists, the left one first. Others are in the order of their numbers."""
    if result["type"] == "ranker":
        return _items(data), True
    answers, shown = answers_of(data), str(result.get("to_name")).split(",")
    if answers.keys() != set(shown):
        return answers, False
    return {name: answers[name] for name in shown}, result["type"] == "pairwise"


def _items(data: Json) -> dict[str, str]:
    """The texts of a List by id; empty unless the task has exactly one."""
    lists = [value for value in data.values() if isinstance(value, list) and value and _is_item(value[0])]
    return {str(item["id"]): item["body"] for item in lists[0]} if len(lists) == 1 else {}


def _is_item(value: object) -> bool:
    return isinstance(value, Mapping) and "id" in value and isinstance(value.get("body"), str)
