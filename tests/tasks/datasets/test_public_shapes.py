"""Files in the shapes of public data sets and bug reports: read as their makers meant them, or refused by name. Each
goes through `leash import` and the work of the stage `ingest`, as JSON lines and as CSV, alone and beside another
file."""

import csv
import datetime
import json
import re
import runpy
from pathlib import Path

import numpy
import pandas
import pytest

from flows.commands.imports import importer
from flows.commands.imports.importer import import_data
from flows.commands.imports.rewriting import Rewriting, renamed
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import read_jsonl, write_jsonl
from tasks.datasets.prepare import prepare
from tasks.datasets.sources import files
from tasks.datasets.sources.datasets import assemble, divide
from tasks.datasets.sources.shapes import SHAPES
from tasks.params.ingest import FilesParams

TOPICS = [
    "tea", "bread", "rain", "bikes", "maps", "soap", "clocks", "kites", "shoes", "lamps", "boats", "drums", "coats",
    "pens", "cups", "bags", "hats", "nets", "saws", "jars",
]  # fmt: skip
ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT.parent / "shared" / "cases"


def asked(topic):
    return f"How do I look after {topic}?"


def good(topic):
    return f"Clean {topic}, and dry them."


def bad(topic):
    return f"No idea about {topic}."


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def earlier(topic):
    return [user(f"Hello {topic}."), said("Good morning.")]


def brief(_):
    return [system("Be brief.")]


def nothing(_):
    return []


PAIR, GOOD = (good, bad), (good,)

