"""The row shapes of preference data, read from their columns and normalised to `Example`. The table of the guide is
made from `SHAPES`. A file has one shape, fixed by its first row."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from functools import lru_cache
from typing import Any, NoReturn

from rlhf_core.data.chat import Conversation
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import LONE_SURROGATE, Row, brief, brief_names
from tasks.datasets.problems import Log, Problems, refuse
from tasks.datasets.sources import dialogues, exports, verdicts
from tasks.datasets.sources.dialogues import BrokenConversation, ShapeError, carries
from tasks.datasets.sources.example import Example
from tasks.datasets.sources.exports import PROMPTS
from tasks.datasets.sources.templates import refuse_applied

SYSTEMS = ("system", "system_prompt", "system_message")
INPUTS = ("input", "context")
RESPONSES = ("response", "completion", "output", "answer")
TURNS = ("messages", "conversations", "conversation")
RANKED = ("answers", "responses", "completions")
LABELS = ("label", "kto_tag")
TEXT, HISTORY = "text", "history"
ENDED = ("chosen_ended", "rejected_ended")
LABEL_COLUMNS = ("annotator", "time", "order", "tie", "task", *ENDED)
"""Columns that a pair may have: who labelled it, when, the places (from 1) at which chosen and rejected were shown,
whether neither is better, the task that it is a part of, and whether each answer ended."""
CONTENT = frozenset((*PROMPTS, *SYSTEMS, *INPUTS, *RESPONSES, *TURNS, *RANKED, TEXT, HISTORY, "chosen", "rejected"))
"""Names that a reader takes for a prompt, its context or an answer."""
REFERENCES = ("solution", "ground", "reference", "expected", "correct", "gold", "target")
"""Beginnings of the names of what reward functions compare an answer with; `answer` is another one."""
CONTEXT_WORDS = frozenset((
    "history", "previous", "turn", "system", "sys", "persona", "preamble", "passage", "document", "article",
    "background", "knowledge", "reasoning", "thinking", "thought", "cot", "rationale", "trajectory", "scratchpad",
))  # fmt: skip
"""Words in names of columns that hold what was said before, or thoughts."""
ANSWER_WORDS = frozenset((
    "response", "completion", "answer", "reply", "output", "generation", "summary", "candidate", "attempt", "assistant",
    "option", "story", "chosen", "rejected", "preferred", "dispreferred", "winner", "loser", "win", "lose", "better",
    "worse", "positive", "negative", "good", "bad", "instance", "gpt",
))  # fmt: skip
VERDICT_WORDS = frozenset(("winner", "vote", "verdict", "preferred", "chosen", "rejected", *LABELS))
"""Names of columns that say which answer is good."""


@dataclass(frozen=True, eq=False)
class Shape:
    """A kind of rows: a line of the guide's table."""

    columns: str
    becomes: str
    example: Mapping[str, Any]
    """A row of this shape; a test imports it."""


