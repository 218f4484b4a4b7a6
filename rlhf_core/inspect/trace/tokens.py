"""Single tokens as readable text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; the tokenizer's name of a token without readable text."""
    texts, whole = [], ""
    for end, token in enumerate(ids, start=1):
        longer = str(tokenizer.decode(list(ids[:end])))
        added = longer[len(whole) :] if longer.startswith(whole) else ""
        texts.append(added if added and "�" not in added else token_text(tokenizer, token))
        whole = longer
    return texts


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """One token as text; the tokenizer's name of a token that is not a whole character."""
    text = str(tokenizer.decode([token]))
    return text if text and "�" not in text else str(tokenizer.convert_ids_to_tokens(token))
