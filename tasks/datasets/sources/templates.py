"""Chat templates that are already applied to the texts of a data set: recognised, so that a model does not learn to
spell control tokens, and parsed back into turns."""

import re

from rlhf_core.data.chat import Conversation
from tasks.datasets.sources.dialogues import ROLES, ShapeError, message, without_cue

TURNS = {
    name: re.compile(pattern)
    for name, pattern in {
        "ChatML": r"<\|im_start\|>(\w+)(?:<\|im_sep\|>|\n)?",
        "Llama 3": r"<\|start_header_id\|>(\w+)<\|end_header_id\|>",
        "Llama 4": r"<\|header_start\|>(\w+)<\|header_end\|>",
        "Gemma": r"<start_of_turn>(\w+)",
        "Llama 2 or Mistral": r"\[(/?INST|SYSTEM_PROMPT)\]",
        "Phi, Zephyr or OpenAssistant": r"<\|(system|user|assistant|prompter)\|>",
        "DeepSeek": r"<｜(User|Assistant)｜>",
        "Command R": r"<\|START_OF_TURN_TOKEN\|><\|(SYSTEM|USER|CHATBOT)_TOKEN\|>",
        "OpenChat": r"GPT4 Correct (User|Assistant):",
        "Harmony": r"<\|start\|>(\w+)(?:<\|channel\|>\w+)?<\|message\|>",
        "Granite": r"<\|start_of_role\|>(\w+)<\|end_of_role\|>",
        "Human and Assistant": r"(?:(?<=\n)|(?<=^)|(?<= ))(?:### ?)?(Human|User|USER|Assistant|ASSISTANT): ?",
        "Alpaca": r"(?:(?<=\n)|(?<=^))### ?(Instruction|Response): ?",
    }.items()
}
"""How templates write the beginning of a turn; the group is its role."""
SPOKEN = ("Human and Assistant", "Alpaca")
"""Templates without control tokens: recognised only where the text begins with a question and has an answer."""
END = re.compile(
    r"<\|(?:im_end|eot_id|eot|end|return|endoftext|end_of_text|end_of_turn|END_OF_TURN_TOKEN|begin_of_text|im_sep"
    r"|BOS_TOKEN)\|>|<end_of_turn>|<bos>|<eos>|</?s>|<｜(?:begin|end)▁of▁sentence｜>|\[/SYSTEM_PROMPT\]"
)
"""What templates write behind turns and around texts."""
_ROLES = ROLES | {"inst": "user", "/inst": "assistant", "system_prompt": "system", "instruction": "user"}
_ROLES |= {"response": "assistant"}


def applied(text: str) -> str | None:
    """The name of the template that was applied to a text: it begins with a turn, holds two, or ends with a token that
    closes one. None for any other text, also for one that mentions a control token."""
    if "|>" in text or "INST]" in text or "_turn>" in text or "s>" in text or "｜>" in text or "SYSTEM_P" in text:
        inner = re.sub(rf"^(?:\s*(?:{END.pattern}))+\s*", "", text.strip())
        for name, turn in TURNS.items():
            if name not in SPOKEN and (turn.match(inner) or len(turn.findall(inner)) > 1):
                return name
        last = [end.group() for end in END.finditer(inner) if end.end() == len(inner)]
        if last and len(inner) > len(last[0]) and "<s>" not in text:  # <s>…</s> is HTML
            return last[0]
    if "ssistant:" in text or "SSISTANT:" in text or "### R" in text:
        for name in SPOKEN:
            roles = [_ROLES[who.lower()] for who in TURNS[name].findall(text.strip())]
            if TURNS[name].match(text.strip()) and roles[0] == "user" and "assistant" in roles:
                return name
    return None


def refuse_applied(text: str, name: str) -> None:
    """Raise ShapeError for a text of the column `name` that a chat template was applied to."""
    if (template := applied(text)) is not None:
        raise ShapeError(
            f"{name}: a chat template is already applied to the text ({template}), and the model's own template would "
            "be put around it; `leash import --parse-template` makes turns of it"
        )


def parse(text: str) -> Conversation | str:
    """The turns of a text that a template was applied to; text without turns, such as an answer, without its end
    tokens. Raises ShapeError for a role that no conversation has."""
    template = applied(text)
    if template is None:
        return text
    system = re.search(r"<<SYS>>(.*?)<</SYS>>", text, re.DOTALL)
    text = text.strip().replace(system.group(), "") if system else text.strip()
    if template not in TURNS:
        return END.sub("", text).strip()
    before, *parts = (END.sub("", part).strip() for part in TURNS[template].split(text))
    opening = system.group(1).strip() if system else before
    turns = [message("system", opening)] if opening else []
    for who, content in zip(parts[::2], parts[1::2], strict=True):
        if (role := _ROLES.get(who.lower())) is None:
            raise ShapeError(f"a turn of the template {template} has role {who!r}, expected system, user, assistant")
        turns.append(message(role, content))
    return without_cue(turns)