_ASKED, _ANSWERED = {"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Green tea."}
_PAIR = {"chosen": "Green tea.", "rejected": "No."}
PAIR = Shape("`prompt`, `chosen`, `rejected`", "pair", {"prompt": "Tea?", **_PAIR})
WHOLE_PAIR = Shape(
    "`chosen`, `rejected` as whole conversations, with or without `prompt`",
    "pair; what the conversations share at the beginning is the prompt",
    {"chosen": [_ASKED, _ANSWERED], "rejected": [_ASKED, _ANSWERED | {"content": "No."}]},
)
TURNS_PAIR = Shape(
    "`conversations`, `chosen`, `rejected` (ShareGPT)",
    "pair; the conversation is the prompt",
    {"conversations": [{"from": "human", "value": "Tea?"}], "chosen": {"from": "gpt", "value": "Green tea."}}
    | {"rejected": {"from": "gpt", "value": "No."}},
)
VOTED = Shape(
    "`prompt`, two answers such as `response_a`, `response_b`, and one column that says which is better",
    "pair; a tie counts for agreement only",
    {"question": "Tea?", "answer_a": "Green tea.", "answer_b": "No.", "winner": "answer_a"},
)
RANKING = Shape(
    "`prompt`, `answers` as a list of objects with a text and a `rank`",
    "a pair for every two answers; the smaller rank is better",
    {"prompt": "Tea?", "answers": [{"answer": "Green tea.", "rank": 1}, {"answer": "No.", "rank": 2}]},
)
DEMONSTRATION = Shape(
    "`prompt`, `response` (or `completion`, `output`; with `question`, `instruction` or `query` also `answer`)",
    "demonstration",
    {"prompt": "Tea?", "response": "Green tea."},
)
RATED = Shape(
    "the same with `label`: true or false, 1 or 0 (KTO)",
    "demonstration where the label is true; both are [ratings](#ratings) for the reward model",
    {"prompt": "Tea?", "completion": "No.", "label": False},
)
ALPACA = Shape(
    "`instruction`, `input`, `output` (Alpaca), `instruction`, `context`, `response`, or `input`, `output`",
    "demonstration; instruction and input are the prompt",
    {"instruction": "Translate.", "input": "Tee", "output": "Tea"},
)
CONVERSATION = Shape(
    "`messages` (or `conversations`, `conversation`)",
    "demonstration; the last turn, the assistant's, is the answer",
    {"messages": [_ASKED, _ANSWERED]},
)
PROMPT = Shape("`prompt`", "prompt", {"prompt": "Tea?"})
WHOLE_TEXT = Shape(
    "`text`, and no prompt",
    "demonstration: the first words are the prompt ([texts](#continue-texts))",
    {"text": "Tea is hot."},
)
SHAPES = (
    PAIR, WHOLE_PAIR, TURNS_PAIR, VOTED, RANKING, DEMONSTRATION, RATED, ALPACA, CONVERSATION, PROMPT, WHOLE_TEXT,
)  # fmt: skip
EXPECTED = "prompt + chosen + rejected, prompt + response, messages, prompt + two answers + winner, prompt, or text"
RENAME = "other names: `leash import --map prompt=COLUMN,response=COLUMN` (or chosen=, rejected=, winner=)"
IGNORE = "`leash import --ignore NAME`"

TRUTHS = dict.fromkeys(("true", "1", "1.0", "yes", "good", "desirable", "accepted"), 1.0) | dict.fromkeys(
    ("false", "0", "0.0", "-1", "-1.0", "no", "bad", "undesirable", "rejected"), 0.0
)
"""Values of `label` that say whether an answer is good."""
SAMPLED = 10_000
"""Rows of a file after which no answer is expected to begin with its prompt, if none did."""
SPEAKERS = ("user", "assistant")
Answers = tuple[Conversation, str | None, str | None, str | None]
"""Prompt, response, chosen, rejected."""


@dataclass(frozen=True)
class Layout:
    """Which columns of a row have which role. Roles that the row lacks are empty."""

    shape: Shape
    prompt: str = ""
    response: str = ""
    turns: str = ""
    system: str = ""
    input: str = ""
    history: str = ""
    answers: tuple[str, ...] = ()
    label: str = ""
    further: tuple[str, ...] = ()
    """All others: they are kept for reward functions."""
    suspects: tuple[str, ...] = ()
    """Further columns with names of content, which each row must not have."""

    @property
    def is_pair(self) -> bool:
        """Whether chosen and rejected are columns."""
        return self.shape in (PAIR, WHOLE_PAIR, TURNS_PAIR)

    @property
    def read(self) -> list[str]:
        """The columns that are read, in a fixed order."""
        first = (self.system, self.prompt, self.input, self.history, self.turns, self.response)
        pair = ("chosen", "rejected") if self.is_pair else ()
        return [name for name in (*first, *self.answers, self.label, *pair) if name]


