"""Writes the data of examples/arithmetic.yaml: all sums of two numbers below 100, and half of the demonstrations have a
slip. `answer` is the right sum.

    python examples/make_arithmetic.py ~/sums && leash import ~/sums
"""

import json
import random
import sys
from pathlib import Path

SLIPS = 0.5
"""Share of the demonstrations that are wrong, by one or by ten: SFT learns to slip as often."""


def spaced(number: int, digits: int = 1) -> str:
    """Digits apart, so that each is a token."""
    return " ".join(f"{number:0{digits}d}")


def rows() -> list[dict[str, str]]:
    """10,000 rows, the same each time."""
    rng = random.Random(1)
    found = []
    for a in range(100):
        for b in range(100):
            shown = a + b + (rng.choice([-10, -1, 1, 10]) if rng.random() < SLIPS else 0)
            found.append(
                {
                    "prompt": f"Add {spaced(a, 2)} and {spaced(b, 2)}",
                    "response": spaced(max(0, shown)),
                    "answer": spaced(a + b),
                }
            )
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1]).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
