"""The exports of Label Studio, Argilla and OpenAssistant become rows of labelled pairs, or are refused in one line; so
do tables."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from flows.commands.imports import importer
from flows.commands.imports.importer import import_data
from flows.commands.imports.rewriting import Rewriting
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import write_jsonl
from tasks.datasets.problems import Problems
from tasks.datasets.sources.exports import unpack
from tasks.datasets.sources.formats import read_rows

PROMPT, OATS, CAKE, EGGS = "What is a good breakfast?", "Oats with nuts.", "Cake.", "Eggs on toast."


def read(path):
    """The rows of a file or of the export in it, and what was printed."""
    problems, printed = Problems(), []
    unpacked = unpack(read_rows(path, problems.add), path.name, problems, printed.append)
    rows = [row for _, row in unpacked.rows]
    problems.refuse(printed.append)
    return rows, printed


@pytest.fixture
def convert(tmp_path):
    """Write one file and read it."""

    def call(name, content):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8", newline="")
        else:
            path.write_text(json.dumps(content), encoding="utf-8")
        return read(path)

    return call


def task(number, *annotations, **data):
    """A task of Label Studio as its JSON export has it."""
    return {
        "id": number,
        "annotations": list(annotations),
        "file_upload": "3f1c-tasks.json",
        "drafts": [],
        "predictions": [],
        "data": {"prompt": PROMPT, "answer1": OATS, "answer2": CAKE} | data,
        "meta": {},
        "created_at": "2026-11-20T08:00:00.000000Z",
        "updated_at": "2026-11-23T14:00:00.000000Z",
        "inner_id": number,
        "total_annotations": len(annotations),
        "cancelled_annotations": 0,
        "total_predictions": 0,
        "comment_count": 0,
        "project": 5,
        "updated_by": 1,
        "comment_authors": [],
    }


def write_task(folder, **data):
    place = folder / "one.json"
    place.write_text(json.dumps([task(1, annotation(1, left()), **data)]), encoding="utf-8")
    return place


def annotation(by, *results, cancelled=False):
    return {
        "id": 101,
        "completed_by": by,
        "result": list(results),
        "was_cancelled": cancelled,
        "ground_truth": False,
        "created_at": "2026-11-23T13:59:41.102938Z",
        "updated_at": "2026-11-23T14:00:00.000000Z",
        "draft_created_at": None,
        "lead_time": 12.7,
        "prediction": {},
        "result_count": len(results),
        "task": 1,
    }


def result(kind, value, name="better", to="better"):
    return {"id": "PpwBv_NMxd", "from_name": name, "to_name": to, "type": kind, "origin": "manual", "value": value}


def left(to="better"):
    return result("pairwise", {"selected": "left"}, to=to)


def right(to="better"):
    return result("pairwise", {"selected": "right"}, to=to)


def items():
    texts = {"m1": OATS, "m2": CAKE, "m3": EGGS}
    return [{"id": name, "title": f"Model {name}", "body": text} for name, text in texts.items()]


SIDES = "answer1,answer2"


def test_label_studio_pairwise(convert):
    rating = result("rating", {"rating": 4}, "quality")
    rows, printed = convert(
        "project-5.json",
        [
            task(
                1, annotation(3, left(SIDES), rating), annotation({"id": 4, "email": "ben@example.org"}, right(SIDES))
            ),
            task(2, annotation(3, right(), cancelled=True), annotation(4)),
        ],
    )
    shared = {"prompt": PROMPT, "tie": False, "time": "2026-11-23T14:00:00.000000Z", "task": "1"}
    assert rows == [
        {**shared, "chosen": OATS, "rejected": CAKE, "annotator": "3", "order": [1, 2]},
        {**shared, "chosen": CAKE, "rejected": OATS, "annotator": "ben@example.org", "order": [2, 1]},
    ]
    assert printed == [
        "project-5.json: an export of Label Studio, 2 records: 2 pairs "
        "(question: better); left out: 1 annotations that compare nothing; left out: 1 cancelled annotations"
    ]


def test_what_is_said_beside_the_prompt_of_a_task_is_read_or_refused(convert, examples, tmp_path):
    rows, _ = convert("tasks.json", [task(1, annotation(1, left()), system="Be brief.")])
    (example,) = examples(rows)
    assert [turn["content"] for turn in example.prompt] == ["Be brief.", PROMPT]
    rows, _ = convert("tasks.json", [task(1, annotation(1, left()), context="At sea.")])
    with pytest.raises(UserError, match="context"):
        examples(rows)
    [changed] = Rewriting(ignored={"context"}).rows(write_task(tmp_path, context="At sea."), set())
    assert "context" not in changed["data"]
    rows, _ = convert("tasks.json", [task(1, annotation(1, left()), prompt="", instruction="Eat.", context="At sea.")])
    (example,) = examples(rows)
    assert "At sea." in example.prompt[0]["content"]


def test_label_studio_left_is_the_first_name_of_the_control_or_the_lower_number(convert):
    """Whatever the order of the fields."""
    turned = task(1, annotation(1, left()))
    turned["data"] = dict(reversed(turned["data"].items()))
    named = task(2, annotation(1, result("pairwise", {"selected": "left"}, to="answer2,answer1")))
    rows, _ = convert("labels.json", [turned, named])
    assert [row["chosen"] for row in rows] == [OATS, CAKE]


def test_label_studio_choices_beside_others(convert):
    """Another question of the page does not compare the answers."""
    clear = result("choices", {"choices": ["yes"]}, "is it clear?")
    labels = ["answer2", "Tie", "left", "option 2"]
    tasks = [
        task(number, annotation(1, clear, result("choices", {"choices": [choice]})))
        for number, choice in enumerate(labels)
    ]
    rows, printed = convert("labels.json", tasks)
    assert printed[0].endswith("4 pairs (question: better)")
    assert not any("order" in row for row in rows), "where the texts were on the page is not in the export"
    assert [(row["chosen"], row["tie"]) for row in rows] == [(CAKE, False), (OATS, True), (OATS, False), (CAKE, False)]


def choices(*labels, name="quality"):
    """A task for each label."""
    made = [result("choices", {"choices": [label]}, name) for label in labels]
    return [task(number, annotation(1, one)) for number, one in enumerate(made)]


def test_numbers_are_choices_where_all_of_them_are_numbers_of_answers(convert):
    rows, printed = convert("labels.json", choices("1", "2", "tie"))
    assert [(row["chosen"], row["tie"]) for row in rows] == [(OATS, False), (CAKE, False), (OATS, True)]
    assert printed[0].endswith("(question: quality)")


@pytest.mark.parametrize("labels", [("1", "2", "3"), ("2", "left"), ("1", "answer2")])
def test_numbers_that_may_be_ratings_are_refused(convert, labels):
    with pytest.raises(UserError, match=r"labels\.json: quality: its numbers may be ratings; a number names") as caught:
        convert("labels.json", choices(*labels))
    assert "\n" not in str(caught.value)


def test_ratings_beside_a_comparison_are_not_read(convert):
    """Numbers that could be answers are a second question that compares them."""
    compared = [task(9, annotation(1, left()))]
    rows, printed = convert("labels.json", compared + choices("1", "5"))
    assert (len(rows), printed[0].endswith("(question: better)")) == (1, True)
    with pytest.raises(UserError, match=r"several questions compare the answers \(better, quality\)"):
        convert("labels.json", compared + choices("1", "2"))


def test_label_studio_ranker(convert):
    ranked = result("ranker", {"ranker": {"rank": ["m3", "m1", "m2"]}}, "rank", "results")
    rows, _ = convert("ranks.json", [task(7, annotation(1, ranked), items=items())])
    assert [(row["chosen"], row["rejected"], row["order"]) for row in rows] == [
        (OATS, CAKE, [1, 2]),
        (EGGS, OATS, [3, 1]),
        (EGGS, CAKE, [3, 2]),
    ]
    assert {(row["task"], row["annotator"], row["tie"]) for row in rows} == {("7", "1", False)}


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        (
            [task(1, annotation(1, result("pairwise", {"selected": "none"})))],
            "record 1: better: 'none' does not compare",
        ),
        (
            [task(1, annotation(1, result("choices", {"choices": ["reject 2"]})))],
            "'reject 2' does not compare the answers",
        ),
        ([task(1, annotation(1, left()), prompt="")], "record 1: no prompt; expected a column prompt, instruction"),
        (
            [task(1, annotation(1, left()), answer2=None)],
            "record 1: no answers to compare; expected a prompt and two or",
        ),
        ([task(1, annotation(1, left()), text1="a", text2="b")], "record 1: no answers to compare"),
        (
            [
                task(
                    1, annotation(1, result("ranker", {"ranker": {"good": ["m1"], "bad": ["m2", "m3"]}})), items=items()
                )
            ],
            "record 1: better: its value does not compare the answers m1, m2, m3; expected a ranking of all of them",
        ),
        (
            [task(1, annotation(1, result("ranker", {"ranker": {"rank": ["m1", "m2"]}})), items=items())],
            "record 1: better: [['m1'], ['m2']] does not compare",
        ),
        (
            [task(1, annotation(1, left(), result("choices", {"choices": ["left"]}, "also")))],
            "several questions compare the answers (better, also)",
        ),
        ([task(1, annotation(1, {"type": "pairwise"}))], "record 1: not as Label Studio exports it (KeyError"),
        ([task(1, annotation(1))], "without a judgement; left out: 1 annotations that compare nothing; nothing to"),
        ("[{", "broken JSON (Expecting property name enclosed in double quotes, line 1, column 3)"),
        (b"[\xff]", "not UTF-8"),
        ("[1]", "row 1: expected a JSON object, got int"),
    ],
)
def test_what_is_unclear_is_refused_in_one_line(convert, tasks, says):
    with pytest.raises(UserError) as caught:
        convert("labels.json", tasks)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def record(responses, **more):
    """A record of Argilla 2 as `Dataset.records.to_json` writes it."""
    return {
        "id": "r1",
        "fields": {"prompt": PROMPT, "response-1": OATS, "response-2": CAKE},
        "metadata": {"source": "chat"},
        "suggestions": {},
        "responses": responses,
        "vectors": {},
        "status": "completed",
        "_server_id": "5c7f",
    } | more


def test_argilla_nested(convert):
    label = [{"value": "response-2", "user_id": "anna"}, {"value": "response-1", "user_id": "ben"}]
    remark = [{"value": "Too short.", "user_id": "anna"}]
    rows, printed = convert(
        "records.json", [record({"better": label, "why": remark}), record({"better": label}, status="pending")]
    )
    assert rows == [
        {"prompt": PROMPT, "chosen": chosen, "rejected": other, "tie": False, "annotator": who, "task": "r1"}
        for chosen, other, who in ((CAKE, OATS, "anna"), (OATS, CAKE, "ben"))
    ]
    assert printed[0].endswith("left out: 2 responses of pending records")


def test_argilla_server_records(convert):
    """The form of the server and of Argilla 1, whose ranks can be equal."""
    fields = {"prompt": PROMPT, "response_a": OATS, "response_b": CAKE, "response_c": EGGS}

    def by(user, status, ranks):
        value = [{"value": f"response_{name}", "rank": rank} for name, rank in zip("abc", ranks, strict=True)]
        return {"user_id": user, "status": status, "values": {"ranking": {"value": value}}}

    responses = [by("anna", "submitted", [1, 3, 1]), by("ben", "draft", [1, 2, 3]), by("cleo", "discarded", [1, 2, 3])]
    rows, printed = convert("records.json", [record(responses, fields=fields)])
    assert [(row["chosen"], row["rejected"], row["tie"]) for row in rows] == [
        (OATS, CAKE, False), (OATS, EGGS, True), (EGGS, CAKE, False),
    ]  # fmt: skip
    assert "left out: 1 discarded responses; left out: 1 draft responses" in printed[0]


FLAT = {
    "id": "r1",
    "status": "completed",
    "_server_id": "5c7f",
    "prompt": [{"role": "user", "content": PROMPT}],
    "response-1": OATS,
    "response-2": CAKE,
    "ranking.responses": [["response-2", "response-1"], ["response-1", "response-2"], ["response-1", "response-2"]],
    "ranking.responses.users": ["anna", "ben", "cleo"],
    "ranking.responses.status": ["submitted", "submitted", "draft"],
    "ranking.suggestion": None,
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_argilla_flattened_as_datasets_and_the_hub_have_it(tmp_path, ending):
    path = tmp_path / f"train.{ending}"
    rows = [FLAT, FLAT | {"id": "r2", "ranking.responses": None, "ranking.responses.users": None}]
    if ending == "jsonl":
        write_jsonl(path, rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found, _ = read(path)
    assert [(row["chosen"], row["annotator"], row["task"]) for row in found] == [
        (CAKE, "anna", "r1"),
        (OATS, "ben", "r1"),
    ]
    assert found[0]["prompt"] == FLAT["prompt"]


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_tables(convert, delimiter):
    lines = [
        ["prompt", "chosen", "rejected", "annotator", "tie", "note"],
        [PROMPT, f'"{OATS}\r\nAnd {delimiter} ""milk""."', CAKE, "anna", "", "x"],
        ["Tea\u2028?", OATS, CAKE, "", "TRUE", ""],
    ]
    text = "\ufeff" + "\r\n".join(delimiter.join(line) for line in lines) + "\r\n\r\n"
    rows, printed = convert("labels.csv", text)
    assert [{name: value for name, value in row.items() if value is not None} for row in rows] == [
        {
            "prompt": PROMPT,
            "chosen": f'{OATS}\r\nAnd {delimiter} "milk".',
            "rejected": CAKE,
            "annotator": "anna",
            "note": "x",
        },
        {"prompt": "Tea\u2028?", "chosen": OATS, "rejected": CAKE, "tie": True},
    ]
    assert printed == []


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_of_tables(convert, end):
    lines = ["prompt,chosen,rejected,rejected_ended", f"{PROMPT},{OATS},{CAKE},False", f"{PROMPT},{EGGS},{CAKE},"]
    rows, _ = convert("labels.csv", end.join(lines))
    assert [(row["chosen"], row.get("rejected_ended")) for row in rows] == [(OATS, False), (EGGS, None)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"prompt,response\ra,b\rc,\xe4\r", "line 3: not UTF-8"),
        ("prompt,chosen,rejected,chosen_ended\na,b,c,1\n", "line 2: chosen_ended: expected true, false or nothing"),
        ("prompt,response\na,b\nc\n", "line 3: 1 fields, and the header has 2"),
        ('prompt,response\n"a\nb",c\nd,e,f\n', "line 4: 3 fields, and the header has 2"),
        ('prompt,response\na,b\nc,"d\n', "line 3: broken CSV"),
        ('prompt,response\na,"b"c\n', "line 2: broken CSV (a field that begins with a quote must end with one"),
        ("prompt,chosen,rejected,tie\na,b,c,maybe\n", "line 2: tie: expected true, false or nothing, got 'maybe'"),
        ("prompt,response,\na,b,\nc,d,lost\n", "line 3: 'lost' is in a column without a name; name it in the header"),
        ("prompt,prompt\na,b\n", "line 1: two columns of one name"),
        (b"prompt,response\na,b\nc,\xe4\n", "line 3: not UTF-8"),
    ],
)
def test_broken_tables_are_refused_with_their_line(convert, content, says):
    with pytest.raises(UserError) as caught:
        convert("labels.csv", content)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(importer, "dvc_add", lambda target, root: None)
    (tmp_path / "repo/.dvc").mkdir(parents=True)
    return tmp_path / "repo"


def test_import_names_the_parameter_of_labels(root, tmp_path, capsys):
    table = tmp_path / "monday.csv"
    table.write_text(f"prompt,chosen,rejected,annotator\n{PROMPT},{OATS},{CAKE},anna\n{PROMPT},{CAKE},{CAKE},ben\n")
    assert import_data(table, root)[0] == root / "data/raw/monday.csv"
    assert (root / "data/raw/monday.csv").read_bytes() == table.read_bytes()
    printed = capsys.readouterr().out
    assert "monday.csv: 2 pairs; columns: prompt, chosen, rejected, annotator\n" in printed
    assert "same_chosen_rejected 1 (first: monday.csv, row 2)" in printed
    assert '  ingest.labels: "monday.csv"    (added to the data of ingest.source)' in printed


def test_nothing_is_imported_of_a_folder_with_one_broken_file(root, tmp_path):
    folder = tmp_path / "set"
    write_jsonl(folder / "pairs.jsonl", [{"prompt": "q", "chosen": "a"}])
    (folder / "labels.csv").write_text("prompt,chosen,rejected\nq,a,b\n")
    with pytest.raises(UserError, match=rf"^{folder}/pairs\.jsonl, row 1: missing column rejected"):
        import_data(folder, root)
    (folder / "pairs.jsonl").unlink()
    (folder / "labels.json").write_text("[]")
    with pytest.raises(UserError, match=rf"^{folder}/labels\.json: no rows"):
        import_data(folder, root)
    assert not (root / "data").exists()


def test_half_a_surrogate_pair_is_a_bad_row(root, tmp_path):
    path = tmp_path / "labels.json"
    path.write_text(json.dumps([task(1, annotation(1, left()), answer1="a \ud83d")]))
    with pytest.raises(UserError, match=r"labels\.json: no row is left of 1: bad_text 1"):
        import_data(path, root)


def said(name, parent, role, text, **more):
    return {"message_id": name, "parent_id": parent, "role": role, "text": text, "lang": "en"} | more


TREE = [
    said("q", None, "prompter", PROMPT),
    said("a", "q", "assistant", CAKE, rank=1),
    said("b", "q", "assistant", OATS, rank=0),
    said("c", "q", "assistant", EGGS, rank=2),
    said("q2", "b", "prompter", "And lunch?"),
    said("d", "q2", "assistant", "Soup."),
    said("x", "q", "assistant", "Spam.", rank=3, deleted=True),
    said("q3", "x", "prompter", "Why?"),
    said("e", "q3", "assistant", "No idea."),
]


def nested(parent=None):
    return [
        {name: value for name, value in one.items() if name != "parent_id"} | {"replies": nested(one["message_id"])}
        for one in TREE
        if one["parent_id"] == parent
    ]


def test_openassistant_as_a_table(convert):
    columns = ("message_id", "parent_id", "role", "text", "rank", "deleted")
    lines = [",".join(columns)]
    for one in TREE[:4] + TREE[6:7]:
        found = {"deleted": False, "rank": "", **one}
        lines.append(",".join(f'"{"" if found[name] is None else found[name]}"' for name in columns))
    rows, _ = convert("oasst.csv", "\n".join(lines) + "\n")
    assert [(row["chosen"], row["rejected"]) for row in rows] == [(OATS, CAKE), (CAKE, EGGS), (OATS, EGGS)]


@pytest.mark.parametrize("content", [TREE, [{"message_tree_id": "q", "tree_state": "ready", "prompt": nested()[0]}]])
def test_openassistant_as_messages_and_as_trees(convert, content):
    """Ranks become pairs; one reply alone is a demonstration; deleted messages and what answers them are left out."""
    rows, printed = convert("oasst.json", content)
    asked = [{"role": "user", "content": PROMPT}]
    then = [*asked, {"role": "assistant", "content": OATS}, {"role": "user", "content": "And lunch?"}]
    assert rows == [
        {"prompt": asked, "chosen": OATS, "rejected": CAKE},
        {"prompt": asked, "chosen": CAKE, "rejected": EGGS},
        {"prompt": asked, "chosen": OATS, "rejected": EGGS},
        {"prompt": then, "response": "Soup."},
    ]
    assert "of OpenAssistant: 4 rows" in printed[0]
