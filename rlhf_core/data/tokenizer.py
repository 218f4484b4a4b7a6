"""Tokenizers: training, checks of pad, eos and chat template, and text ↔ token ids. All stages encode with
`encode_prompt` and `encode_response`, so that they get the same tokens."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_core.data.chat import Conversation
from rlhf_core.data.control_tokens import chat_ids, text_ids
from rlhf_core.errors import UserError
from rlhf_core.loading import loading

ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
PROBE: Conversation = [{"role": "user", "content": "Good morning."}]
"""A conversation that every chat template must render, some behind a system message."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CHAT_TEMPLATES = (CHAT_TEMPLATE, "{{ bos_token }}" + CHAT_TEMPLATE)
"""The second for tokenizers that put a token before every text."""

TEXT_TEMPLATE = (
    "{% if messages | length > 1 %}{{ raise_exception('base.format is text: a prompt is one text, without turns') }}"
    "{% endif %}{{ messages[0]['content'] }}"
)
"""The prompt as it is, for a model that continues texts."""
TEXT_TEMPLATES = (TEXT_TEMPLATE, "{{ bos_token }}" + TEXT_TEMPLATE)
"""The second as in `CHAT_TEMPLATES`."""


def train_bpe(
    texts: Iterable[str], vocabulary: int, pad_token: str, eos_token: str, context: int, plain: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with pad, eos, role tokens and a chat template. Equal texts give equal bytes.

    `context` is the longest sequence in tokens; `plain`: without roles, for a model that continues texts. Every text
    can be encoded: bytes are the alphabet.
    """
    roles = [] if plain else list(ROLES)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[pad_token, eos_token, *roles],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad_token,
        eos_token=eos_token,
        additional_special_tokens=roles,
        chat_template=TEXT_TEMPLATE if plain else CHAT_TEMPLATE,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, checked by `require_usable`; `trust_remote_code` runs the folder's own code."""
    return require_usable(read_tokenizer(path, trust_remote_code=trust_remote_code))


def read_tokenizer(
    path: str | Path, revision: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id, unchecked. Raises UserError, see `loading`."""
    with loading(path):
        return AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=trust_remote_code)


def complete(
    tokenizer: PreTrainedTokenizerBase, pad_token: str, plain: bool = False
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Add a pad token and a chat template to a pretrained tokenizer that has none. `plain`: the template of a model
    that continues texts, in place of its own.

    Returns the tokenizer, and the changes as text for the log. Raises UserError without an eos token.
    """
    repairs = []
    starts = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if tokenizer.eos_token_id is None:
        raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no eos token; a response could never end")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": pad_token})
        repairs.append(f"pad token set to {pad_token}")
    if plain:
        tokenizer.chat_template = TEXT_TEMPLATES[starts]
        repairs.append("chat template replaced: prompts are texts")
    elif not tokenizer.chat_template:
        tokenizer.add_special_tokens({"additional_special_tokens": list(ROLES)})
        tokenizer.chat_template = CHAT_TEMPLATES[starts]
        repairs.append("chat template added")
    tokenizer.padding_side = "left"
    return require_usable(tokenizer), repairs


def require_usable(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer itself. Raises UserError when pad or eos is missing, when they are the same, without a chat
    template, and where the template renders the probe neither as it is nor behind a system message."""
    name = tokenizer.name_or_path
    if tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
        raise UserError(f"{name}: the tokenizer needs an eos and a pad token; run the stage `base` to add them")
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise UserError(
            f"{name}: pad token equals eos token ({tokenizer.eos_token!r}): the model could not learn to stop; "
            "give the tokenizer a pad token of its own"
        )
    if not tokenizer.chat_template:
        raise UserError(f"{name}: the tokenizer has no chat template; run the stage `base` to add one")
    with rendering(tokenizer):
        try:
            tokenizer.apply_chat_template(PROBE, add_generation_prompt=True, tokenize=False)
        except TemplateError:
            behind_system: Conversation = [{"role": "system", "content": "Be brief."}, *PROBE]
            tokenizer.apply_chat_template(behind_system, add_generation_prompt=True, tokenize=False)
    return tokenizer


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """A chat template is a program; transformers runs it in jinja's sandbox. Raises UserError for what the sandbox
    forbids, and for a template that fails."""
    try:
        yield
    except (TemplateError, ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{tokenizer.name_or_path}: its chat template fails ({reason}); correct chat_template.jinja, or remove it "
            "for the one that the stage `base` adds"
        ) from None


def continues_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its prompts are texts that the model continues, without turns (`base.format: text`)."""
    return tokenizer.chat_template in TEXT_TEMPLATES


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Conversation) -> list[int]:
    """Token ids of a conversation up to the start of the assistant's answer; only the template writes control tokens.
    Raises UserError, see `chat_ids`."""
    with rendering(tokenizer):
        return chat_ids(tokenizer, prompt)


def encode_response(tokenizer: PreTrainedTokenizerBase, response: str, ended: bool = True) -> list[int]:
    """Token ids of an answer, with the end-of-sequence token when it `ended`; see `text_ids`."""
    ids = text_ids(tokenizer, response)
    return [*ids, tokenizer.eos_token_id] if ended else ids


def stop_ids(tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[str]) -> frozenset[int]:
    """The tokens that end a response: end-of-sequence, and those with these texts.

    Raises UserError for a text that is not exactly one token of the tokenizer.
    """
    ids = {int(tokenizer.eos_token_id)}
    for text in stop_tokens:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(found) != 1 or found[0] == tokenizer.unk_token_id:
            count = "no token" if len(found) == 1 else f"{len(found)} tokens"
            whose = f"the tokenizer {tokenizer.name_or_path}".rstrip()
            raise UserError(f"stop_tokens: {text!r} is {count} of {whose}; name texts of exactly one token")
        ids.add(int(found[0]))
    return frozenset(ids)


def decode_response(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop_ids: Collection[int] = frozenset()
) -> str:
    """The answer as text, without special tokens, outer white space, and the stop token that closes it. The white space
    before the continuation of a text is a part of it: prompt and response joined are the whole text."""
    if ids and ids[-1] in stop_ids:
        ids = ids[:-1]
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True)).rstrip()
    return text if continues_text(tokenizer) else text.lstrip()
