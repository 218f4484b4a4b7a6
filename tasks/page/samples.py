"""The data of the page's samples: prompts with all answers, word differences, filter tags and sort keys."""

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from rlhf_core.evaluation.judges import TIE
from tasks.page.inputs import Row, Run, finite
from tasks.page.wording import MISSING, count, number

LONGEST_MARKED = 800
"""Longer answers, in words, are not compared: the time is quadratic."""
FAR = 0.5
"""How far the ranks of an answer by proxy and by gold, from 0 to 1, are apart where the two disagree on it."""
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
"""Policy minus SFT: `gold` score, `reward` of the proxy, and `tokens`."""


def all_samples(run: Run) -> list[Sample]:
    """All rows of samples.jsonl, in order. Beside SFT's and the policy's answers are those of the other models with the
    first sampling seed; best-of-n has no seed."""
    others: dict[str, list[Answer]] = {}
    for row in run.answers:
        if row["model"] not in ("sft", "policy") and row["seed"] in (None, run.evaluation["seeds"][0]):
            answer = Answer(row["model"], [row["response"]], bool(row.get("ended", True)), _facts(run, row))
            others.setdefault(row["prompt_id"], []).append(answer)

    keys = {"gold": ("gold_sft", "gold_policy"), "reward": ("reward_sft", "reward_policy")}
    keys["tokens"] = ("sft_tokens", "policy_tokens")
    changes = []  # policy minus SFT
    for row in run.samples:
        ends = {kind: (finite(row.get(sft)), finite(row.get(policy))) for kind, (sft, policy) in keys.items()}
        changes.append({kind: None if a is None or b is None else b - a for kind, (a, b) in ends.items()})
    gold, reward = (_standardised([change[kind] for change in changes]) for kind in ("gold", "reward"))

    samples = []
    for place, (row, change) in enumerate(zip(run.samples, changes, strict=True)):
        one, two = gold[place], reward[place]
        disagreement = None if one is None or two is None else abs(two - one)
        samples.append(_sample(run, place, row, others.get(row["prompt_id"], []), change, disagreement))
    return samples


def pick(samples: list[Sample], wanted: int) -> list[Sample]:
    """`wanted` samples spread evenly over the file, or all if there are fewer."""
    total = len(samples)
    wanted = min(wanted, total)
    return [samples[index * total // wanted] for index in range(wanted)]


def exploited(run: Run, most: int = 2) -> list[tuple[Row, float, float]]:
    """The policy's answers that the proxy ranks high and the gold score ranks low, the largest distance first: the row,
    and its rank by both, as the share of the policy's answers with a lower score. Distances below FAR are left out."""
    rows = [row for row in run.samples if None not in (finite(row["gold_policy"]), finite(row["reward_policy"]))]
    ranks = []
    for key in ("reward_policy", "gold_policy"):
        scores = sorted(row[key] for row in rows)
        ranks.append([(bisect_left(scores, row[key]) + bisect_right(scores, row[key])) / 2 / len(rows) for row in rows])
    found = sorted(zip(rows, *ranks, strict=True), key=lambda one: one[2] - one[1])
    return [one for one in found[:most] if one[1] - one[2] >= FAR]


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
    gold, reward = changes["gold"], changes["reward"]
    decisive = gold if run.has_judge else reward
    tags = [] if decisive is None else ["tie" if abs(decisive) <= TIE else "policy" if decisive > 0 else "sft"]
    if gold is not None and reward is not None and min(abs(gold), abs(reward)) > TIE and (gold > 0) != (reward > 0):
        tags.append("disagree")
    ranks = [*([disagreement, gold] if run.has_judge else []), reward, finite(row.get("kl")), changes["tokens"]]
    prompt = [{"role": message["role"], "content": message["content"]} for message in row["prompt"]]
    answers = []
    for model, parts in zip(("sft", "policy"), differing(row["sft"], row["policy"]), strict=True):
        figures = {"gold": row.get(f"gold_{model}"), "reward": row.get(f"reward_{model}")}
        figures |= {"tokens": row.get(f"{model}_tokens"), "kl": row.get("kl") if model == "policy" else None}
        ended = bool(row.get(f"{model}_ended", True))
        answers.append(Answer(model, parts, ended, _facts(run, figures), preferred=model in tags))
    rounded = [None if rank is None else round(rank, 4) for rank in ranks]
    return Sample(index + 1, prompt, answers, others, tags, rounded)


def _facts(run: Run, answer: Row) -> list[tuple[str, str]]:
    facts = [("gold", number(answer.get("gold")))] if run.has_judge else []
    facts += [(run.proxy, number(answer.get("reward"))), ("tokens", count(answer.get("tokens")))]
    facts.append(("KL, nats", number(answer.get("kl"))))
    return [(name, value) for name, value in facts if value != MISSING or name != "KL, nats"]


def _standardised(values: list[float | None]) -> list[float | None]:
    """In standard deviations from the mean; 0 where the values do not vary."""
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else 0.0
    spread = (sum((value - mean) ** 2 for value in known) / len(known)) ** 0.5 if known else 0.0
    return [value if value is None else (value - mean) / spread if spread else 0.0 for value in values]
