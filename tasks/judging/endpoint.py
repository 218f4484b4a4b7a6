"""A judge behind an OpenAI-compatible endpoint. Every verdict is in the stage's journal as soon as it is there: a stage
that was stopped or killed sends no answered question again."""

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import openai

from rlhf_core.data.chat import Conversation
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judge_model import LETTERS, TIE_NATS, fill, require_question
from tasks.judging.budget import Budget
from tasks.params.judge import JudgeParams
from tasks.stage.journal import Journal
from tasks.stage.stage import Stage

CHARACTERS_PER_TOKEN = 4
"""For the number of tokens that is printed before the first request: the server's tokenizer is not known here."""
TOP_LOGPROBS = 5
"""Most probable first tokens that are asked for."""
LEAST_MASS = 0.5
"""Probability of both letters together below which the first token is no verdict, but perhaps a thought."""
ONE_LETTER = re.compile(rf"\W*({'|'.join(LETTERS)})\W*")
OF_OTHER_SERVERS = ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_CUSTOM_HEADERS")
"""Variables that the client would send as headers to any address."""

Answer = tuple[float | None, int]
"""The verdict (None: unread) and the tokens."""


def verdict_of(choice: Any) -> float | None:
    """1 where the first letter won, ½ for a tie, 0 for the second letter, None where the answer cannot be read.

    `choice` is one of a chat completion. The letters' probabilities as the first token decide, over all spellings of
    the token, such as " A"; where the server gives none, or the letters are improbable, the text must be one letter.
    """
    mass = dict.fromkeys(LETTERS, 0.0)
    tokens = (choice.logprobs and choice.logprobs.content) or []
    for token in (tokens[0].top_logprobs or []) if tokens else []:
        if token.token.strip() in mass:
            mass[token.token.strip()] += math.exp(token.logprob)
    first, second = mass.values()
    if first + second >= LEAST_MASS:
        tie = first and second and abs(math.log(first / second)) <= TIE_NATS
        return 0.5 if tie else float(first > second)
    letter = ONE_LETTER.fullmatch((choice.message and choice.message.content) or "")
    return float(letter[1] == LETTERS[0]) if letter else None


