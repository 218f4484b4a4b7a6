"""Every architecture through the whole chain, and the page about them."""

from pathlib import Path

import pytest

from tests.architectures.kinds import KINDS
from tests.architectures.page import PAGE, page, row_of, run
from tests.architectures.zoo import ROWS

FAST = ("llama", "gemma3", "opt_projected", "qwen2_moe", "granite", "mamba")
"""Those that differ most: packed rows, a sliding window, narrow embeddings, experts; and those that are refused."""
REFUSED = ("granite", "mamba")


def lines() -> list[str]:
    return PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.chosen(*FAST, "gpt2", "falcon_alibi", "mixtral")
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
)
def test_an_architecture_passes_or_is_refused_and_the_page_says_so(name: str, tmp_path: Path) -> None:
    chain = run(name, tmp_path)
    assert bool(chain.refusals) == (name in REFUSED)
    for message in chain.refusals.values():
        assert "\n" not in message
        assert "; choose" in message
    assert row_of(name, chain) in lines()


def test_the_page_is_up_to_date_around_its_rows() -> None:
    titles = [row.title for row in ROWS.values()]
    rows = [text for text in lines() if any(text.startswith(f"| {title} |") for title in titles)]
    assert [text.split(" | ")[0].removeprefix("| ") for text in rows] == titles
    assert PAGE.read_text(encoding="utf-8") == page(rows)


def test_every_kind_of_tokenizer_belongs_to_an_architecture() -> None:
    assert {row.tokenizer for row in ROWS.values()} == KINDS.keys()
