"""Argilla's exports: `Dataset.records.to_json` (nested), `to_datasets` and the hub (flattened columns), and the records
of its server (responses with `values`). Questions of the types label and ranking are read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tasks.datasets.exports.judgements import Export, Judgement, Verdict, answers_of, prompt_of, read_export

FLAT = ".responses"
Json = Mapping[str, Any]


class Response(NamedTuple):
    """One user's answer to one question; the nested export has no status."""

    question: str
    value: Any
    user: str | None
    status: str | None


def is_export(record: Json) -> bool:
    """Whether a record comes from Argilla, nested or flattened."""
    return ("fields" in record and "responses" in record) or any(str(name).endswith(FLAT) for name in record)


def read(records: Sequence[Json], path: str) -> Export:
    """The judgements of all submitted responses. Raises UserError for a record of another form."""
    return read_export("Argilla", records, path, _judgements)


def _judgements(record: Json, where: str, export: Export) -> Iterator[Judgement]:
    data = record.get("fields") or record
    for response in _responses(record):
        if response.status not in (None, "submitted"):
            export.left_out[f"{response.status} responses"] += 1
        elif response.status is None and record.get("status") == "pending":
            export.left_out["responses of pending records"] += 1
        elif response.value is not None:
            task = str(record.get("id") or record.get("_server_id") or "")
            label = {"annotator": response.user, "task": task or None}
            verdict = _verdict(response.value)
            yield Judgement(where, prompt_of(data), answers_of(data), response.question, verdict, label)


def _responses(record: Json) -> Iterator[Response]:
    nested = record.get("responses")
    if isinstance(nested, Mapping):
        for question, answers in nested.items():
            for answer in answers:
                yield Response(question, answer["value"], _text(answer.get("user_id")), answer.get("status"))
    elif nested is not None:
        for user in nested:
            for question, answer in (user.get("values") or {}).items():
                yield Response(question, answer["value"], _text(user.get("user_id")), user["status"])
    for name in record:
        if name.endswith(FLAT) and record[name]:
            values = (record[name], record[f"{name}.users"], record[f"{name}.status"])
            for value, one, status in zip(*values, strict=True):
                yield Response(name.removesuffix(FLAT), value, _text(one), status)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _verdict(value: object) -> Verdict:
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
