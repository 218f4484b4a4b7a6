"""Tokenizers: training, checks of pad, eos and chat template, and text ↔ token ids. All stages encode with
`encode_prompt` and `encode_response`, so that they get the same tokens."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_core.data.chat import Conversation
from rlhf_core.data.classifiers import no_template
from rlhf_core.data.control_tokens import chat_ids, text_ids
from rlhf_core.errors import UserError
from rlhf_core.loading import loading

Reads = Literal["conversation", "text", "answer", "pair"]
"""What a classifier from elsewhere reads: the conversation with the answer through its chat template, prompt and answer
as one text, the answer alone, or both as its tokenizer's pair of texts."""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
PROBE: Conversation = [{"role": "user", "content": "Good morning."}]
"""A conversation that every chat template must render, some behind a system message."""
SYSTEM: Conversation = [{"role": "system", "content": "Be brief."}]
ANSWER = "7306"
"""The answer in a probe; a number, which no template changes."""
REPLY: Conversation = [{"role": "assistant", "content": ANSWER}]
CONVERSATIONS: tuple[Conversation, ...] = ([*PROBE, *REPLY], [*SYSTEM, *PROBE, *REPLY])

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CHAT_TEMPLATES = (CHAT_TEMPLATE, "{{ bos_token }}" + CHAT_TEMPLATE)
"""The second for tokenizers that put a token before every text."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATMLS = (CHATML, "{{ bos_token }}" + CHATML)
"""For tokenizers that have its tokens and no template, as base models do whose chat models use it; the second as in
`CHAT_TEMPLATES`."""

TEXT_TEMPLATE = (
    "{% if messages | length > 1 %}{{ raise_exception('base.format is text: a prompt is one text, without turns') }}"
    "{% endif %}{{ messages[0]['content'] }}"
)
"""The prompt as it is, for a model that continues texts."""
TEXT_TEMPLATES = (TEXT_TEMPLATE, "{{ bos_token }}" + TEXT_TEMPLATE)
"""The second as in `CHAT_TEMPLATES`."""

PINNED = datetime(2024, 7, 26)
"""The day that a chat template writes in place of today: the default of Llama 3's templates."""
CLOCKS = (datetime(1999, 2, 6, 4, 5, 6, 7), datetime(2032, 11, 24, 17, 48, 59, 8))
"""Two moments that differ in each of the `DIRECTIVES`."""
DIRECTIVES = tuple(f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcCdDeFfgGhHIjklmMpPrRsSTuUVwWxXyY")
"""What strftime writes; "-" is for numbers without a zero before them."""
TODAY = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
PASSED = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
"""What transformers passes to every chat template, besides the special tokens."""
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Marks of transformers around an assistant's text, which jinja does not know."""
FOR_PADDING = (re.compile("pad", re.IGNORECASE), re.compile("reserved|unused|extra", re.IGNORECASE), re.compile(""))
"""Names of control tokens in the order in which they are chosen as pad token."""


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
    """The tokenizer of a model folder, after `settle`, checked by `require_usable`; `trust_remote_code` runs the
    folder's own code."""
    tokenizer = read_tokenizer(path, trust_remote_code=trust_remote_code)
    settle(tokenizer)
    return require_usable(tokenizer)


def read_tokenizer(
    path: str | Path, revision: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id, unchecked. Raises UserError, see `loading`."""
    with loading(path):
        return AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=trust_remote_code)


def classifier_tokenizer(
    folder: Path, reads: str | None, continues: bool, key: str, trust_remote_code: bool = False
) -> tuple[PreTrainedTokenizerBase, Reads]:
    """The tokenizer of a classifier from elsewhere, and what it reads: what `reads` says, else the conversation, or the
    text where the policy `continues` texts. Raises UserError, naming the parameter `key`, where it has no chat template
    for the conversation, and as `settle`."""
    tokenizer = read_tokenizer(folder, trust_remote_code=trust_remote_code)
    if reads is not None or continues:
        return tokenizer, cast(Reads, reads or "text")
    if not tokenizer.chat_template:
        raise no_template(key)
    settle(tokenizer)
    return tokenizer, "conversation"


def complete(
    tokenizer: PreTrainedTokenizerBase,
    pad_token: str,
    plain: bool = False,
    values: Mapping[str, bool | int | str] = MappingProxyType({}),
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Add a pad token and a chat template to a pretrained tokenizer that has none, and `settle` it. `plain`: the
    template of a model that continues texts, in place of its own. A control token without a use becomes the pad token;
    `pad_token` is added where there is none. `values`: see `set_defaults`.

    Returns the tokenizer, and the changes as text for the log. Raises UserError without an eos token.
    """
    repairs, added, eos = [], "", tokenizer.eos_token
    starts = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if plain:
        tokenizer.chat_template = TEXT_TEMPLATES[starts]
        repairs.append("chat template replaced: prompts are texts")
    elif not tokenizer.chat_template and {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_added_vocab().keys():
        tokenizer.chat_template = CHATMLS[starts]
        repairs.append("chat template added: ChatML, whose tokens the tokenizer has")
    elif not tokenizer.chat_template:
        tokenizer.chat_template, added = CHAT_TEMPLATES[starts], "chat template added"
    repairs += set_defaults(tokenizer, values) + settle(tokenizer)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no eos token; a response could never end")
    with rendering(tokenizer):
        end, behind = _turn_end(tokenizer)
    if behind and not end:
        repairs.append(
            f"the chat template closes an answer with {behind!r}, which is no control token: answers end with "
            f"{tokenizer.eos_token}"
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        unused = _unused_token(tokenizer)
        tokenizer.add_special_tokens({"pad_token": unused or pad_token})
        reason = "which was the eos token" if unused == eos else "which has no use"
        repairs.append(f"pad token set to {unused}, {reason}" if unused else f"pad token set to {pad_token}")
    if added:
        tokenizer.add_special_tokens({"additional_special_tokens": list(ROLES)})
        repairs.append(added)
    tokenizer.padding_side = "left"
    return require_usable(tokenizer), repairs


def set_defaults(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, bool | int | str]) -> list[str]:
    """Give variables of the chat template, such as Qwen 3's `enable_thinking`, these values where a caller passes none:
    they are written at the head of the template, and so are saved and loaded with it.

    Returns the changes as text for the log. Raises UserError for a name that the template does not read, or that every
    rendering passes, such as `messages`.
    """
    if not values:
        return []
    with rendering(tokenizer):
        template = tokenizer.get_chat_template()
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        read = find_undeclared_variables(environment.parse(GENERATION.sub("", template)))
    free = read - {*PASSED, *environment.globals, *tokenizer.special_tokens_map}
    if unknown := sorted(values.keys() - free):
        names = ", ".join(sorted(free)) or "no variable of its own"
        raise UserError(
            f"base.chat_template_kwargs: the chat template of {tokenizer.name_or_path} does not read "
            f"{', '.join(unknown)}; it reads {names}"
        )
    for name, value in values.items():
        written = json.dumps(value, ensure_ascii=False)
        template = f"{{%- if {name} is not defined %}}{{%- set {name} = {written} %}}{{%- endif %}}\n{template}"
    tokenizer.chat_template = template
    return [f"the chat template's {name} is {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]


def settle(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Make prompts independent of the day: a chat template writes the day `PINNED`. Make the control token with which
    it closes an assistant's turn the eos token: answers close with it. What else the template writes is unchanged.

    Returns the changes as text for the log; what the stage `base` saved has none. Raises UserError for a template that
    writes today's date in another way than `strftime_now("…")`.
    """
    if not tokenizer.chat_template:
        return []
    with rendering(tokenizer):
        changes, template = [], tokenizer.get_chat_template()
    if TODAY.search(template):  # also where no probe comes
        template = TODAY.sub(lambda call: call[1] + PINNED.strftime(call[2]) + call[1], template)
        tokenizer.chat_template = template
        changes.append(f"the chat template writes {PINNED:%d %b %Y} in place of today's date")
    if "strftime_now" in template and _at(tokenizer, CLOCKS[0]) != _at(tokenizer, CLOCKS[1]):
        raise UserError(
            f"{tokenizer.name_or_path}: its chat template writes today's date, so that prompts have other tokens "
            "tomorrow; write a fixed date in place of strftime_now in chat_template.jinja"
        )
    (end, _), before = _turn_end(tokenizer), tokenizer.eos_token
    if end and end != before:
        if before and "eos_token" in template:
            tokenizer.chat_template = f"{{%- set eos_token = {json.dumps(before, ensure_ascii=False)} %}}\n{template}"
        token = tokenizer.added_tokens_decoder[tokenizer.convert_tokens_to_ids(end)]
        token.special = True  # all else of it stays, such as whether it takes the white space behind it
        tokenizer.add_special_tokens({"eos_token": token})
        changes.append(f"answers end with {end}, as the chat template closes them; the tokenizer's eos was {before}")
    return changes


def _at(tokenizer: PreTrainedTokenizerBase, moment: datetime) -> list[str | None]:
    """Prompts and conversations as the chat template renders them at a moment."""
    parts = "".join(f"|replace({text!r}, {moment.strftime(text)!r})" for text in DIRECTIVES)
    clock = f"{{% macro strftime_now(format) %}}{{{{ format{parts} }}}}{{% endmacro %}}\n"
    prompts = [PROBE, [*SYSTEM, *PROBE], [*PROBE, *REPLY, *PROBE]]
    return [_rendered(tokenizer, turns, clock, add_generation_prompt=True) for turns in prompts] + [
        _rendered(tokenizer, turns, clock) for turns in CONVERSATIONS
    ]


def _rendered(
    tokenizer: PreTrainedTokenizerBase, turns: Conversation, clock: str = "", add_generation_prompt: bool = False
) -> str | None:
    """A conversation as the chat template renders it; None where it fails. `clock` is put before the template."""
    template = clock + tokenizer.get_chat_template()
    try:
        return str(
            tokenizer.apply_chat_template(
                turns, tokenize=False, chat_template=template, add_generation_prompt=add_generation_prompt
            )
        )
    except TEMPLATE_ERRORS:
        return None


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, str]:
    """The first control token behind an assistant's answer, None where the template writes none; and all it writes
    there, without outer white space."""
    rendered = (_rendered(tokenizer, turns) or "" for turns in CONVERSATIONS)
    _, answer, behind = next(filter(None, rendered), "").rpartition(ANSWER)
    behind = behind.strip() if answer else ""
    tokens = sorted((token for token in tokenizer.get_added_vocab() if token.strip()), key=len, reverse=True)
    found = re.search("|".join(map(re.escape, tokens)) or "(?!)", behind)
    return found and found[0], behind


def _unused_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A control token of the vocabulary that neither the chat template, nor the tokenizer around texts, nor any text
    makes."""
    names = ("eos_token", "bos_token", "cls_token", "sep_token", "mask_token")
    used = {getattr(tokenizer, name) for name in names} | _unknown_tokens(tokenizer)
    used |= set(tokenizer.convert_ids_to_tokens(tokenizer("a", "a")["input_ids"]))
    rendered = (_rendered(tokenizer, turns) or "" for turns in CONVERSATIONS)
    written = "".join([tokenizer.get_chat_template(), *rendered])
    control = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    unused = [token for token in control if token not in used and token not in written and len(token) > 1]
    return next((token for name in FOR_PADDING for token in unused if name.search(token)), None)


def _unknown_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str | None]:
    """The tokens that stand for text outside the vocabulary; none where each byte has a token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {tokenizer.unk_token}
    state, vocabulary = json.loads(backend.to_str()), tokenizer.get_vocab()
    model, steps = state["model"], json.dumps([state["normalizer"], state["pre_tokenizer"]])
    fallback = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if fallback or ("ByteLevel" in steps and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())):
        return set()
    unigram = model.get("unk_id")
    return {tokenizer.unk_token, model.get("unk_token"), None if unigram is None else model["vocab"][unigram][0]}


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
            tokenizer.apply_chat_template([*SYSTEM, *PROBE], add_generation_prompt=True, tokenize=False)
    return tokenizer


TEMPLATE_ERRORS = (TemplateError, ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""What a chat template, which is a program, may raise."""


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """A chat template is a program; transformers runs it in jinja's sandbox. Raises UserError for what the sandbox
    forbids, and for a template that fails."""
    try:
        yield
    except TEMPLATE_ERRORS as error:
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


def encode_answered(tokenizer: PreTrainedTokenizerBase, prompt: Conversation, answer: str) -> list[int]:
    """Token ids of a conversation with its answer, closed as the chat template closes it; otherwise as
    `encode_prompt`."""
    with rendering(tokenizer):
        return chat_ids(tokenizer, [*prompt, {"role": "assistant", "content": answer}], answered=True)


def same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have the same vocabulary, chat template and end of an answer, so that one may read the
    other's ids."""

    def made_of(tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
        return tokenizer.get_vocab(), tokenizer.chat_template, tokenizer.eos_token_id

    return one is other or made_of(one) == made_of(other)


def encode_response(tokenizer: PreTrainedTokenizerBase, response: str, ended: bool = True) -> list[int]:
    """Token ids of an answer in its `answer_text`, with the end-of-sequence token when it `ended`; see `text_ids`."""
    ids = text_ids(tokenizer, answer_text(response, continues_text(tokenizer)))
    return [*ids, tokenizer.eos_token_id] if ended else ids


def encode_turns(
    tokenizer: PreTrainedTokenizerBase, prompt: Conversation, response: str
) -> tuple[list[int], list[int], list[bool]]:
    """A conversation, cut before the first answer of the assistant: the token ids before it, those from it on, and
    which of these are answers, `response` and the earlier ones in the prompt, each closed as `encode_response` does.

    Raises UserError where the template does not write an earlier answer with the very tokens of `encode_prompt` before
    it and of `encode_response`: the model would imitate what it cannot write.
    """
    continues = continues_text(tokenizer)
    prompt = [m if m["role"] != "assistant" else {**m, "content": answer_text(m["content"], continues)} for m in prompt]
    whole, answers = encode_prompt(tokenizer, prompt), list[tuple[int, int]]()
    for place, message in enumerate(prompt):
        if message["role"] == "assistant":
            before = encode_prompt(tokenizer, prompt[:place]) if place else []
            until = [*before, *encode_response(tokenizer, message["content"])]
            if not place or whole[: len(until)] != until:
                raise UserError(
                    f"sft.turns is all, and the chat template does not write turn {place + 1}, an answer of the "
                    "assistant, as the model would write it, with its end; set sft.turns: last, or leave the row out"
                )
            answers.append((len(before), len(until)))
    ids = [*whole, *encode_response(tokenizer, response)]
    answers.append((len(whole), len(ids)))
    first = answers[0][0]
    counted = [any(start <= place < end for start, end in answers) for place in range(first, len(ids))]
    return ids[:first], ids[first:], counted


def answer_text(response: str, continues: bool) -> str:
    """The one form of an answer, which models, judges and functions read: without outer white space. `continues`: the
    white space before the continuation of a text is a part of it: prompt and response joined are the whole text."""
    return response.rstrip() if continues else response.strip()


def stop_ids(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None, stop_tokens: Sequence[str] = ()
) -> frozenset[int]:
    """The tokens that end a response (rule 26): `end_ids`, texts that the model's generation_config.json names, as a
    stage saves its stop tokens, and those with these texts.

    Raises UserError for a text that is not exactly one token of the tokenizer.
    """
    settings, config = getattr(model, "generation_config", None), model and model.config
    ids = {*end_ids(tokenizer, settings, config), *(eos_ids(settings) if _is_written(settings, config) else ())}
    for text in stop_tokens:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(found) != 1 or found[0] == tokenizer.unk_token_id:
            count = "no token" if len(found) == 1 else f"{len(found)} tokens"
            whose = f"the tokenizer {tokenizer.name_or_path}".rstrip()
            raise UserError(f"stop_tokens: {text!r} is {count} of {whose}; name texts of exactly one token")
        ids.add(int(found[0]))
    return frozenset(ids)


def end_ids(
    tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig | None, config: PreTrainedConfig | None = None
) -> frozenset[int]:
    """The tokenizer's eos, and the control tokens that are an eos in a model's generation_config or config. config.json
    may have its from a default: there bos, unk and pad are none."""
    written = _is_written(settings, config)
    default = {*eos_ids(config), *(() if written else eos_ids(settings))}
    default -= {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    named = default | (set(eos_ids(settings)) if written else set())
    return frozenset({int(tokenizer.eos_token_id), *(named & tokenizer.added_tokens_decoder.keys())})


def _is_written(settings: GenerationConfig | None, config: PreTrainedConfig | None) -> bool:
    """Whether the eos tokens are those of a generation_config.json; else they are copied from config.json."""
    return settings is not None and (not settings._from_model_config or eos_ids(settings) != eos_ids(config))


def closed(responses: Iterable[Sequence[int]], ended: Iterable[bool], eos_id: int) -> list[list[int]]:
    """The token ids of sampled responses, with the tokenizer's eos in place of the stop token of each that has ended,
    as `encode_response` closes texts: the stop token is no part of the answer."""
    return [[*ids[:-1], eos_id] if end else list(ids) for ids, end in zip(responses, ended, strict=True)]


def complete_answer(ids: list[int], eos_id: int, room: int) -> list[int]:
    """An answer's token ids with the eos token that it lacks, where it was cut off. Of an answer that fills `room` the
    last token gives way to it; a longer one stays too long."""
    return ids if ids[-1:] == [eos_id] else [*(ids[:-1] if len(ids) == room else ids), eos_id]


def eos_ids(settings: GenerationConfig | PreTrainedConfig | None) -> list[int]:
    """The eos tokens of a model's config or generation_config."""
    named = getattr(settings, "eos_token_id", None)
    return [] if named is None else [int(token) for token in (named if isinstance(named, list) else [named])]


def decode_response(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop_ids: Collection[int] = frozenset()
) -> str:
    """The `answer_text` of a response, without special tokens and the stop token that closes it."""
    if ids and ids[-1] in stop_ids:
        ids = ids[:-1]
    return answer_text(str(tokenizer.decode(list(ids), skip_special_tokens=True)), continues_text(tokenizer))
