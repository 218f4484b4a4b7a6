"""The hidden rubric of the demo world: a score for any answer to any prompt, which simulates the annotators'
preference.

It contains the demo world's language and some everyday words; other words count as garbled. Every part but `options`
and `reason` is a penalty, and each part counts once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from rlhf_core.demo.phrases import sample_answers
from rlhf_core.demo.scanner import Symbol, words, world_scanner
from rlhf_core.demo.topics import DOMAIN_OF, NEEDS
from rlhf_core.demo.world import Question, parse

HIGHEST, LOWEST, EMPTY = 6.0, -2.9, -3.0

OPTION, MAX_OPTIONS, TOLERATED_OPTIONS = 1.1, 3, 4
REASON, LONE_REASON, WRONG_REASON = 1.7, 0.4, -0.5
DISMISSIVE, MORE_DISMISSIVE = -2.0, -0.5
FILLER, LONG_WORD, LENGTH_LIMIT = -0.6, -0.06, 36  # the limit in words
REPEATED_PHRASE, REPEATED_TRIGRAM = -0.7, -0.2
OFF_TOPIC, UNSUITABLE, SURPLUS = -0.8, -0.8, -0.6
UNKNOWN_WORD, ODD_PAIR = -0.3, -0.25
NO_END, NO_CAPITAL = -1.0, -0.3

_END_MARKS = frozenset(".!?")
_MARKS = frozenset(".,!?;:'\"()-")
_NEGATIONS = frozenset(words("not never avoid no skip without don't cannot can't nor"))
# An option counts only in a sentence that says something about it.
_VERBS = frozenset(
    words(
        "try are is include consider choose pick like suggest recommend use start work works help helps have enjoy "
        "take eat make buy do go get"
    )
)
_EVERYDAY = frozenset(
    words(
        "a about after all also always an and any as at be because been before best better but by can consider could "
        "day each easily enjoy every few fine for from get gets give go good great has have healthy help helps here "
        "how i if in into is it its keep kind less like likes make makes many may maybe might more most much my nice "
        "not now of often on one only or other our out over perhaps pick please plus really recommend right simple "
        "since so some sometimes start such take than that the their them then there these they this those three time "
        "to too two up use useful very was way ways we well what when which while will with without work works would "
        "yes you your"
    )
)
_START = Symbol("mark", "start")


def gold_score(prompt: str, response: str) -> float:
    """The quality of an answer, from -3 (empty) to about 5 (three right options and a fitting reason, nothing else).

    Defined for every text. The sum of `explain`, clamped to [-2.9, 6]; only an empty answer gets -3.
    """
    parts = explain(prompt, response)
    if "empty" in parts:
        return EMPTY
    return round(min(HIGHEST, max(LOWEST, sum(parts.values()))), 6)


def explain(prompt: str, response: str) -> dict[str, float]:
    """The parts of the score before it is clamped: `options` and `reason` (gains), all others penalties (at most 0)."""
    symbols = world_scanner().scan(response)
    if not any(symbol.kind != "mark" for symbol in symbols):
        return {"empty": EMPTY}
    question = parse(prompt)
    sentences = list(_sentences(symbols))
    helpful = sum(_is_right(option, question) for option in _offered(sentences))
    parts = {
        "options": OPTION * min(helpful, MAX_OPTIONS),
        "reason": _reason_part(sentences, question, helpful),
        "dismissive": _dismissive_part(symbols),
        "rambling": _rambling_part(symbols),
        "repetition": _repetition_part(symbols),
        "off_topic": _off_topic_part(symbols, question),
        "unsuitable": _unsuitable_part(symbols, question),
        "stuffing": _stuffing_part(symbols),
        "garbled": _garbled_part(symbols, sentences),
        "form": _form_part(response),
    }
    return {name: round(value, 6) + 0.0 for name, value in parts.items()}  # + 0.0: no negative zero


def _names(symbols: Sequence[Symbol], kind: str) -> list[str]:
    return [symbol.name for symbol in symbols if symbol.kind == kind]


def _sentences(symbols: Sequence[Symbol]) -> Iterator[list[Symbol]]:
    """The symbols between end marks, each with its end mark if it has one."""
    sentence: list[Symbol] = []
    for symbol in symbols:
        sentence.append(symbol)
        if symbol.kind == "mark" and symbol.name in _END_MARKS:
            yield sentence
            sentence = []
    if sentence:
        yield sentence


def _offered(sentences: Sequence[Sequence[Symbol]]) -> set[str]:
    """The options in sentences with a verb and without a negation, except those directly after another option."""
    offered: set[str] = set()
    for sentence in sentences:
        others = {symbol.name for symbol in sentence if symbol.kind == "word"}
        if others & _NEGATIONS or not others & _VERBS:
            continue
        pairs = zip([_START, *sentence], sentence, strict=False)
        offered.update(s.name for before, s in pairs if s.kind == "option" and before.kind != "option")
    return offered


def _is_right(option: str, question: Question | None) -> bool:
    if question is None or option not in question.topic.options:
        return False
    return question.need not in question.topic.wrong_for[option]


def _fitting_reasons(question: Question) -> frozenset[str]:
    needs = [question.need] if question.need else DOMAIN_OF[question.topic.name].needs
    return frozenset(reason for need in needs for reason in NEEDS[need].reasons)


def _reason_part(sentences: Sequence[Sequence[Symbol]], question: Question | None, helpful: int) -> float:
    """One fitting reason, as a clause, counts once; reasons of other needs, and more than two reasons, are
    penalised."""
    if question is None:
        return 0.0
    fitting = _fitting_reasons(question)
    clauses, total = 0, 0
    wrong: set[str] = set()
    for sentence in sentences:
        for before, symbol in zip([_START, *sentence], sentence, strict=False):
            if symbol.kind != "reason":
                continue
            total += 1
            if symbol.name not in fitting:
                wrong.add(symbol.name)
            elif before is _START or before.name in ("because", "since"):
                clauses += 1
    gain = (REASON if helpful else LONE_REASON) if clauses else 0.0
    return gain + WRONG_REASON * len(wrong) + WRONG_REASON * max(0, total - 2)


def _dismissive_part(symbols: Sequence[Symbol]) -> float:
    count = len(_names(symbols, "dismissive"))
    return DISMISSIVE + MORE_DISMISSIVE * min(count - 1, 2) if count else 0.0


def _rambling_part(symbols: Sequence[Symbol]) -> float:
    length = sum(len(symbol.name.split()) for symbol in symbols if symbol.kind != "mark")
    fillers = len(_names(symbols, "filler"))
    return FILLER * min(fillers, 3) + max(-2.0, LONG_WORD * max(0, length - LENGTH_LIMIT))


def _repetition_part(symbols: Sequence[Symbol]) -> float:
    """Repeated options, reasons and trigrams of symbols without punctuation."""
    phrases = Counter(symbol for symbol in symbols if symbol.kind in ("option", "reason"))
    spoken = [symbol.name for symbol in symbols if symbol.kind != "mark"]
    trigrams = Counter(zip(spoken, spoken[1:], spoken[2:], strict=False))
    again = sum(count - 1 for count in phrases.values())
    returns = sum(count - 1 for count in trigrams.values())
    return max(-3.0, REPEATED_PHRASE * again) + max(-2.0, REPEATED_TRIGRAM * returns)


def _off_topic_part(symbols: Sequence[Symbol], question: Question | None) -> float:
    """Options of other topics, and topics or needs other than the prompt's."""
    if question is None:
        return 0.0
    foreign = {name for name in _names(symbols, "option") if name not in question.topic.options}
    foreign |= {name for name in _names(symbols, "topic") if name != question.topic.name}
    foreign |= {name for name in _names(symbols, "need") if question.need and name != question.need}
    return OFF_TOPIC * min(len(foreign), 4)


