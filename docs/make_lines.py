"""Writes the line numbers of links such as [`whiten`](../rlhf_core/ppo/advantages.py#L1); a test compares them.

python docs/make_lines.py
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
LINK = re.compile(r"(\[`(?:\w+\.)?(\w+)`\]\(([\w./]+\.py)#L)\d+\)")


def page(path: Path) -> str:
    """The page with the line of each linked function or class. Raises ValueError where the file does not define it."""

    def with_line(link: re.Match[str]) -> str:
        code = (path.parent / link[3]).read_text(encoding="utf-8")
        found = re.search(rf"^ *(?:def|class) {link[2]}\b", code, re.MULTILINE)
        if found is None:
            raise ValueError(f"{path}: {link[3]} defines no {link[2]}; correct the link")
        return f"{link[1]}{code.count(chr(10), 0, found.start()) + 1})"

    return LINK.sub(with_line, path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for each in sorted(DOCS.rglob("*.md")):
        each.write_text(page(each), encoding="utf-8")