@lru_cache(maxsize=1024)
def layout_of(columns: tuple[str, ...]) -> Layout:
    """The roles of the columns of a row. Raises ShapeError for columns that make no row, or two."""
    found = set(columns)

    def first(names: Iterable[str]) -> str:
        return next((name for name in names if name in found), "")

    prompt, turns, system = first(PROMPTS), first(TURNS), first(SYSTEMS)
    if not prompt and "input" in found and found & {"output", "chosen", "response"}:
        prompt = "input"
    answers = tuple(verdicts.answers_of(columns))
    one = found & {"chosen", "rejected"}
    response = first(RESPONSES if prompt != "prompt" else RESPONSES[:-1])
    if answers and (len(one) == 2 or response or (turns and not answers[0].startswith(TURNS[-1]))):
        other = ", ".join(sorted(one)) if len(one) == 2 else response or turns
        raise ShapeError(f"{_names(answers)} and {other}: several answers in two ways; {IGNORE} leaves columns out")
    if one and not answers:
        if len(one) == 1:
            missing = next(iter({"chosen", "rejected"} - one))
            raise ShapeError(f"missing column {missing} (found: {_names(columns)}); {RENAME}")
        shape = PAIR if prompt else TURNS_PAIR if turns else WHOLE_PAIR
        layout = Layout(shape, prompt, turns=turns if shape is TURNS_PAIR else "")
    elif turns and not answers:
        layout = Layout(CONVERSATION, turns=turns)
    elif not prompt and answers and answers[0].startswith(TURNS[-1]):
        layout = Layout(VOTED, answers=answers)
    elif not prompt:
        if TEXT not in found:
            raise ShapeError(f"missing column prompt (found: {_names(columns)}); expected {EXPECTED}; {RENAME}")
        layout = Layout(WHOLE_TEXT, prompt=TEXT)
    elif {"response", "completion"} <= found:
        raise ShapeError("both response and completion; keep one of them")
    elif response:
        layout = Layout(DEMONSTRATION, prompt, response)
    elif answers:
        layout = Layout(VOTED, prompt, answers=answers)
    elif ranked := first(RANKED):
        layout = Layout(RANKING, prompt, answers=(ranked,))
    else:
        layout = Layout(PROMPT, prompt)
    changes: dict[str, Any] = {}
    if layout.shape is not WHOLE_TEXT:
        changes = {"system": system, "history": first([HISTORY])}
    if prompt == "instruction" and (inputs := first(INPUTS)):
        changes["input"] = inputs
    if layout.shape in (DEMONSTRATION, CONVERSATION):
        changes["label"] = first(LABELS)
    layout = replace(layout, **changes)
    of_label: tuple[str, ...] = LABEL_COLUMNS[:1] if layout.shape is VOTED else ()
    if layout.is_pair:  # without annotators `task` and `time` are not of a label
        of_label = LABEL_COLUMNS if "annotator" in columns else ("annotator", "tie", *ENDED)
    known = {*layout.read, *of_label} - {layout.label}
    further = tuple(name for name in columns if name not in known)
    return replace(layout, further=further, suspects=_suspects(layout, further))


def _suspects(layout: Layout, further: Iterable[str]) -> tuple[str, ...]:
    """Further columns that may carry content that the shape does not read, by the words in their names."""
    words = CONTEXT_WORDS if layout.is_pair or layout.shape in (VOTED, RANKING) else CONTEXT_WORDS | ANSWER_WORDS
    if layout.shape is WHOLE_TEXT:
        words = ANSWER_WORDS
    return tuple(
        name
        for name in further
        if name != "answer"
        and not (name in LABELS and layout.shape is not PROMPT)
        and not name.startswith(REFERENCES)
        and (name in CONTENT or name in dialogues.CARRIERS or name in VERDICT_WORDS or words & _words(name))
    )


def _words(name: str) -> set[str]:
    """The words in the name of a column, without a plural."""
    parts = re.findall(r"[a-z]+", f"{name} {re.sub('(?<=[a-z])(?=[A-Z])', '_', name)}".lower())
    return {singular for part in parts for singular in (part, part.removesuffix("s"), part.removesuffix("ies") + "y")}


def read_columns(types: Mapping[str, str]) -> list[str]:
    """The columns to read of a table, given the name of the Arrow type of each column: all but further ones with
    bytes."""
    return [name for name, kind in types.items() if name in CONTENT | dialogues.CARRIERS or "binary" not in kind]


def normalise(
    rows: Iterable[tuple[int, Row]], file: str, *, heldout: bool, on_bad: Log = refuse, mixed: bool = False
) -> Iterator[Example]:
    """The examples of a file's numbered rows. For a row that cannot be read, `on_bad` is called with one line of text,
    and the next row follows. `mixed`: rows may have different shapes.

    Raises UserError naming file and row for a first row of no known shape, and for the first row that cannot be read
    unless `on_bad` is given.
    """
    start: tuple[int, Layout, tuple[str, ...]] | None = None
    for number, row in rows:
        where = f"{file}, row {number}"
        try:
            layout = layout_of(tuple(row))
            if start is None:
                verdict = verdicts.verdict_columns(tuple(row), row, layout.answers) if layout.shape is VOTED else ()
                start = (number, layout, verdict)
            elif layout.shape is not start[1].shape and not mixed:
                _refuse_mixed(layout, *start[:2])
            yield from _examples(row, layout, start[2], file, number, heldout)
        except ShapeError as error:
            if start is None:
                raise UserError(f"{where}: {error}") from None
            on_bad(f"{where}: {error}")


