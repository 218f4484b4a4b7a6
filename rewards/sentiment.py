"""Words of praise less words of blame in a text about a film, by the list sentiment.txt. The list was written by hand
for examples/reviews.yaml, not made from the reviews or their labels, and no model learns from it."""

import re
from pathlib import Path

LINES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
VALUES = {word: 1 if line[0] == "+" else -1 for line in LINES for word in line[1:].split()}
NEGATIONS = {"not", "no", "never", "cannot", "without", "nor", "neither", "hardly", "isn't", "wasn't", "don't", "can't"}
REACH = 3
"""Words after a negation that count the other way round."""
WORD = re.compile(r"[a-z]+(?:['-][a-z]+)*")


def score(prompts: list, responses: list[str], rows: list[dict]) -> list[float]:
    """The count for each response."""
    return [float(praise(response)) for response in responses]


def praise(text: str) -> int:
    """The count for one text."""
    words = WORD.findall(text.lower().replace("’", "'"))
    total = 0
    for place, word in enumerate(words):
        negated = not NEGATIONS.isdisjoint(words[max(0, place - REACH) : place])
        total += VALUES.get(word, 0) * (-1 if negated else 1)
    return total
