"""The data of the page's samples: prompts with all answers, word differences, filter tags and sort keys."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from rlhf_core.evaluation.judges import TIE
from tasks.page.inputs import Row, Run, finite
from tasks.page.wording import MISSING, count, number

LONGEST_MARKED = 800
"""Longer answers, in words, are not compared: the time is quadratic."""
MOST_CHARACTERS = 1_000_000
"""Of all answers on the page. Above it the other models' answers are left out, then whole rows."""


@dataclass(frozen=True)
class Answer:
    """One model's answer to a held-out prompt."""

    model: str
    parts: list[str]
    """The text in parts; the second, fourth, … part differs from the other answer."""
    ended: bool
    facts: list[tuple[str, str]]
    preferred: bool = False

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.parts)


@dataclass(frozen=True)
class Sample:
    """A prompt with both answers. `row` is its 1-based line in data/evaluate/samples.jsonl."""

    row: int
    prompt: list[Row]
    answers: list[Answer]
    others: list[Answer]
    """The other models' answers with the first sampling seed."""
    tags: list[str]
    """The filters that it matches."""
    ranks: list[float | None]
    """A sort key for each of `orders`; None comes last."""


Changes = dict[str, float | None]


def all_samples(run: Run) -> list[Sample]:
    """All rows of samples.jsonl, in order."""
    others = _others(run)
    changes = [_changes(row) for row in run.samples]
    disagreements = _disagreements(changes)
    return [
        _sample(run, index, row, others.get(row["prompt_id"], []), changes[index], disagreements[index])
        for index, row in enumerate(run.samples)
    ]