def read_all(
    rows: Iterable[tuple[int, Row]], file: str, place: str, problems: Problems, *, heldout: bool, log: Log = print
) -> list[Example]:
    """The examples of the file at `place`, called `file`; exports of annotation tools, too. What is wrong with it or
    its rows is added to `problems`; `log` prints what was changed or left out of it."""
    before = problems.count
    examples: list[Example] = []
    try:
        unpacked = exports.unpack(rows, file, problems, log)
        for example in normalise(unpacked.rows, file, heldout=heldout, on_bad=problems.add, mixed=unpacked.is_export):
            examples.append(example)
    except UserError as error:
        problems.add(str(error))
    if not examples and problems.count == before:
        problems.add(f"{place}: no rows; fill the file or remove it")
    _drop_classes(examples, file, problems, log)
    repeated, answers = strip_repeated_prompts(examples)
    if repeated:
        done = "which was removed from them" if repeated == answers else "which is kept, because the others do not"
        log(f"{file}: {repeated:,} of {answers:,} answers begin with their prompt, {done}")
    return examples


def _drop_classes(examples: list[Example], file: str, problems: Problems, log: Log) -> None:
    """Labels among which are other numbers than those of `TRUTHS` are classes and no ratings. Where other rows say it
    in words, such a number is a problem of its row."""
    rated = [example for example in examples if example.rating is not None]
    others = [e for e in examples if e.rating is None and not {*LABELS}.isdisjoint(e.extra)]
    if not rated or not others:
        return
    in_numbers = all(verdicts.is_number(value) for e in rated for _, value in _labels(e))
    if in_numbers:
        for example in rated:
            example.rating = None
    for one in others:
        [(name, value), *_] = _labels(one)
        if in_numbers:
            log(f"{file}: {name} is not read as good or bad: {brief(value)} in row {one.row}")
            return
        problems.add(
            f"{file}, row {one.row}: {name}: {brief(value)} does not say whether the answer is good, as others do"
        )


def _labels(example: Example) -> list[tuple[str, Any]]:
    return [(name, example.extra[name]) for name in LABELS if name in example.extra]


def strip_repeated_prompts(examples: list[Example]) -> tuple[int, int]:
    """How many answers begin with their prompt, of how many; if all do, it is removed from them."""
    repeated, count = 0, sum(len(example.answers) for example in examples)
    for number, example in enumerate(examples):
        turns = example.prompt if example.answers else []
        if turns and not example.is_text and len(head := turns[-1]["content"].strip()) > 5:
            repeated += sum(text.lstrip().startswith(head) and text.strip() != head for text in example.answers)
        if number == SAMPLED and not repeated:
            break
    for example in examples if repeated and repeated == count else ():
        length = len(example.prompt[-1]["content"].strip())
        for name in ("response", "chosen", "rejected"):
            if (answer := getattr(example, name)) is not None:
                setattr(example, name, answer.lstrip()[length:].lstrip())
    return repeated, count


def _examples(
    row: Row, layout: Layout, verdict: tuple[str, ...], file: str, number: int, heldout: bool
) -> Iterator[Example]:
    """The examples of one row: one, or one for every two ranked answers."""
    extra = _further(row, [name for name in layout.further if name not in verdict] if verdict else layout.further)

    def example(answers: Answers, broken: str = "", **label: Any) -> Example:
        return Example(
            file, number, heldout, *answers, broken=broken, extra=extra, is_text=layout.shape is WHOLE_TEXT, **label
        )

    try:
        if layout.shape in (VOTED, RANKING):
            read = _voted(row, layout, verdict) if layout.shape is VOTED else _ranked(row, layout)
            for answers, tie in read:
                _refuse_content(row, layout, answers, verdict)
                yield example(answers, _problem(answers), tie=tie, annotator=_annotator_of(row))
            return
        answers = _answers(row, layout)
    except BrokenConversation as error:
        nothing = ("", "") if layout.is_pair or layout.shape in (VOTED, RANKING) else (None, None)
        yield example(([], "" if layout.shape in (DEMONSTRATION, CONVERSATION) else None, *nothing), str(error))
        return
    _refuse_content(row, layout, answers)
    label: dict[str, Any] = {}
    if layout.is_pair:
        label = dict(zip(("annotator", "tie", "ended"), _label(row), strict=True))
    elif layout.label:
        label = {"rating": _truth(row[layout.label], layout.label)}
    yield example(answers, _problem(answers), **label)


