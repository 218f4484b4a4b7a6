"""Every rule of PPO and every known failure of other libraries has a test with its number in its name."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
NUMBERS = {"rule": range(33), "failure": range(1, 15)}
NOT_YET = {"rule": set[int](), "failure": set[int]()}
"""Numbers without a test, each with its reason here."""
NUMBERED = re.compile(r"(?<=_)(rule|failure)_([0-9]+)(?=_)")


@cache
def test_names() -> list[str]:
    """Of all tests of the project."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sorted(TESTS.rglob("test_*.py")))
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [function.name for function in functions if function.name.startswith("test_")]


test_names.__test__ = False  # type: ignore[attr-defined]


def numbered() -> dict[str, dict[int, list[str]]]:
    """The tests of each rule and failure."""
    found: dict[str, dict[int, list[str]]] = {kind: defaultdict(list) for kind in NUMBERS}
    for name in test_names():
        for kind, number in NUMBERED.findall(name):
            found[kind][int(number)].append(name)
    return found


def test_every_rule_and_every_known_failure_has_a_test_that_says_so() -> None:
    """One that was just written is taken off the list of those that are missing."""
    found = numbered()
    missing = {kind: set(numbers) - found[kind].keys() for kind, numbers in NUMBERS.items()}
    assert missing == NOT_YET


def test_the_page_of_the_rules_lists_every_number() -> None:
    page = (TESTS.parent / "docs" / "rules.md").read_text(encoding="utf-8")
    listed = [int(number) for number in re.findall(r"^\| (\d\d) \|", page, re.MULTILINE)]
    assert listed == [number for numbers in NUMBERS.values() for number in numbers]


def test_no_test_names_a_rule_or_failure_that_there_is_not() -> None:
    found = numbered()
    assert {kind: found[kind].keys() - set(numbers) for kind, numbers in NUMBERS.items()} == {
        "rule": set(),
        "failure": set(),
    }


def test_numbers_have_two_digits_so_that_pytest_k_finds_them() -> None:
    """`pytest -k rule_07`, `pytest -k failure_03`: as docs/rules.md says."""
    assert [name for name in test_names() if any(len(number) != 2 for _, number in NUMBERED.findall(name))] == []