def _unsuitable_part(symbols: Sequence[Symbol], question: Question | None) -> float:
    """Options of this topic that are wrong for this need."""
    if question is None:
        return 0.0
    named = {name for name in _names(symbols, "option") if name in question.topic.options}
    return UNSUITABLE * min(sum(not _is_right(name, question) for name in named), 4)


def _stuffing_part(symbols: Sequence[Symbol]) -> float:
    """Too many options, repeated or not."""
    return SURPLUS * min(max(0, len(_names(symbols, "option")) - TOLERATED_OPTIONS), 5)


def _garbled_part(symbols: Sequence[Symbol], sentences: Sequence[Sequence[Symbol]]) -> float:
    """Unknown words and marks, and pairs of neighbours that the grammar does not have."""
    pairs, known = _grammar()
    unknown = odd = 0
    for symbol in symbols:
        unknown += symbol.name not in (_MARKS if symbol.kind == "mark" else known) and symbol.kind in ("word", "mark")
    for sentence in sentences:
        roles = [_role(symbol) for symbol in [_START, *sentence]]
        for pair in pairwise(roles):
            odd += pair not in pairs and pair[0] in known and pair[1] in known
    return max(-2.4, UNKNOWN_WORD * unknown) + max(-2.4, ODD_PAIR * odd)


def _form_part(response: str) -> float:
    text = response.strip()
    ends = text.rstrip("\"')")[-1:] in _END_MARKS
    first = next((c for c in text if c.isalpha()), "")
    return (0.0 if ends else NO_END) + (0.0 if first.isupper() else NO_CAPITAL)


def _role(symbol: Symbol) -> str:
    """A symbol in the grammar: words and marks themselves ("!" as "."), phrases by their kind."""
    if symbol is _START:
        return "<start>"
    if symbol.kind in ("word", "mark"):
        return "." if symbol.name == "!" else symbol.name
    return f"<{symbol.kind}>"


@cache
def _grammar() -> tuple[frozenset[tuple[str, str]], frozenset[str]]:
    """The pairs of neighbouring roles in the demo world's sentences; and all known roles and words."""
    scanner = world_scanner()
    pairs: set[tuple[str, str]] = set()
    for answer in sample_answers("boiled eggs", NEEDS["diabetes"].reasons[0], NEEDS["diabetes"].phrase):
        for sentence in _sentences(scanner.scan(answer)):
            roles = [_role(symbol) for symbol in [_START, *sentence]]
            pairs.update(pairwise(roles))
    return frozenset(pairs), frozenset(role for pair in pairs for role in pair) | _EVERYDAY | _MARKS