def _problem(answers: Answers) -> str:
    """Why an answer cannot follow the prompt; empty where it can."""
    prompt = answers[0]
    return "" if not prompt or dialogues.is_prompt(prompt) else f"the prompt ends with a turn of {prompt[-1]['role']}"


def _answers(row: Row, layout: Layout) -> Answers:
    if layout.shape is WHOLE_TEXT:
        if not isinstance(row[TEXT], str | None):
            raise ShapeError(f"{TEXT}: expected text, got {type(row[TEXT]).__name__}")
        if dialogues.messages_in(row[TEXT] or "") is not None:
            raise ShapeError(f"{TEXT}: is a conversation; `leash import --map messages={TEXT}` reads it")
        return [dialogues.message("user", row[TEXT] or "")], None, None, None
    whole = layout.shape in (WHOLE_PAIR, CONVERSATION)
    names = ("chosen", "rejected") if layout.is_pair else (layout.turns if whole else layout.response,)
    before = layout.turns or layout.prompt
    prompt = [] if whole else _in_context(row, layout, _turns(row[before], before))
    read = []
    for name in filter(None, names):
        value = row[name]
        if whole and not (isinstance(value, list | dict) or dialogues.is_transcript(value)):
            refuse_applied(value if isinstance(value, str) else "", name)
            if not isinstance(value, str) or dialogues.messages_in(value) is None:
                problem = f"{name}: expected a list of messages, got {type(value).__name__}"
                is_pair = layout.is_pair
                raise ShapeError(f"missing column prompt ({name} is no whole conversation)" if is_pair else problem)
        read.append(_reply(row, layout, name, prompt))
    if len(read) == 2 and read[0][0] != read[1][0]:
        raise BrokenConversation("chosen and rejected differ before their last turns")
    prompt = read[0][0] if read else prompt
    prompt = _in_context(row, layout, prompt) if whole else prompt
    if layout.is_pair:
        return prompt, None, read[0][1], read[1][1]
    return prompt, read[0][1] if read else None, None, None


def _in_context(row: Row, layout: Layout, prompt: Conversation) -> Conversation:
    """The prompt with what other columns have of it: input, earlier turns, a system message."""
    if not (layout.input or layout.history or layout.system):
        return prompt
    if layout.input and (more := row[layout.input]):
        if not isinstance(more, str) or not prompt:
            raise ShapeError(f"{layout.input}: expected text behind a prompt, got {type(more).__name__}")
        prompt = (
            [*prompt[:-1], dialogues.message("user", f"{prompt[-1]['content']}\n{more}")] if more.strip() else prompt
        )
    if layout.history and (history := row[HISTORY]):
        earlier = _history(history)
        prompt = prompt if prompt[: len(earlier)] == earlier else earlier + prompt
    if layout.system and (system := row[layout.system]):
        if not isinstance(system, str):
            raise ShapeError(f"{layout.system}: expected text, got {type(system).__name__}")
        turn = dialogues.message("system", system)
        if prompt and prompt[0]["role"] == "system" and prompt[0] != turn:
            raise ShapeError(f"{layout.system}: the prompt has another system message; keep one of them")
        prompt = prompt if prompt and prompt[0] == turn else [turn, *prompt] if system.strip() else prompt
    return prompt


def _history(value: object) -> Conversation:
    """Earlier turns: a list of [question, answer], or messages; also as JSON text."""
    value = dialogues.loaded(value)
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        return _turns(value, HISTORY)
    if not isinstance(value, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in value):
        raise ShapeError(f"{HISTORY}: expected a list of [question, answer], or of messages")
    if not all(isinstance(text, str) for turn in value for text in turn):
        raise ShapeError(f"{HISTORY}: a question or an answer is not text")
    return [dialogues.message(role, text) for turn in value for role, text in zip(SPEAKERS, turn, strict=True)]


def _voted(row: Row, layout: Layout, verdict: tuple[str, ...]) -> Iterator[tuple[Answers, bool]]:
    """Every two of the answers, the better one first."""
    ranks = verdicts.read_verdict(row, verdict, layout.answers)
    prompts, texts = zip(*(_answer_in(row, layout, name) for name in layout.answers), strict=True)
    for best, worst, tie in verdicts.pairs_of(texts, ranks):
        if prompts[best] != prompts[worst]:
            raise BrokenConversation("the answers differ before their last turns")
        yield (prompts[best], None, texts[best], texts[worst]), tie


