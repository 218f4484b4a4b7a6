"""Conversations with a model within its context, and answers as pieces of text while they are sampled."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.precision import Precision
from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import (
    PROBE,
    continues_text,
    decode_response,
    encode_prompt,
    read_tokenizer,
    settle,
    stop_ids,
)
from rlhf_core.errors import UserError
from rlhf_core.loading import load_config, loading
from rlhf_core.models.hf import context_length, default_device, load_causal_lm, place, refuse_scores
from rlhf_core.models.interpolation import interpolate, require_eta
from rlhf_core.models.sampling import stream_response

UNFINISHED = "�"
"""A decoder's output for an incomplete character."""
GREEDY = 1e-9
"""The temperature used for 0: logits that differ in float32 are then so far apart that the likeliest token has
probability 1. Equal logits share it."""


@dataclass
class ChatModel:
    """A language model and its conversation."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    system: str | None = None
    conversation: Conversation = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove everything but the system message."""
        self.conversation = [{"role": "system", "content": self.system}] if self.system else []

    @property
    def context(self) -> int:
        """Longest sequence of the model, tokens."""
        return context_length(self.model)

    def add_message(self, message: str, max_new_tokens: int) -> int:
        """Add a message of the user, and remove the oldest turns until an answer of `max_new_tokens` fits. Returns the
        number of removed messages. A model that continues texts has no earlier turns: each message is a text.

        Raises UserError, and leaves the conversation unchanged, where not a single token would fit.
        """
        if continues_text(self.tokenizer):  # each message is a text of its own
            self.conversation = [turn for turn in self.conversation if turn["role"] == "system"]
        before = list(self.conversation)
        self.conversation.append({"role": "user", "content": message})
        try:
            while self._room() < max_new_tokens and (oldest := self._oldest_turn()):
                del self.conversation[oldest[0] : oldest[1]]
            self._require_room()
        except UserError:
            self.conversation = before
            raise
        return len(before) + 1 - len(self.conversation)

    def answer(self, key: tuple[int, ...], max_new_tokens: int, temperature: float) -> Iterator[str]:
        """The answer, piece by piece; what was read of it is added to the conversation. `key` alone decides its
        randomness; at temperature 0 each token is the likeliest one, and `key` decides between equal ones. It ends at
        a stop token, at `max_new_tokens`, or where the context is full."""
        prompt, ids = encode_prompt(self.tokenizer, self.conversation), []

        def noted(tokens: Iterable[int]) -> Iterator[int]:
            for token in tokens:
                ids.append(token)
                yield token

        tokens = stream_response(
            self.model,
            prompt,
            key,
            max_new_tokens=min(max_new_tokens, self._room()),
            temperature=temperature or GREEDY,
            stop_ids=self.stop_ids,
        )
        try:
            yield from pieces(self.tokenizer, noted(tokens), self.stop_ids)
        finally:
            text = decode_response(self.tokenizer, ids, self.stop_ids)
            self.conversation.append({"role": "assistant", "content": text})

    def _room(self) -> int:
        return self.context - len(encode_prompt(self.tokenizer, self.conversation))

    def _require_room(self) -> None:
        if (room := self._room()) < 1:
            raise UserError(
                f"{self.name}: the message makes {self.context - room} tokens, and the model reads {self.context}; "
                "shorten it"
            )

    def _oldest_turn(self) -> tuple[int, int] | None:
        """Places of the two oldest user messages; None where there is only one."""
        users = [place for place, message in enumerate(self.conversation) if message["role"] == "user"]
        return (users[0], users[1]) if len(users) > 1 else None


@dataclass(frozen=True)
class Start:
    """The model that an interpolation starts from: the weights are start + eta·(model − start)."""

    folder: Path
    eta: float
    trust_remote_code: bool = False


def load_chat_model(
    folder: Path,
    name: str,
    system: str | None = None,
    *,
    trust_remote_code: bool = False,
    start: Start | None = None,
    precision: Precision = "float32",
) -> ChatModel:
    """The language model in a folder, its weights in this precision, with `start` interpolated. Raises
    UserError for a folder that is missing or without a language model, a tokenizer without eos token or chat template,
    as `loading`, and as `interpolate`."""
    require_language_model(folder, trust_remote_code)
    if start is not None:
        require_eta(start.eta, "--eta")
        require_language_model(start.folder, start.trust_remote_code)
    try:
        tokenizer = read_tokenizer(folder, trust_remote_code=trust_remote_code)
        settle(tokenizer)
        device = default_device()
        load = partial(load_causal_lm, frozen=precision, device=device)
        model = place(load(folder, trust_remote_code=trust_remote_code), device)
        if start is not None:
            other = place(load(start.folder, trust_remote_code=start.trust_remote_code), device)
            model = interpolate(other, model, start.eta)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot be loaded ({' '.join(str(error).split())})") from None
    if tokenizer.eos_token_id is None or not tokenizer.chat_template:
        raise UserError(f"{folder}: the tokenizer needs an eos token and a chat template; the stage `base` adds them")
    chat = ChatModel(name, model, tokenizer, stop_ids(tokenizer, model), system)
    encode_prompt(tokenizer, [*chat.conversation, *PROBE])
    return chat


def require_language_model(folder: Path, trust_remote_code: bool = False) -> None:
    """Raise UserError unless config.json in the folder is that of a language model."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a model folder, such as models/policy (`leash run` makes it)")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: holds no model (no config.json){_note(folder)}")
    try:
        with loading(folder):
            config = load_config(folder, None, trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: config.json cannot be read ({' '.join(str(error).split())})") from None
    refuse_scores(folder, config)


def pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int], stop_ids: frozenset[int] = frozenset()
) -> Iterator[str]:
    """The text of a response while it is sampled; joined, the pieces are `decode_response`. Incomplete characters and
    white space at the end are held back, since later tokens may change them."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        ready = decode_response(tokenizer, ids, stop_ids).rstrip(UNFINISHED).rstrip()
        if ready.startswith(shown) and len(ready) > len(shown):
            yield ready[len(shown) :]
            shown = ready
    whole = decode_response(tokenizer, ids, stop_ids)
    if whole.startswith(shown) and len(whole) > len(shown):
        yield whole[len(shown) :]


def _note(folder: Path) -> str:
    """The first line of the folder's README.md, which a stage that is switched off writes."""
    readme = folder / "README.md"
    line = readme.read_text(encoding="utf-8", errors="replace").strip().split("\n")[0] if readme.is_file() else ""
    return f"; its README.md says: {line}" if line else ""