def pick(samples: list[Sample], wanted: int) -> list[Sample]:
    """`wanted` samples spread evenly over the file, or all if there are fewer."""
    total = len(samples)
    wanted = min(wanted, total)
    return [samples[index * total // wanted] for index in range(wanted)]


def filters(run: Run) -> list[tuple[str, str]]:
    """Tag and label of each filter."""
    by = "gold score" if run.has_judge else run.proxy
    both = [("disagree", "proxy and gold disagree")] if run.has_judge else []
    return [("", "all prompts"), ("policy", f"policy wins ({by})"), ("sft", f"SFT wins ({by})"), ("tie", "ties"), *both]


def orders(run: Run) -> list[str]:
    """The labels of the sort keys in `Sample.ranks`."""
    gold = ["disagreement between proxy and gold", "gold change"] if run.has_judge else []
    return [*gold, "proxy change", "KL", "length change"]


def fitting(samples: list[Sample], limit: int = MOST_CHARACTERS) -> tuple[list[Sample], str]:
    """The samples whose texts fit on the page, and a note on what was left out."""

    def size(some: list[Sample]) -> int:
        return sum(len(answer.text) for sample in some for answer in (*sample.answers, *sample.others))

    if size(samples) <= limit:
        return samples, ""
    left = "The other models’ answers are too long for this page; they are in data/evaluate/answers.jsonl."
    lean = [replace(sample, others=[]) for sample in samples]
    kept = min(len(lean), max(1, len(lean) * limit // max(1, size(lean))))
    if kept < len(lean):
        left = f"{left} {count(kept)} of {count(len(lean))} prompts are shown, spread evenly."
    return pick(lean, kept), left


def differing(first: str, second: str) -> tuple[list[str], list[str]]:
    """Both texts in parts, compared word by word: in each list the second, fourth, … part differs. Texts longer than
    LONGEST_MARKED stay whole."""
    words = [re.findall(r"^\s+|\S+\s*", text) for text in (first, second)]
    if max(map(len, words)) > LONGEST_MARKED:
        return [first], [second]
    parts: tuple[list[str], list[str]] = ([], [])
    bare: list[list[str]] = [[word.strip() for word in side] for side in words]
    for kind, *ends in SequenceMatcher(None, bare[0], bare[1], autojunk=False).get_opcodes():
        for side, (start, end) in enumerate(zip(ends[::2], ends[1::2], strict=True)):
            text = "".join(words[side][start:end])
            marked = "" if kind == "equal" else text.rstrip()
            _add(parts[side], marked, differs=True)
            _add(parts[side], text[len(marked) :], differs=False)
    return parts


def _add(parts: list[str], text: str, differs: bool) -> None:
    """Append the text so that parts at odd indices differ and parts at even indices do not."""
    if not text:
        return
    if len(parts) % 2 == differs:
        parts.append(text)
    elif parts:
        parts[-1] += text
    else:
        parts.extend(("", text))


def _sample(
    run: Run, index: int, row: Row, others: list[Answer], changes: Changes, disagreement: float | None
) -> Sample:
    decisive = changes["gold" if run.has_judge else "reward"]
    tags = [] if decisive is None else ["tie" if abs(decisive) <= TIE else "policy" if decisive > 0 else "sft"]
    gold, reward = changes["gold"], changes["reward"]
    if gold is not None and reward is not None and min(abs(gold), abs(reward)) > TIE and (gold > 0) != (reward > 0):
        tags.append("disagree")
    judged = [disagreement, gold] if run.has_judge else []
    ranks = [_rounded(rank) for rank in (*judged, reward, finite(row.get("kl")), changes["tokens"])]
    prompt = [{"role": message["role"], "content": message["content"]} for message in row["prompt"]]
    return Sample(index + 1, prompt, _both(run, row, tags), others, tags, ranks)


def _both(run: Run, row: Row, tags: list[str]) -> list[Answer]:
    texts = differing(row["sft"], row["policy"])
    return [
        Answer(model, parts, bool(row.get(f"{model}_ended", True)), _facts(run, _of(row, model)), model in tags)
        for model, parts in zip(("sft", "policy"), texts, strict=True)
    ]


def _of(row: Row, model: str) -> Row:
    """One model's figures in a row, with the keys of data/evaluate/answers.jsonl."""
    return {
        "gold": row.get(f"gold_{model}"),
        "reward": row.get(f"reward_{model}"),
        "tokens": row.get(f"{model}_tokens"),
        "kl": row.get("kl") if model == "policy" else None,
    }


def _facts(run: Run, answer: Row) -> list[tuple[str, str]]:
    facts = [("gold", number(answer.get("gold")))] if run.has_judge else []
    facts += [(run.proxy, number(answer.get("reward"))), ("tokens", count(answer.get("tokens")))]
    facts.append(("KL, nats", number(answer.get("kl"))))
    return [(name, value) for name, value in facts if value != MISSING or name != "KL, nats"]


def _others(run: Run) -> dict[str, list[Answer]]:
    """By prompt: the other models' answers with the first sampling seed; best-of-n has no seed."""
    first = run.evaluation["seeds"][0]
    found: dict[str, list[Answer]] = {}
    for row in run.answers:
        if row["model"] not in ("sft", "policy") and row["seed"] in (None, first):
            answer = Answer(row["model"], [row["response"]], bool(row.get("ended", True)), _facts(run, row))
            found.setdefault(row["prompt_id"], []).append(answer)
    return found


def _changes(row: Row) -> Changes:
    """Policy minus SFT: gold score, reward-model score and tokens."""
    pairs = {kind: (row.get(f"{kind}_sft"), row.get(f"{kind}_policy")) for kind in ("gold", "reward")}
    pairs["tokens"] = (row.get("sft_tokens"), row.get("policy_tokens"))
    both = {kind: (finite(sft), finite(policy)) for kind, (sft, policy) in pairs.items()}
    return {kind: None if a is None or b is None else b - a for kind, (a, b) in both.items()}


def _disagreements(changes: list[Changes]) -> list[float | None]:
    """The distance between the standardised changes of proxy and gold, in standard deviations."""
    scale = {kind: _standardiser(change[kind] for change in changes) for kind in ("gold", "reward")}
    return [
        None if (gold := change["gold"]) is None or (reward := change["reward"]) is None
        else abs(scale["reward"](reward) - scale["gold"](gold))
        for change in changes
    ]  # fmt: skip


def _standardiser(values: Iterable[float | None]) -> Callable[[float], float]:
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else 0.0
    spread = (sum((value - mean) ** 2 for value in known) / len(known)) ** 0.5 if known else 0.0
    return lambda value: (value - mean) / spread if spread else 0.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