# Name → a row for a topic, and what it must become: the turns before the question, and the answers.
READ = {
    "a vote in another column": (
        lambda t: {"question": asked(t), "answer_a": bad(t), "answer_b": good(t), "winner": "answer_b"},
        nothing, PAIR,
    ),
    "a vote by letter": (
        lambda t: {"prompt": asked(t), "response_a": good(t), "response_b": bad(t), "better": "A"},
        nothing, PAIR,
    ),
    "a vote by model": (
        lambda t: {"prompt": asked(t), "model_a": "m", "model_b": "n", "response_a": good(t), "response_b": bad(t)}
        | {"winner": "model_a"}, nothing, PAIR,
    ),
    "HelpSteer2-Preference": (
        lambda t: {"prompt": asked(t), "response_1": bad(t), "response_2": good(t), "preference_strength": 2}
        | {"preference_statement": "The second one helps more.", "split": "train"}, nothing, PAIR,
    ),
    "PKU-SafeRLHF": (
        lambda t: {"prompt": asked(t), "response_0": bad(t), "response_1": good(t), "better_response_id": 1}
        | {"safer_response_id": 0, "is_response_0_safe": True}, nothing, PAIR,
    ),
    "Nectar": (
        lambda t: {"prompt": f"\n\nHuman: {asked(t)}\n\nAssistant: "}
        | {"answers": [{"answer": bad(t), "rank": 2.0}, {"answer": good(t), "rank": 1.0}], "turns": 1}, nothing, PAIR,
    ),
    "LMSYS arena": (
        lambda t: {"id": 1, "model_a": "m", "model_b": "n", "prompt": json.dumps([asked(t)])}
        | {"response_a": json.dumps([good(t)]), "response_b": json.dumps([bad(t)])}
        | {"winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0}, nothing, PAIR,
    ),
    "LMSYS arena of two turns": (
        lambda t: {"prompt": json.dumps([f"Hello {t}.", asked(t)]), "response_a": json.dumps(["Good morning.", bad(t)])}
        | {"response_b": json.dumps(["Good morning.", good(t)])}
        | {"winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0}, earlier, PAIR,
    ),
    "MT-bench": (
        lambda t: {"question_id": 8, "winner": "model_b", "conversation_a": [user(asked(t)), said(bad(t))]}
        | {"conversation_b": [user(asked(t)), said(good(t))]}, nothing, PAIR,
    ),
    "Argilla 1": (
        lambda t: {"prompt": asked(t), "response-1": bad(t), "response-2": good(t), "external_id": None, "preference": [
            {"user_id": "u", "status": "submitted", "value": [
                {"rank": 2, "value": "response-1"}, {"rank": 1, "value": "response-2"}]}]}, nothing, PAIR,
    ),
    "Label Studio's CSV": (
        lambda t: {"answer1": bad(t), "answer2": good(t), "prompt": asked(t), "cmp": '[{"selected": "right"}]'}
        | {"annotator": 3, "lead_time": 4.5}, nothing, PAIR,
    ),
    "system beside the prompt": (
        lambda t: {"system": "Be brief.", "prompt": asked(t), "chosen": good(t), "rejected": bad(t)},
        brief, PAIR,
    ),
    "system beside a demonstration": (
        lambda t: {"system_prompt": "Be brief.", "prompt": [user(asked(t))], "response": good(t)},
        brief, GOOD,
    ),
    "history": (
        lambda t: {"prompt": asked(t), "response": good(t), "history": [[f"Hello {t}.", "Good morning."]]},
        earlier, GOOD,
    ),
    "history of a pair": (
        lambda t: {"prompt": asked(t), "chosen": good(t), "rejected": bad(t), "system": "Be brief."}
        | {"history": [[f"Hello {t}.", "Good morning."]]}, lambda t: [system("Be brief."), *earlier(t)], PAIR,
    ),
    "conversations as JSON": (
        lambda t: {"prompt": json.dumps([user(asked(t))]), "chosen": json.dumps([said(good(t))])}
        | {"rejected": json.dumps([said(bad(t))])}, nothing, PAIR,
    ),
    "conversations as Python": (
        lambda t: {"chosen": str([user(asked(t)), said(good(t))]), "rejected": str([user(asked(t)), said(bad(t))])},
        nothing, PAIR,
    ),
    "messages as JSON": (lambda t: {"messages": json.dumps([user(asked(t)), said(good(t))])}, nothing, GOOD),
    "the prompt at the head of both answers": (
        lambda t: {"prompt": asked(t), "chosen": f"{asked(t)} {good(t)}", "rejected": f"{asked(t)} {bad(t)}"},
        nothing, PAIR,
    ),
    "the prompt at the head of the answer": (
        lambda t: {"prompt": asked(t), "completion": f"{asked(t)}\n{good(t)}"}, nothing, GOOD,
    ),
    "a text prompt beside conversations": (
        lambda t: {"prompt": f"Hello {t}.", "question": f"Hello {t}."}
        | {"chosen": [*earlier(t), user(asked(t)), said(good(t))]}
        | {"rejected": [*earlier(t), user(asked(t)), said(bad(t))]}, earlier, PAIR,
    ),
    "a text prompt beside a whole conversation": (
        lambda t: {"prompt": asked(t), "response": [*earlier(t), user(asked(t)), said(good(t))]}, earlier, GOOD,
    ),
    "ShareGPT": (
        lambda t: {"id": "x", "conversations": [
            {"from": "system", "value": "Be brief."}, {"from": "human", "value": asked(t)},
            {"from": "gpt", "value": good(t)}]}, brief, GOOD,
    ),
    "ShareGPT preferences": (
        lambda t: {"conversations": [{"from": "human", "value": asked(t)}], "chosen": {"from": "gpt", "value": good(t)}}
        | {"rejected": {"from": "gpt", "value": bad(t)}}, nothing, PAIR,
    ),
    "Alpaca": (
        lambda t: {"instruction": "How do I look", "input": f"after {t}?", "output": good(t)}
        | {"text": f"Below is an instruction.\n\nHow do I look\n\nafter {t}?\n\n### Response:\n{good(t)}"},
        nothing, GOOD,
    ),
    "Capybara": (
        lambda t: {"conversation": [
            {"input": f"Hello {t}.", "output": "Good morning."}, {"input": asked(t), "output": good(t)}]},
        earlier, GOOD,
    ),
    "one message as an object": (
        lambda t: {"prompt": user(asked(t)), "chosen": said(good(t)), "rejected": said(bad(t))}, nothing, PAIR,
    ),
    "question and answer": (lambda t: {"question": asked(t), "answer": good(t)}, nothing, GOOD),
    "UltraFeedback": (
        lambda t: {"prompt": asked(t), "prompt_id": "x", "chosen": [user(asked(t)), said(good(t))], "score_chosen": 8.0}
        | {"rejected": [user(asked(t)), said(bad(t))], "messages": [user(asked(t)), said(good(t))]}, nothing, PAIR,
    ),
    "input and output": (lambda t: {"input": asked(t), "output": good(t)}, nothing, GOOD),
    "system beside conversations with a vote": (
        lambda t: {"system": "Be brief.", "winner": "model_a", "conversation_a": [user(asked(t)), said(good(t))]}
        | {"conversation_b": [user(asked(t)), said(bad(t))]}, brief, PAIR,
    ),
    "LMSYS arena 33k": (
        lambda t: {"model_a": "m", "model_b": "n", "winner": "model_b", "tstamp": 1.0}
        | {"conversation_a": [user(asked(t)), said(bad(t))], "conversation_b": [user(asked(t)), said(good(t))]},
        nothing, PAIR,
    ),
    "lists of one text": (
        lambda t: {"prompt": json.dumps([asked(t)]), "chosen": json.dumps([good(t)]), "rejected": json.dumps([bad(t)])},
        nothing, PAIR,
    ),
    "history that the conversation has": (
        lambda t: {"history": [[f"Hello {t}.", "Good morning."]], "prompt": [*earlier(t), user(asked(t))]}
        | {"response": good(t)},
        earlier, GOOD,
    ),
    "distilabel-orca": (lambda t: {"input": asked(t), "chosen": good(t), "rejected": bad(t)}, nothing, PAIR),
    "an answer that is JSON": (
        lambda t: {"prompt": asked(t), "completion": good(t), "tags": '[{"name": "x"}]', "subset": "a b"},
        nothing, GOOD,
    ),
    "content in parts": (
        lambda t: {"messages": [{"role": "user", "content": [{"type": "text", "text": asked(t)}]}, said(good(t))]},
        nothing, GOOD,
    ),
    "empty keys of tools and reasoning": (
        lambda t: {"messages": [user(asked(t)), said(good(t), tool_calls=None, reasoning_content="", weight=1)]},
        nothing, GOOD,
    ),
}  # fmt: skip

# Name → a row for a topic, and what the refusal says.
REFUSED = {
    "two answers without a vote": (
        lambda t: {"question": asked(t), "response_j": good(t), "response_k": bad(t)},
        "row 1: has two answers (response_j, response_k) and no verdict that is understood",
    ),
    "a vote for something else": (
        lambda t: {"prompt": asked(t), "response_0": good(t), "response_1": bad(t), "winner": "m3"},
        "row 1: winner: 'm3' names none of the answers response_0, response_1",
    ),
    "answers in other columns": (
        lambda t: {"prompt": asked(t), "chosen_response": good(t), "rejected_response": bad(t)},
        "row 1: has prompt and chosen_response, which is not read beside them",
    ),
    "a list of answers": (
        lambda t: {"prompt": asked(t), "responses": [good(t), bad(t)]},
        "row 1: responses: has several answers and no verdict",
    ),
    "tool calls": (
        lambda t: {"messages": [user(asked(t)), said("I look.", tool_calls=[{"function": {"name": "search"}}])]},
        "row 1: messages: message 2 has tool_calls, which is not read; `leash import --ignore tool_calls` leaves it "
        "out",
    ),
    "function calls in a pair": (
        lambda t: {"prompt": [user(asked(t))], "chosen": [said("I look.", function_call={"name": "search"})]}
        | {"rejected": [said("I look.")]},
        "row 1: chosen: message 1 has function_call",
    ),
    "tools": (
        lambda t: {"messages": [user(asked(t)), said(good(t))], "tools": [{"name": "x"}]},
        "row 1: has messages and tools",
    ),
    "reasoning": (
        lambda t: {"messages": [user(asked(t)), said(good(t), reasoning_content="The user asks.")]},
        "row 1: messages: message 2 has reasoning_content, which would be lost; `leash import --think`",
    ),
    "thinking": (
        lambda t: {"prompt": asked(t), "chosen": [said(good(t), thinking="Hm, so.")], "rejected": [said(bad(t))]},
        "row 1: chosen: message 1 has thinking, which would be lost",
    ),
    "an unknown key with content": (
        lambda t: {"messages": [user(asked(t)), said(good(t), analysis="They want to know.")]},
        "row 1: messages: message 2 has analysis, which is not read",
    ),
    "no content": (
        lambda t: {"messages": [user(asked(t)), {"role": "assistant", "content": None}]},
        "row 1: messages: message 2 has no content (null)",
    ),
    "an answer that must not be imitated": (
        lambda t: {"messages": [user(asked(t)), said(good(t), weight=0)]}, "row 1: messages: message 2 has weight",
    ),
    "ChatML in the prompt": (
        lambda t: {"prompt": f"<|im_start|>user\n{asked(t)}<|im_end|>\n<|im_start|>assistant\n", "response": good(t)},
        "row 1: prompt: a chat template is already applied to the text (ChatML)",
    ),
    "ChatML's end in the answer": (
        lambda t: {"prompt": asked(t), "chosen": f"{good(t)}<|im_end|>\n", "rejected": f"{bad(t)}<|im_end|>\n"},
        "row 1: chosen: a chat template is already applied to the text (<|im_end|>)",
    ),
    "Llama 2 in a text": (
        lambda t: {"text": f"<s>[INST] {asked(t)} [/INST] {good(t)} </s>"},
        "row 1: text: a chat template is already applied to the text (Llama 2 or Mistral)",
    ),
    "Gemma": (
        lambda t: {"prompt": f"<start_of_turn>user\n{asked(t)}<end_of_turn>\n<start_of_turn>model\n", "response":
        good(t)}, "row 1: prompt: a chat template is already applied to the text (Gemma)",
    ),
    "a wrong role": (
        lambda t: {"prompt": [user(asked(t))], "chosen": [said(good(t))], "rejected": [user(bad(t))]},
        ": no row is left of 20: bad_conversation 20 (first: train.",
    ),
    "messages that cannot be parsed": (
        lambda t: {"prompt": asked(t), "response": f"[{{'role': 'assistant', 'content': '{good(t)} ..."},
        "row 1: response: looks like messages in a text, and cannot be read",
    ),
    "another column with an answer": (
        lambda t: {"prompt": asked(t), "response": good(t), "output": bad(t)},
        "row 1: has prompt, response and output, which is not read beside them",
    ),
    "a history that is a text": (
        lambda t: {"prompt": asked(t), "response": good(t), "history": "We talked before."},
        "row 1: history: expected a list of [question, answer]",
    ),
    "two system messages": (
        lambda t: {"system": "Be brief.", "prompt": [system("Be kind."), user(asked(t))], "response": good(t)},
        "row 1: system: the prompt has another system message",
    ),
    "a text beside an answer": (
        lambda t: {"text": asked(t), "response": good(t)}, "row 1: has text and response, which is not read",
    ),
    "a text beside its summary": (
        lambda t: {"text": asked(t), "summary": good(t)}, "row 1: has text and summary, which is not read beside them",
    ),
    "ChatML in a message": (
        lambda t: {"messages": [user(f"<|im_start|>user\n{asked(t)}<|im_end|>"), said(good(t))]},
        "row 1: messages: a chat template is already applied to the text (ChatML)",
    ),
    "two votes": (
        lambda t: {"prompt": asked(t), "response_a": good(t), "response_b": bad(t), "winner": "a"}
        | {"preference_strength": 3},
        "row 1: has two answers (response_a, response_b) and several columns that may say it",
    ),
    "a category that is a letter": (
        lambda t: {"prompt": asked(t), "response_a": good(t), "response_b": bad(t), "category": "a"},
        "row 1: has two answers (response_a, response_b) and no verdict that is understood",
    ),
    "a vote beside another answer": (
        lambda t: {"prompt": asked(t), "response": good(t), "response_a": good(t), "response_b": bad(t), "winner": "a"},
        "row 1: response_a, response_b and response: several answers in two ways",
    ),
    "options with a vote": (
        lambda t: {"prompt": asked(t), "option_a": good(t), "option_b": bad(t), "winner": "a"},
        "row 1: has prompt and option_a, which is not read beside them",
    ),
    "a second answer": (
        lambda t: {"prompt": asked(t), "response": good(t), "negative_response": bad(t)},
        "row 1: has prompt, response and negative_response, which is not read",
    ),
    "the answer inside another text": (
        lambda t: {"question": asked(t), "text": f"{asked(t)} {good(t)}"},
        "row 1: has question and text, which is not read",
    ),
    "earlier turns under another name": (
        lambda t: {"prompt": asked(t), "chosen": good(t), "rejected": bad(t), "chat_history": [["Hello.", "Yes."]]},
        "row 1: has prompt, chosen, rejected and chat_history, which is not read",
    ),
    "a persona": (
        lambda t: {"prompt": asked(t), "response": good(t), "persona": "You are a pirate."},
        "row 1: has prompt, response and persona, which is not read",
    ),
    "thoughts in a column": (
        lambda t: {"prompt": asked(t), "response": good(t), "Complex_CoT": "First I think."},
        "row 1: has prompt, response and Complex_CoT, which is not read",
    ),
    "an input that the answer repeats": (
        lambda t: {"prompt": "Name it.", "input": t, "response": f"It is {t}."},
        "row 1: has prompt, response and input, which is not read",
    ),
    "a label that is a word": (
        lambda t: {"prompt": asked(t), "completion": good(t), "label": "harmful"},
        "row 1: label: 'harmful' does not say whether the answer is good",
    ),
    "DeepSeek behind a system text": (
        lambda t: {"prompt": f"Be kind.<｜User｜>{asked(t)}<｜Assistant｜>", "chosen": good(t), "rejected": bad(t)},
        "row 1: prompt: a chat template is already applied to the text (DeepSeek)",
    ),
    "a transcript in other words": (
        lambda t: {"prompt": f"Human: {asked(t)}\n\nAssistant:", "chosen": good(t), "rejected": bad(t)},
        "row 1: prompt: a chat template is already applied to the text (Human and Assistant)",
    ),
    "an answer that runs on": (
        lambda t: {"prompt": asked(t)}
        | {"response": f"{good(t)}<|im_end|>\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>x"},
        "row 1: response: a chat template is already applied to the text (ChatML)",
    ),
    "ranks that are missing": (
        lambda t: {"prompt": asked(t), "answers": [{"answer": good(t), "rank": 1.0}, {"answer": bad(t), "rank": None}]},
        "row 1: answers: answer 2 has no rank",
    ),
    "unknown columns": (
        lambda t: {"frage": asked(t), "antwort": good(t)},
        "row 1: missing column prompt (found: frage, antwort)",
    ),
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A project in which `leash import` does all but call DVC."""
    monkeypatch.setattr(importer, "dvc_add", lambda target, root: None)
    (tmp_path / "repo/.dvc").mkdir(parents=True)
    return tmp_path / "repo"


def write(path, rows):
    """JSON lines or CSV; what is no text is JSON in CSV."""
    if path.suffix == ".jsonl":
        write_jsonl(path, rows)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        table.writeheader()
        for row in rows:
            cells = {k: v if isinstance(v, str) else "" if v is None else json.dumps(v) for k, v in row.items()}
            table.writerow(cells)


BESIDE = [{"prompt": f"Tell me about number {number}.", "response": f"It is {number}."} for number in range(20)]


@pytest.fixture(params=["jsonl", "csv", "beside.jsonl"])
def source(request, tmp_path):
    """Writes the rows to a file, or to a folder with a file of demonstrations beside it."""

    def make(rows):
        folder = tmp_path / "source"
        path = folder / f"train.{request.param.removeprefix('beside.')}"
        write(path, rows)
        if "beside" in request.param:
            write_jsonl(folder / "more.jsonl", BESIDE)
            return folder
        return path

    return make


@pytest.mark.parametrize("name", READ)
def test_a_public_shape_is_read(place, source, params, name):
    make, before, answers = READ[name]
    target, _ = import_data(source([make(topic) for topic in TOPICS]), place)
    read = [
        e for e in files.read(FilesParams(path=target.name), place / "data/raw", lambda _: None) if "more" not in e.file
    ]
    turns = [[*before(topic), user(asked(topic))] for topic in TOPICS]
    flat = name == "Alpaca"
    assert [example.prompt for example in read] == (
        [[user(asked(t).replace("look ", "look\n"))] for t in TOPICS] if flat else turns
    )
    assert [tuple(example.answers) for example in read] == [tuple(one(topic) for one in answers) for topic in TOPICS]
    assert not any(example.broken or example.tie for example in read)
    prepared = prepare(params(files={"path": target.name}), place / "data/raw", log=lambda _: None)
    made = {name: list(rows) for name, rows in assemble(divide(prepared.kept, prepared.assignment, 1)).items()}
    imitated = {row["response"] for row in made["demonstrations"]}
    assert imitated
    assert imitated <= {good(topic) for topic in TOPICS} | {row["response"] for row in BESIDE}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(place, source, name):
    make, says = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        import_data(source([make(topic) for topic in TOPICS]), place)
    assert "\n" not in str(caught.value)
    assert not (place / "data").exists()


def kto(topic, **more):
    return [
        {"prompt": asked(topic), "completion": good(topic), "label": True, **more},
        {"prompt": asked(topic), "completion": bad(topic), "label": False, **more},
    ]


def stars(topic):
    return [
        {"prompt": asked(topic), "response": text, "stars": rate} for text, rate in ((good(topic), 5), (bad(topic), 2))
    ]


@pytest.mark.parametrize(
    ("make", "changes", "limit"),
    [
        (kto, {}, 0.5),
        (kto, {"rating_column": "label"}, 0.5),
        (lambda t: [row | {"label": int(row["label"])} for row in kto(t)], {"rating_column": "label"}, 0.5),
        (
            lambda t: [
                {"messages": [user(r["prompt"]), said(r["completion"])], "label": r["label"]} for r in kto(t)
            ], {}, 0.5,
        ),
        (lambda t: [row | {"label": "good" if row["label"] else "bad"} for row in kto(t)], {}, 0.5),
        (lambda t: [row | {"label": 1 if row["label"] else -1} for row in kto(t)], {}, 0.5),
        (lambda t: [{"kto_tag" if k == "label" else k: v for k, v in row.items()} for row in kto(t)], {}, 0.5),
        (stars, {"rating_column": "stars"}, 3.5),
        (stars, {"rating_column": "stars", "sft_rating_above": 4}, 4),
    ],
)  # fmt: skip
def test_bad_answers_are_ratings_and_not_imitated(place, source, params, make, changes, limit):
    printed = []
    target, _ = import_data(source([row for topic in TOPICS for row in make(topic)]), place)
    prepared = prepare(params(files={"path": target.name}, **changes), place / "data/raw", log=printed.append)
    column = changes.get("rating_column")
    made = {n: list(rows) for n, rows in assemble(divide(prepared.kept, prepared.assignment, 1, (), column)).items()}
    assert f"SFT imitates 20 rated answers, those above {limit:g} (ingest.sft_rating_above)" in printed
    assert not any(row["response"].startswith("No idea") for row in made["demonstrations"] + made["heldout"])
    assert len({row["rating"] for row in made["ratings"]}) == (2 if column else 0)


def test_all_rated_answers_are_imitated_where_the_limit_is_below_them(place, source, params):
    target, _ = import_data(source([row for topic in TOPICS for row in stars(topic)]), place)
    changes = {"rating_column": "stars", "sft_rating_above": 0}
    prepared = prepare(params(files={"path": target.name}, **changes), place / "data/raw", log=lambda _: None)
    assert not any(example.low for example in prepared.kept)


def test_a_label_of_several_classes_is_no_verdict(params, raw):
    rows = [{"prompt": asked(t), "response": good(t), "label": n % 3} for n, t in enumerate(TOPICS)]
    printed = []
    prepared = prepare(params(), raw(train=rows), log=printed.append)
    assert not any(example.low or example.rating is not None for example in prepared.kept)
    assert "data/raw/set/train.jsonl: label is not read as good or bad: 2 in row 3" in printed


def test_a_number_among_labels_in_words_is_refused(params, raw):
    rows = [{"prompt": asked(t), "response": good(t), "label": n % 2 == 0} for n, t in enumerate(TOPICS)]
    rows[2]["label"] = 2
    rows[3]["kto_tag"] = 3
    del rows[3]["label"]
    with pytest.raises(UserError, match="row 3: label: 2 does not say whether the answer is good, as others do"):
        prepare(params(), raw(train=rows))


def test_answers_that_are_all_bad_are_not_imitated_and_equal_ratings_are(params, raw):
    place = raw(train=[row for topic in TOPICS for row in kto(topic) if not row["label"]])
    with pytest.raises(UserError, match="answers rated too low to imitate"):
        prepare(params(), place)
    place = raw(train=[row | {"stars": 4} for topic in TOPICS for row in stars(topic)])
    assert not any(example.low for example in prepare(params(rating_column="stars"), place).kept)


def test_ties_count_for_agreement_only(place, source, params):
    rows = [
        {"prompt": asked(t), "response_1": good(t), "response_2": bad(t), "preference_strength": n % 2}
        for n, t in enumerate(TOPICS)
    ]
    target, _ = import_data(source(rows), place)
    prepared = prepare(params(files={"path": target.name}), place / "data/raw")
    assert len(prepared.ties) == 10
    assert {example.chosen for example in prepared.kept if example.kind == "pair"} == {
        bad(topic) for topic in TOPICS[1::2]
    }


def test_a_pair_both_ways_is_counted_and_named(place, source, capsys):
    rows = [
        {"prompt": asked(t), "chosen": a(t), "rejected": b(t)} for t in TOPICS for a, b in ((good, bad), (bad, good))
    ]
    import_data(source(rows), place)
    assert re.search(r"contradict.*20|20.*contradict", capsys.readouterr().out)


def test_numpy_arrays_that_pandas_wrote(place, tmp_path):
    """No commas between the messages, and quotation marks of both kinds in them."""
    text = "It's \"fine\".\n{'role': 'x'}"
    cells = numpy.empty(1, dtype=object)
    cells[0] = numpy.array([user("Tea?"), said(text)], dtype=object)
    pandas.DataFrame({"messages": cells}).to_csv(tmp_path / "train.csv")
    target, _ = import_data(tmp_path / "train.csv", place)
    (example,) = files.read(FilesParams(path=target.name), place / "data/raw")
    assert (example.prompt, example.response) == ([user("Tea?")], text)


def test_a_long_cell_is_a_bad_row(place, tmp_path, capsys):
    write(
        tmp_path / "train.csv",
        [{"prompt": asked(t), "response": good(t) * (9000 if t == "rain" else 1)} for t in TOPICS],
    )
    import_data(tmp_path / "train.csv", place)
    assert "too_long 1 (first: train.csv, row 3)" in capsys.readouterr().out


def test_spellings_of_one_prompt_are_one_prompt(place, params):
    """NFC and NFD: held out and in training they are a leak."""
    name = "data/raw/set"
    write_jsonl(place / name / "train.jsonl", [{"prompt": f"Cafe\u0301 {n}?", "response": "Yes."} for n in range(20)])
    write_jsonl(place / name / "test.jsonl", [{"prompt": f"Café {n}?"} for n in range(7)])
    with pytest.raises(UserError, match="leaked held-out prompts: 7 training rows"):
        prepare(params(), place / "data/raw")


@pytest.mark.parametrize(
    ("rows", "rewriting", "found"),
    [
        ([{"q": asked("tea"), "best": good("tea"), "worst": bad("tea"), "note": "x y"}],
         Rewriting(renamed(["prompt=q,chosen=best", "rejected=worst"]), frozenset({"note"})), (user(asked("tea")),
        *PAIR)), ([{"prompt": "An old one.", "question": asked("tea"), "response": good("tea")}],
         Rewriting(renamed(["prompt=question"])), (user(asked("tea")), good)),
        ([{"messages": [user(asked("tea")), said(good("tea"), tool_calls=[1], name="x")]}],
         Rewriting(ignored=frozenset({"tool_calls"})), (user(asked("tea")), good)),
        ([{"messages": [user(asked("tea")), said(good("tea"), reasoning_content="So.")]}],
         Rewriting(think=True), (user(asked("tea")), lambda t: f"<think>\nSo.\n</think>\n\n{good(t)}")),
        ([{"prompt": f"<|im_start|>user\n{asked('tea')}<|im_end|>\n<|im_start|>assistant\n", "chosen":
           f"{good('tea')}<|im_end|>", "rejected": f"{bad('tea')}<|im_end|>\n"}], Rewriting(parse_template=True),
        (user(asked("tea")), *PAIR)), ([{"text": f"<s>[INST] {asked('tea')} [/INST] {good('tea')} </s>"}],
         Rewriting(parse_template=True), (user(asked("tea")), good)),
        ([{"prompt": f"<bos><start_of_turn>user\n{asked('tea')}<end_of_turn>\n<start_of_turn>model\n", "response":
         good("tea")}], Rewriting(parse_template=True), (user(asked("tea")), good)),
        ([{"text": f"<|user|>\n{asked('tea')}<|end|>\n<|assistant|>\n{good('tea')}<|end|>\n<|endoftext|>"}],
         Rewriting(parse_template=True), (user(asked("tea")), good)),
    ],
)  # fmt: skip
def test_rows_are_changed_on_the_way(place, tmp_path, rows, rewriting, found):
    write_jsonl(tmp_path / "train.jsonl", rows)
    target, _ = import_data(tmp_path / "train.jsonl", place, rewriting=rewriting)
    (example,) = files.read(FilesParams(path=target.name), place / "data/raw")
    turn, *answers = found
    assert (example.prompt, example.answers) == ([turn], [answer("tea") for answer in answers])
    assert "note" not in example.extra


def test_values_that_json_cannot_hold_are_rewritten_too(place, tmp_path):
    row = {"q": "Tea?", "response": "Yes.", "score": float("nan"), "day": datetime.date(2026, 1, 2)}
    pandas.DataFrame([row]).to_parquet(tmp_path / "v1.2.parquet")
    target, _ = import_data(tmp_path / "v1.2.parquet", place, rewriting=Rewriting(renamed(["prompt=q"])))
    assert target.name == "v1.2.jsonl"
    assert read_jsonl(target) == [{"prompt": "Tea?", "response": "Yes.", "score": None, "day": "2026-01-02"}]
    (tmp_path / "half.jsonl").write_text('{"q": "x\\ud83d", "response": "y"}\n')
    with pytest.raises(UserError, match=r"half\.jsonl, row 1: a text that UTF-8 cannot hold"):
        import_data(tmp_path / "half.jsonl", place, rewriting=Rewriting(renamed(["prompt=q"])))


def test_renaming_leaves_other_files_alone(place, tmp_path):
    write_jsonl(tmp_path / "set/a.jsonl", [{"prompt": "Tea?", "persona": "A pirate.", "response": "Arr."}])
    write_jsonl(tmp_path / "set/b.jsonl", [{"prompt": "Rum?", "system": "A lawyer.", "response": "No."}])
    _, examples = import_data(tmp_path / "set", place, rewriting=Rewriting(renamed(["system=persona"])))
    assert [example.prompt[0] for example in examples] == [system("A pirate."), system("A lawyer.")]


def test_what_a_reader_must_know_is_said(place, tmp_path, capsys):
    rows = [
        {"prompt": asked(t), "chosen": f"{asked(t) * (n % 2)} {good(t)}", "rejected": bad(t)}
        | {"split": ("train", "test")[n % 2]}
        for n, t in enumerate(TOPICS)
    ]
    write_jsonl(tmp_path / "train.jsonl", rows)
    import_data(tmp_path / "train.jsonl", place)
    printed = capsys.readouterr().out
    assert "10 of 40 answers begin with their prompt, which is kept" in printed
    assert "all rows train, also those of another split" in printed
    for row in rows:
        del row["split"]
    write_jsonl(tmp_path / "hub/train/0.jsonl", rows[::2])
    write_jsonl(tmp_path / "hub/test/0.jsonl", rows[1::2])
    import_data(tmp_path / "hub", place)
    lines = [line for line in capsys.readouterr().out.splitlines() if "0.jsonl: " in line and "pairs" in line]
    assert ["of another split" in line for line in sorted(lines)] == [True, False]


def test_one_thought_is_written_once_and_for_the_assistant(place, tmp_path):
    parts = [{"type": "text", "text": "Yes."}]
    rows = [
        {"messages": [user("Tea?") | {"reasoning": "x"}, {"role": "assistant", "content": parts, "reasoning": "So."}]},
        {"messages": [user("Rum?"), said("No.", reasoning="So.", reasoning_content="So.")]},
        {"messages": [user("Rye?"), said("<think>So.</think>Oh.", reasoning="So.")]},
    ]
    write_jsonl(tmp_path / "train.jsonl", rows)
    _, examples = import_data(tmp_path / "train.jsonl", place, rewriting=Rewriting(think=True))
    said_ = [example.response for example in examples]
    assert said_ == ["<think>\nSo.\n</think>\n\nYes.", "<think>\nSo.\n</think>\n\nNo.", "<think>So.</think>Oh."]
    assert examples[0].prompt == [user("Tea?")]


def test_what_is_left_out_must_be_there(place, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "x"}])
    with pytest.raises(UserError, match=r"no column or key tools \(found: prompt\)"):
        import_data(tmp_path / "train.jsonl", place, rewriting=Rewriting(ignored=frozenset({"tools"})))


def test_openassistant_in_a_table(place, tmp_path):
    rows = [
        row
        for n, t in enumerate(TOPICS)
        for row in (
            {"message_id": f"p{n}", "parent_id": None, "role": "prompter", "text": asked(t), "rank": None},
            {"message_id": f"a{n}", "parent_id": f"p{n}", "role": "assistant", "text": bad(t), "rank": 1.0},
            {"message_id": f"b{n}", "parent_id": f"p{n}", "role": "assistant", "text": good(t), "rank": 0.0},
        )
    ]
    write(tmp_path / "oasst.csv", rows)
    _, examples = import_data(tmp_path / "oasst.csv", place)
    assert [example.answers for example in examples] == [[good(t), bad(t)] for t in TOPICS]


def test_llama_2_has_its_system_message_in_the_first_turn(place, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nTea? [/INST] Green. </s>"}])
    target, _ = import_data(tmp_path / "a.jsonl", place, rewriting=Rewriting(parse_template=True))
    assert read_jsonl(target) == [{"messages": [system("Be brief."), user("Tea?"), said("Green.")]}]


@pytest.mark.parametrize("text", ["<s>old</s>", "What is <|im_start|> for?", "Write </s> or [INST].", "a <b>c</b>"])
def test_a_text_about_control_tokens_is_a_text(examples, text):
    (example,) = examples([{"prompt": text, "response": "Yes."}])
    assert example.prompt == [user(text)]


def test_columns_that_cannot_be_renamed(place, tmp_path):
    for wrong in (["prompt"], ["=a"], ["a=b,a=c"], ["a=b,c=b"]):
        with pytest.raises(UserError, match="expected NEW=OLD"):
            renamed(wrong)
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "x"}])
    with pytest.raises(UserError, match=r"train\.jsonl: no column or key body \(found: prompt\)"):
        import_data(tmp_path / "train.jsonl", place, rewriting=Rewriting(renamed(["prompt=body"])))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.columns)
def test_every_row_of_the_guides_table_is_read_as_it_says(examples, shape):
    found = examples([dict(shape.example)])
    assert not any(example.broken for example in found)
    assert shape.becomes.removeprefix("a ").startswith(
        {"demonstration": "demonstration", "pair": "pair"}.get(found[0].kind, "prompt")
    )


def test_the_guide_has_the_table_of_shapes():
    made = runpy.run_path(str(ROOT / "docs/make_shapes.py"))
    assert (ROOT / "docs/how-to/own-data.md").read_text(encoding="utf-8") == made["page"]()


KNOWN_REFUSALS = {
    "05a": "tool_calls",
    "05c": "tool_calls",
    "06a": "reasoning_content",
    "09": "ChatML",
    "27": "bad_conversation",
}


@pytest.mark.skipif(not CASES.is_dir(), reason="the files of public bug reports are not beside this checkout")
@pytest.mark.parametrize("path", sorted(CASES.glob("[0-9]*")), ids=lambda path: path.name)
def test_files_of_public_bug_reports(place, params, path):
    refused = next((says for name, says in KNOWN_REFUSALS.items() if path.name.startswith(name)), None)
    if refused is not None:
        with pytest.raises(UserError, match=refused):
            import_data(path, place)
        return
    target, _ = import_data(path, place)
    assert prepare(params(files={"path": target.name}), place / "data/raw").kept
