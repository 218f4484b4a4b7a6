"""Minus the distance of an answer's length from 20 words, in tens of words: beside a reward model, so that length does
not pay."""

WORDS = 20


def score(prompts: list, responses: list[str], rows: list[dict]) -> list[float]:
    """One number for each response."""
    return [-abs(len(response.split()) - WORDS) / 10 for response in responses]
