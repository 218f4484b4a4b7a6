"""Changes of rows on their way into data/raw/: other names of columns, keys that are left out, reasoning written into
the text, and texts with a chat template as turns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row
from tasks.datasets.sources import templates
from tasks.datasets.sources.dialogues import REASONING, ShapeError, message_text, messages_in
from tasks.datasets.sources.formats import read_rows
from tasks.datasets.sources.shapes import CONTENT, TEXT
from tasks.datasets.sources.verdicts import ANSWER


def renamed(pairs: Sequence[str]) -> dict[str, str]:
    """Old name → new name, of texts such as `prompt=question,chosen=best`. Raises UserError for others."""
    found: dict[str, str] = {}
    for pair in (pair for text in pairs for pair in text.split(",")):
        new, _, old = (part.strip() for part in pair.partition("="))
        if not new or not old or old in found or new in found.values():
            raise UserError(f"--map {pair}: expected NEW=OLD, each name once, such as prompt=question,chosen=best")
        found[old] = new
    return found


@dataclass(frozen=True)
class Rewriting:
    """What `leash import` changes."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Old name of a column → new name."""
    ignored: frozenset[str] = frozenset()
    """Columns, and keys of messages, that are left out."""
    think: bool = False
    """Write reasoning into the text of its message, as <think>…</think>."""
    parse_template: bool = False
    """Make turns of texts that a chat template was applied to."""

    def rows(self, path: Path, seen: set[str]) -> Iterator[Row]:
        """The rewritten rows of a file; the names of their columns and keys are added to `seen`. Raises UserError for a
        row that cannot be rewritten."""
        for number, row in read_rows(path):
            seen.update(row)
            try:
                # dates become text; bytes and what is no number become null
                text = json.dumps(
                    dict(self._columns(row, seen)),
                    ensure_ascii=False,
                    default=lambda value: None if isinstance(value, bytes) else str(value),
                )
                text.encode()
                yield json.loads(text, parse_constant=lambda name: None)
            except (ShapeError, UnicodeEncodeError, RecursionError) as error:
                problem = error if isinstance(error, ShapeError) else "a text that UTF-8 cannot hold"
                raise UserError(f"{path}, row {number}: {problem}; correct the row or remove it") from None

    def _columns(self, row: Row, seen: set[str]) -> Iterator[tuple[str, Any]]:
        renamed = {self.names[name] for name in row if name in self.names}
        for name, value in row.items():
            new = self.names.get(name, name)
            if name in self.ignored or (new == name and name in renamed):
                continue  # a renamed column takes the place of one that has the name
            if name in ("data", "fields") and isinstance(value, dict):  # of exports of annotations
                seen.update(value)
                value = dict(self._columns(value, seen))
            value = self._value(value, seen)
            if self.parse_template and isinstance(value, str) and (new in CONTENT or ANSWER.fullmatch(new)):
                value = templates.parse(value)
                new = "messages" if new == TEXT and isinstance(value, list) else new
            yield new, value

    def _value(self, value: Any, seen: set[str]) -> Any:
        """Messages, changed; anything else as it is."""
        if isinstance(value, str):
            value = value if (found := messages_in(value)) is None else found
        if isinstance(value, dict) and ("role" in value or "from" in value):
            return self._message(value, seen)
        return [self._value(item, seen) for item in value] if isinstance(value, list) else value

    def _message(self, item: dict[str, Any], seen: set[str]) -> dict[str, Any]:
        seen.update(item)
        kept = {key: value for key, value in item.items() if key not in self.ignored}
        text = "value" if "value" in kept else "content"
        if self.parse_template and isinstance(kept.get(text), str):
            turns = templates.parse(kept[text])
            kept[text] = turns if isinstance(turns, str) else turns[-1]["content"] if len(turns) == 1 else kept[text]
        thoughts = [kept.pop(key) for key in REASONING if self.think and isinstance(kept.get(key, 0), str | None)]
        if (thought := next(filter(None, thoughts), None)) and item.get("role", item.get("from")) != "user":
            said = kept.get(text) or ""
            said = said if isinstance(said, str) else message_text(said)
            kept[text] = said if "<think>" in said else f"<think>\n{thought}\n</think>\n\n{said}"
        return kept
