"""Changes of rows on their way into data/raw/: other names of columns, keys that are left out, reasoning written into
the text, and texts with a chat template as turns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row
from tasks.datasets.sources import templates
from tasks.datasets.sources.dialogues import REASONING, ShapeError, messages_in
from tasks.datasets.sources.formats import read_rows
from tasks.datasets.sources.shapes import CONTENT, TEXT


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
        """The rewritten rows of a file; the names of their columns are added to `seen`. Raises UserError for a row that
        cannot be rewritten."""
        for number, row in read_rows(path):
            seen.update(row)
            try:
                yield self._row(row)
            except ShapeError as error:
                raise UserError(f"{path}, row {number}: {error}") from None

    def _row(self, row: Row) -> Row:
        changed: Row = {}
        taken = self.names.values()
        for name, value in row.items():
            new = self.names.get(name, name)
            if name in self.ignored or (new == name and name in taken):
                continue  # a renamed column takes the place of one that has the name
            value = self._value(value)
            if self.parse_template and isinstance(value, str) and name in CONTENT:
                value = templates.parse(value)
                new = "messages" if new == TEXT and isinstance(value, list) else new
            changed[new] = value
        return changed

    def _value(self, value: Any) -> Any:
        """Lists of messages, and anything else as it is."""
        if isinstance(value, str):
            value = value if (found := messages_in(value)) is None else found
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            return value
        return [self._message(item) for item in value]

    def _message(self, item: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in item.items() if key not in self.ignored}
        for key in REASONING if self.think else ():
            if isinstance(kept.get(key, 0), str | None) and (thought := kept.pop(key)):
                text = "value" if "value" in kept else "content"
                kept[text] = f"<think>\n{thought}\n</think>\n\n{kept.get(text) or ''}"
        return kept
