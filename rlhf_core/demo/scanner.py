"""A scanner of the demo world's language: any text to symbols, where the longest known phrase of whole words (an
option, a reason) is one symbol."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from rlhf_core.demo.phrases import DISMISSIVE_PHRASES, FILLER_PHRASES
from rlhf_core.demo.topics import NEEDS, TOPICS

Kind = Literal["option", "reason", "need", "topic", "dismissive", "filler", "word", "mark"]

_TOKEN = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*|\d+|[^\w\s]|_")
_STRAIGHT = str.maketrans({"’": "'", "‘": "'"})
_END: Literal[""] = ""  # the key of the symbol of a phrase that ends at a node; no token is empty


class Symbol(NamedTuple):
    """One phrase, word or punctuation mark. `name` is the phrase in lower case, for a need its key in `NEEDS`."""

    kind: Kind
    name: str


@dataclass(frozen=True)
class Scanner:
    """Finds known phrases in text; build it with `scanner_of`."""

    trie: dict[str, Any]

    def scan(self, text: str) -> list[Symbol]:
        """The symbols of `text`, in order; linear in its length."""
        tokens = words(text)
        symbols: list[Symbol] = []
        start = 0
        while start < len(tokens):
            found, start = self._longest(tokens, start)
            symbols.append(found)
        return symbols

    def _longest(self, tokens: list[str], start: int) -> tuple[Symbol, int]:
        """The longest phrase that begins at `start`, else the single token, and the position after it."""
        node, best, after = self.trie, None, start + 1
        for position in range(start, len(tokens)):
            node = node.get(tokens[position], {})
            if not node:
                break
            if _END in node:
                best, after = node[_END], position + 1
        if best is None:
            token = tokens[start]
            best = Symbol("word" if token[0].isalpha() else "mark", token)
        return best, after


def words(text: str) -> list[str]:
    """Words and single punctuation marks of `text` in lower case; white space is dropped."""
    return _TOKEN.findall(text.lower().translate(_STRAIGHT))


def scanner_of(phrases: Iterable[tuple[str, Symbol]]) -> Scanner:
    """A scanner for these phrases. Raises ValueError where one phrase has two meanings."""
    trie: dict[str, Any] = {}
    for phrase, symbol in phrases:
        node = trie
        for word in words(phrase):
            node = node.setdefault(word, {})
        if node.setdefault(_END, symbol) != symbol:
            raise ValueError(f"{phrase!r} is both {node[_END]} and {symbol}")
    return Scanner(trie)


@cache
def world_scanner() -> Scanner:
    """The scanner of the demo world: options, reasons, needs, topics, dismissive phrases and fillers."""
    phrases: list[tuple[str, Symbol]] = []
    for topic in TOPICS.values():
        phrases.append((topic.name, Symbol("topic", topic.name)))
        phrases += [
            (form, Symbol("option", option)) for option in topic.options for form in (option, _singular(option))
        ]
    for key, need in NEEDS.items():
        phrases.append((need.phrase, Symbol("need", key)))
        phrases += [(reason, Symbol("reason", reason)) for reason in need.reasons]
    phrases += [(phrase, Symbol("dismissive", phrase)) for phrase in DISMISSIVE_PHRASES]
    phrases += [(phrase, Symbol("filler", phrase)) for phrase in FILLER_PHRASES]
    return scanner_of(phrases)


def _singular(option: str) -> str:
    """The singular of most plural options."""
    return option.removesuffix("s")


@cache
def prompt_scanner() -> Scanner:
    """The scanner of prompts: topics and needs only, so that no option hides them."""
    phrases = [(name, Symbol("topic", name)) for name in TOPICS]
    return scanner_of(phrases + [(need.phrase, Symbol("need", key)) for key, need in NEEDS.items()])