def _answer_in(row: Row, layout: Layout, name: str) -> tuple[Conversation, str]:
    """Prompt and answer. LMSYS writes both as JSON lists of texts, one for each turn, or as whole conversations."""
    if not layout.prompt:
        head, reply = dialogues.split_reply(_turns(row[name], name))
        return _in_context(row, layout, head), reply
    asked, said = (_texts(row[column]) for column in (layout.prompt, name))
    if asked is None or said is None:
        return _reply(row, layout, name, _in_context(row, layout, _turns(row[layout.prompt], layout.prompt)))
    if len(asked) != len(said):
        raise BrokenConversation(f"{name} has another number of turns than {layout.prompt}")
    both = zip(asked, said, strict=True)
    turns = [dialogues.message(role, text) for turn in both for role, text in zip(SPEAKERS, turn, strict=True)]
    return _in_context(row, layout, turns[:-1]), said[-1]


def _texts(value: object) -> list[str] | None:
    """A list of texts, also as JSON text; None for anything else."""
    value = dialogues.loaded(value)
    if not isinstance(value, list) or not value or not all(isinstance(text, str | None) for text in value):
        return None
    return [text or "" for text in value]


def _ranked(row: Row, layout: Layout) -> Iterator[tuple[Answers, bool]]:
    """Every two of the ranked answers, the better one first."""
    name = layout.answers[0]
    items = dialogues.loaded(row[name])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ShapeError(f"{name}: has several answers and no verdict; expected objects with a text and a rank")
    texts, ranks = [], []
    for number, item in enumerate(items, start=1):
        text = next((item[key] for key in (*RESPONSES, TEXT, "content") if isinstance(item.get(key), str)), None)
        rank = item.get("rank")
        if text is None or isinstance(rank, bool) or not isinstance(rank, int | float) or math.isnan(rank):
            raise ShapeError(
                f"{name}: answer {number} has {'no text' if text is None else 'no rank'} ({brief_names(item)})"
            )
        texts.append(text)
        ranks.append(rank)
    if len(texts) < 2:
        raise BrokenConversation(f"{name} has {len(texts)} answers, nothing to compare")
    prompt = _in_context(row, layout, _turns(row[layout.prompt], layout.prompt))
    strip = dialogues.is_transcript(row[layout.prompt])
    for best, worst, tie in verdicts.pairs_of(texts, ranks):
        answers = [texts[place].strip() if strip else texts[place] for place in (best, worst)]
        yield (prompt, None, *answers), tie


def _refuse_content(row: Row, layout: Layout, answers: Answers, verdict: tuple[str, ...] = ()) -> None:
    """Raise ShapeError for a text that a chat template was applied to, and for a further column whose name and value
    are those of content, unless what it says was read."""
    prompt, *texts = answers
    for turn in prompt:
        refuse_applied(turn["content"], layout.turns or layout.prompt or "chosen")
    for name, text in zip((layout.response or layout.turns, "chosen", "rejected"), texts, strict=True):
        refuse_applied(text or "", name)
    for name in layout.suspects:
        value = row.get(name)
        if value is None or value == "" or value == [] or name in verdict or (layout.is_pair and name in VERDICT_WORDS):
            continue
        said = [*(turn["content"] for turn in prompt), *(text for text in texts if text)]
        if name in VERDICT_WORDS:
            said = []
        elif name in (*INPUTS, HISTORY, *TURNS):
            said = [turn["content"] for turn in prompt]
        elif name == TEXT and layout.shape is not PROMPT:  # it repeats the columns around other words
            if all(text.strip() in str(value) for column in layout.read for text in _leaves(row[column])):
                continue
        elif not (name in CONTENT or name in dialogues.CARRIERS or carries(value)):
            continue
        if not _is_read(value, name, said):
            raise ShapeError(
                f"has {_names(layout.read)} and {name}, which is not read beside them; {IGNORE.replace('NAME', name)} "
                f"leaves it out, --map gives it the name of what it is (such as response={name}), or any other name"
            )


def _is_read(value: object, name: str, read: list[str]) -> bool:
    """Whether all texts in a value are among the texts that were read; of a conversation, the user's texts."""
    if name in TURNS:
        try:
            said = [turn["content"] for turn in dialogues.parse_conversation(value) if turn["role"] != "assistant"]
        except ShapeError:
            return False
    else:
        said = list(_leaves(value))
    return all(any(text.strip() in other for other in read) for text in said)


