"""Chat templates that are already applied to the texts of a data set: recognised, so that a model does not learn to
spell control tokens, and parsed back into turns."""

import re
from typing import NamedTuple

from rlhf_core.data.chat import Conversation
from tasks.datasets.sources.dialogues import ROLES, ShapeError, message, without_cue


class Template(NamedTuple):
    """How a template writes a turn."""

    name: str
    turn: re.Pattern[str]
    """Before each turn; the group is the role."""
    end: str
    """After each turn, and what it writes around texts, as a pattern."""


def _template(name: str, turn: str, end: str) -> Template:
    return Template(name, re.compile(turn), end)


TEMPLATES = (
    _template("ChatML", r"<\|im_start\|>(\w+)\n?", r"<\|im_end\|>|<\|endoftext\|>"),
    _template("Llama 3", r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*", r"<\|eot_id\|>|<\|begin_of_text\|>"),
    _template("Gemma", r"<start_of_turn>(\w+)\n?", r"<end_of_turn>|<bos>|<eos>"),
    _template("Llama 2 or Mistral", r"\[(/?INST)\]", r"</?s>"),
    _template("Phi or Zephyr", r"<\|(system|user|assistant)\|>\n?", r"<\|end\|>|</?s>|<\|endoftext\|>"),
    _template("DeepSeek", r"<｜(User|Assistant)｜>", r"<｜(?:begin|end)▁of▁sentence｜>"),
)


def applied(text: str) -> Template | None:
    """The template that a text begins with or whose end token closes it; None for any other text."""
    if not ("|>" in text or "INST]" in text or "_turn>" in text or "s>" in text or "｜>" in text):
        return None  # the usual case, quickly
    inner = text.strip()
    for template in TEMPLATES:
        begins = re.match(rf"(?:{template.end})*\s*(?:{template.turn.pattern})", inner)
        ends = "<s>" not in inner and re.search(rf"\S\s*(?:{template.end})$", inner)  # <s>…</s> is HTML
        if begins or ends:
            return template
    return None


def refuse_applied(text: str, name: str) -> None:
    """Raise ShapeError for a text of the column `name` that a chat template was applied to."""
    if (template := applied(text)) is not None:
        raise ShapeError(
            f"{name}: has the control tokens of a chat template ({template.name}) as text, and the model's own "
            "template would be put around them; `leash import --parse-template` makes turns of them"
        )


def parse(text: str) -> Conversation | str:
    """The turns of a text that a template was applied to; text without turns, such as an answer, without its end
    tokens. Raises ShapeError for a role that no conversation has."""
    template = applied(text)
    if template is None:
        return text
    system = re.search(r"<<SYS>>(.*?)<</SYS>>", text, re.DOTALL)
    if system:
        text = text.replace(system.group(), "")
    parts = [re.sub(template.end, "", part).strip() for part in template.turn.split(text)]
    if len(parts) == 1:
        return parts[0]
    turns = [message("system", system.group(1).strip())] if system else []
    for who, content in zip(parts[1::2], parts[2::2], strict=True):
        role = {"INST": "user", "/INST": "assistant"}.get(who) or ROLES.get(who.lower())
        if role is None:
            raise ShapeError(
                f"a turn of the template {template.name} has role {who!r}, expected system, user, assistant"
            )
        turns.append(message(role, content))
    return without_cue(turns)
