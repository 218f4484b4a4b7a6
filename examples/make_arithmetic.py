"""Writes the data of examples/arithmetic.yaml: all sums of two numbers below 100, each with its answer. Digits are
apart, so that each is a token.

python examples/make_arithmetic.py FOLDER
"""

import json
import sys
from pathlib import Path

NUMBERS = range(100)


def main(folder: Path) -> None:
    """Write FOLDER/sums.jsonl: 10,000 rows of prompt, response and answer."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = (
        {"prompt": f"{apart(a)} + {apart(b)}", "response": apart(a + b), "answer": apart(a + b)}
        for a in NUMBERS
        for b in NUMBERS
    )
    with (folder / "sums.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def apart(number: int) -> str:
    """37 as `3 7`."""
    return " ".join(str(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