def _leaves(value: object) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    elif value is not None:
        yield str(value)


def _turns(value: object, name: str) -> Conversation:
    """A column with a conversation."""
    try:
        return dialogues.parse_conversation(value)
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None


def _reply(row: Row, layout: Layout, name: str, prompt: Conversation) -> tuple[Conversation, str]:
    """A column with an answer, and the prompt, which a whole conversation may make longer."""
    try:
        value, asked = row[name], row.get(layout.prompt)
        if isinstance(value, str) and _texts(asked):  # each cell is a list of one text; else an answer may be a list
            value = dialogues.unlisted(value)
        return dialogues.parse_reply(value, prompt, strip=dialogues.is_transcript(asked))
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None
    except BrokenConversation as error:
        raise BrokenConversation(f"{name}: {error}") from None


def _label(row: Row) -> tuple[str | None, bool, tuple[bool, bool] | None]:
    """The annotator of a pair, whether it is a tie, and whether chosen and rejected ended (None: not known). Raises
    ShapeError for a column of another type."""
    annotator, tie = row.get("annotator"), row.get("tie")
    annotator = str(annotator) if type(annotator) is int else annotator
    if annotator is not None and not (isinstance(annotator, str) and annotator.strip() and annotator.isprintable()):
        raise ShapeError(f"annotator: expected a name, got {brief(annotator)}")
    for name in ("tie", *ENDED):
        if not isinstance(row.get(name), bool | None):
            raise ShapeError(f"{name}: expected true or false, got {brief(row[name])}")
    if annotator is not None:
        for name in ("time", "task"):
            if not isinstance(row.get(name), str | None):
                raise ShapeError(f"{name}: expected text, got {brief(row[name])}")
        if row.get("order") is not None and not _is_order(row["order"]):
            raise ShapeError(f"order: expected two different places from 1, got {brief(row['order'])}")
    chosen, rejected = (row.get(name) for name in ENDED)
    ended = None if chosen is None and rejected is None else (chosen is not False, rejected is not False)
    return annotator.strip() if annotator else None, bool(tie), ended


def _is_order(value: object) -> bool:
    places = value if isinstance(value, list) and len(value) == 2 and value[0] != value[1] else [0]
    return all(isinstance(place, int) and not isinstance(place, bool) and place > 0 for place in places)


def _annotator_of(row: Row) -> str | None:
    """The annotator of a row with a vote, whose id may be a number."""
    value = row.get("annotator")
    return None if value is None or not str(value).strip() else str(value).strip()


def _truth(value: object, name: str) -> float | None:
    """A label that is true or false as 1 or 0; None for null, and for another number, which is a further column. Raises
    ShapeError for any other value."""
    found = TRUTHS.get(str(value).strip().casefold())
    if found is None and value is not None and not verdicts.is_number(value):
        raise ShapeError(
            f"{name}: {brief(value)} does not say whether the answer is good; expected true or false, or a number; "
            f"`leash import --map class={name}` makes it another column, --ignore {name} leaves it out"
        )
    return found


def _further(row: Row, names: Iterable[str]) -> dict[str, Any]:
    """The further columns, without those whose value is null or cannot be written as JSON. Of Parquet, decimal
    numbers are written as numbers, and dates and timestamps as text, where they are not in lists or objects."""
    found = {name: _plain(row[name]) for name in names if row[name] is not None}
    try:
        return {name: value for name, value in found.items() if _is_json({name: value})}
    except RecursionError:  # nested too deeply
        return {}


def _plain(value: object) -> object:
    return float(value) if isinstance(value, Decimal) else str(value) if isinstance(value, date) else value


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(key) and _is_json(part) for key, part in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, str):
        return not LONE_SURROGATE.search(value)
    return value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def _refuse_mixed(layout: Layout, first_row: int, first: Layout) -> NoReturn:
    missing = [name for name in first.read if name not in layout.read]
    extra = [name for name in layout.read if name not in first.read]
    problem = f"missing column {missing[0]}" if missing else f"column {extra[0]} is missing in row {first_row}"
    raise ShapeError(
        f"{problem} (row {first_row} has {', '.join(first.read)}); rows of another shape need a file of their own"
    )


def _names(columns: Iterable[str]) -> str:
    return brief_names(map(str, columns)) or "nothing"