@dataclass
class EndpointJudge:
    """A `PairJudge` that sends each question once, and both orders of a pair together. Raises UserError, when made,
    where the key's variable is not set, and for a wrong template."""

    stage: Stage[Any]
    params: JudgeParams
    question: str
    failed: bool = False
    planned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        require_question(self.question)
        settings = self.stage.runtime.api
        self.budget = Budget(settings.max_requests, settings.max_tokens, self.stage.state_dir / "requests")
        self.client = self._connect()
        self.journal = Journal(self.stage.state_dir / "verdicts.journal", self.stage.log)
        self.known = {key: math.nan if verdict is None else verdict for key, verdict, _ in self.journal.pieces}
        self.budget.tokens += sum(tokens for _, _, tokens in self.journal.pieces)
        self.options: dict[str, Any] = {
            "temperature": 0, "max_tokens": self.params.answer_tokens, "logprobs": True, "top_logprobs": TOP_LOGPROBS
        }  # fmt: skip
        self.stage.exempt(f"the verdicts of {self.name} come from a server, which may answer differently another time")

    def _connect(self) -> openai.OpenAI:
        settings = self.stage.runtime.api
        hidden = {name: os.environ.pop(name) for name in OF_OTHER_SERVERS if name in os.environ}
        try:
            return openai.OpenAI(
                api_key=_secret(self.params.key_variable),
                base_url=self.params.base_url,
                timeout=settings.timeout_seconds,
                max_retries=settings.retries,
                http_client=openai.DefaultHttpxClient(event_hooks={"request": [self.before_request]}),
            )
        finally:
            os.environ.update(hidden)

    @property
    def name(self) -> str:
        """The name in tables and pictures."""
        return f"{self.params.model} at {self.params.base_url}"

    def prefer(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
        """See `PairJudge`. The other order of each pair is sent as well, since every verdict is used in both. Raises
        UserError where the budget does not suffice or the endpoint fails; verdicts that came before stay."""
        self.plan(prompts, firsts, seconds)
        self._send(self._new(prompts, firsts, seconds))
        return [self.known[_key_of(question)] for question in self._questions(prompts, firsts, seconds)]

    def plan(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> None:
        """Print what judging these pairs in both orders takes, and the budget. Raises UserError where the requests are
        more than what is left of it."""
        new = self._new(prompts, firsts, seconds)
        if not new.keys() <= self.planned:
            self.planned |= new.keys()
            self.stage.log(f"judge {self.name}: {self.budget.plan(len(new), sum(map(self._estimate, new.values())))}")

    def _new(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> dict[str, str]:
        """The questions without an answer, in both orders, by their keys."""
        both = [*self._questions(prompts, firsts, seconds), *self._questions(prompts, seconds, firsts)]
        keyed = {_key_of(question): question for question in both}
        return {key: question for key, question in keyed.items() if key not in self.known}

    def _questions(self, *columns: Sequence[Any]) -> list[str]:
        """The question about each row of prompts, first and second answers."""
        return [fill(self.question, LETTERS, *row) for row in zip(*columns, strict=True)]

    def _estimate(self, question: str) -> int:
        """Tokens of a question and its answer, for a server that does not count them."""
        return len(question) // CHARACTERS_PER_TOKEN + self.params.answer_tokens

    def _send(self, new: Mapping[str, str]) -> None:
        """Send the questions, some at a time, and keep every answer. After a signal or a failure no other request is
        sent, and the answers to those on their way are kept; a second signal does not wait for them."""
        waiting, sent, failure = iter(new.items()), dict[Future[Answer], str](), None
        progress, done = self.stage.progress(len(new), "verdict"), 0
        interrupts, most = self.stage.interrupts, self.stage.runtime.api.concurrency
        pool = ThreadPoolExecutor(most)
        try:
            with interrupts.deferred():
                while True:
                    while len(sent) < most and not failure and not interrupts.stopping:
                        if (item := next(waiting, None)) is None:
                            break
                        sent[pool.submit(self._answer, item[1])] = item[0]
                    if not sent:
                        break
                    for future in wait(sent, return_when=FIRST_COMPLETED).done:
                        key = sent.pop(future)
                        if error := future.exception():
                            failure, self.failed = failure or error, True
                            continue
                        self._keep(key, *future.result())
                        done += 1
                    progress.update(done, tokens=self.budget.tokens)
        except BaseException:
            self.client.close()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if failure:
            raise failure

    def _keep(self, key: str, verdict: float | None, tokens: int) -> None:
        self.journal.append([key, verdict, tokens])
        self.known[key] = math.nan if verdict is None else verdict

    def before_request(self, request: Any) -> None:
        """Called by the HTTP client before every request, repeated ones included. Raises UserError where none may be
        sent any more."""
        if self.stage.interrupts.stopping or self.failed:
            raise self._error("stopped")
        self.budget.take()
        if self.params.key_variable is None:
            request.headers.pop("Authorization", None)

    def _answer(self, question: str) -> Answer:
        """The verdict on one question. Raises UserError where the endpoint fails."""
        options = dict(self.options)
        while True:
            try:
                found = self.client.chat.completions.create(
                    model=str(self.params.model), messages=[{"role": "user", "content": question}], **options
                )
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if "context" in str(error).lower():  # this pair is too long for the model
                    return None, 0
                accepted = self._without_refused(options, str(error))
                if accepted == options:
                    raise self._error(error) from None
                self.options = options = accepted
            except (openai.OpenAIError, ValueError) as error:
                raise self._error(error) from None
            else:
                return self._read(found, question)

    def _read(self, found: Any, question: str) -> Answer:
        """The verdict of a chat completion. Raises UserError for what is none, and for an answer that was cut off
        before its first word."""
        choices = getattr(found, "choices", None)
        if not isinstance(choices, list) or not choices:
            raise self._error("its answer is no chat completion")
        counted = getattr(getattr(found, "usage", None), "total_tokens", None)
        tokens = counted if isinstance(counted, int) and counted > 0 else self._estimate(question)
        self.budget.add(tokens)
        try:
            verdict = verdict_of(choices[0])
            if verdict is None and choices[0].finish_reason == "length" and not choices[0].message.content:
                raise self._error(
                    f"an answer was cut off after {self.params.answer_tokens} tokens, before its first word (a model "
                    "that thinks first); raise judge.answer_tokens"
                )
        except (AttributeError, KeyError, IndexError, TypeError, OverflowError):
            verdict = None
        return verdict, tokens

    def _without_refused(self, options: Mapping[str, Any], message: str) -> dict[str, Any]:
        """The options of a request without those that the server's error message names. New models of OpenAI have
        another name for `max_tokens`."""
        kept = {name: value for name, value in options.items() if name not in message}
        if "max_tokens" in options.keys() - kept.keys():
            kept["max_completion_tokens"] = self.params.answer_tokens
        return kept

    def _error(self, error: object) -> UserError:
        """One line without the key."""
        text = str(error)
        if self.params.key_variable is not None:
            text = text.replace(str(self.client.api_key), "(key)")
        return UserError(
            f"the judge {self.name}: {' '.join(text.split())}; {len(self.known)} verdicts are saved, and the same "
            "command goes on from there"
        )


def _key_of(question: str) -> str:
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()


def _secret(variable: str | None) -> str:
    """The key of the environment; a word that is not sent where the endpoint needs no key."""
    if variable is None:
        return "none"
    if not (key := os.environ.get(variable, "").strip()):
        raise UserError(f"judge.key_variable: the environment has no {variable}; set it to the key of the endpoint")
    return key
