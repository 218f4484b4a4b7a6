"""A judge behind an OpenAI-compatible endpoint. Every verdict is in the stage's journal as soon as it is there: a stage
that was stopped or killed sends no question again."""

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
from tasks.params.runtime import ApiParams
from tasks.stage.journal import Journal
from tasks.stage.stage import Stage

ANSWER_TOKENS = 8
CHARACTERS_PER_TOKEN = 4
"""For the number of tokens that is printed before the first request: the server's tokenizer is not known here."""
OPTIONS: Mapping[str, Any] = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "logprobs": True, "top_logprobs": 5}
"""Left out one by one where a server refuses them by name."""
ONE_LETTER = re.compile(rf"\W*({'|'.join(LETTERS)})\W*")

Answer = tuple[float | None, int]
"""The verdict (None: unread) and the tokens that the server counted."""


def verdict_of(choice: Any) -> float | None:
    """1 where the first letter won, ½ for a tie, 0 for the second letter, None where the answer cannot be read.

    `choice` is one of a chat completion. The letters' probabilities as the first token decide, over all spellings of
    the token, such as " A"; where the server gives none, or neither letter is among them, the text must be one letter.
    """
    mass = dict.fromkeys(LETTERS, 0.0)
    tokens = (choice.logprobs and choice.logprobs.content) or []
    for token in tokens[0].top_logprobs if tokens else []:
        if token.token.strip() in mass:
            mass[token.token.strip()] += math.exp(token.logprob)
    first, second = mass.values()
    if first or second:
        tie = first and second and abs(math.log(first / second)) <= TIE_NATS
        return 0.5 if tie else float(first > second)
    letter = ONE_LETTER.fullmatch((choice.message and choice.message.content) or "")
    return float(letter[1] == LETTERS[0]) if letter else None


@dataclass
class EndpointJudge:
    """A `PairJudge` that sends each pair, in each order, once."""

    stage: Stage[Any]
    client: openai.OpenAI
    model: str
    name: str
    question: str
    budget: Budget
    settings: ApiParams
    journal: Journal
    options: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))

    def __post_init__(self) -> None:
        self.known = {key: math.nan if verdict is None else verdict for key, verdict, _ in self.journal.pieces}
        self.budget.used_before(len(self.journal.pieces), sum(tokens for _, _, tokens in self.journal.pieces))

    def prefer(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
        """See `PairJudge`. Raises UserError where the budget does not suffice or the endpoint fails; verdicts that
        came before stay."""
        rows = zip(prompts, firsts, seconds, strict=True)
        questions = [fill(self.question, LETTERS, prompt, first, second) for prompt, first, second in rows]
        keys = [hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest() for question in questions]
        new = {key: question for key, question in zip(keys, questions, strict=True) if key not in self.known}
        if new:
            tokens = sum(len(text) // CHARACTERS_PER_TOKEN + ANSWER_TOKENS for text in new.values())
            self.stage.log(f"judge {self.name}: {self.budget.plan(len(new), tokens)}")
            self._send(new)
        return [self.known[key] for key in keys]

    def _send(self, new: Mapping[str, str]) -> None:
        """Send the questions, at most `concurrency` at a time, and keep every answer. After a signal or a failure no
        other question is sent, and the answers to those on their way are kept."""
        waiting, sent, failure = iter(new.items()), dict[Future[Answer], str](), None
        progress, done = self.stage.progress(len(new), "verdict"), 0
        interrupts = self.stage.interrupts
        with interrupts.deferred(), ThreadPoolExecutor(self.settings.concurrency) as pool:
            while True:
                while len(sent) < self.settings.concurrency and not failure and not interrupts.stopping:
                    if (item := next(waiting, None)) is None:
                        break
                    sent[pool.submit(self._answer, item[1])] = item[0]
                if not sent:
                    break
                for future in wait(sent, return_when=FIRST_COMPLETED).done:
                    key = sent.pop(future)
                    if future.exception():
                        failure = failure or future.exception()
                        continue
                    verdict, tokens = future.result()
                    self.journal.append([key, verdict, tokens])
                    self.known[key] = math.nan if verdict is None else verdict
                    done += 1
                progress.update(done, tokens=self.budget.tokens)
        if failure:
            raise failure

    def _answer(self, question: str) -> Answer:
        """The verdict on one question. Raises UserError where the endpoint fails."""
        options = dict(self.options)
        while True:
            try:
                found = self.client.chat.completions.create(
                    model=self.model, messages=[{"role": "user", "content": question}], **options
                )
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                accepted = _without_refused(options, str(error))
                if accepted == options:
                    raise self._failed(error) from None
                self.options = options = accepted
            except (openai.OpenAIError, ValueError) as error:
                raise self._failed(error) from None
            else:
                if not getattr(found, "choices", None):
                    raise self._failed("its answer is no chat completion")
                tokens = found.usage.total_tokens if found.usage else 0
                self.budget.add(tokens)
                return verdict_of(found.choices[0]), tokens

    def _failed(self, error: object) -> UserError:
        """One line without the key."""
        text = " ".join(str(error).split())
        key = self.client.api_key
        return UserError(
            f"the judge {self.name}: {text.replace(key, '(key)') if key else text}; {len(self.known)} verdicts are "
            "saved, and the same command goes on from there"
        )


def _without_refused(options: Mapping[str, Any], message: str) -> dict[str, Any]:
    """The options of a request without those that the server's error message names. New models of OpenAI have another
    name for `max_tokens`."""
    kept = {name: value for name, value in options.items() if name not in message}
    if "max_tokens" in options.keys() - kept.keys():
        kept["max_completion_tokens"] = ANSWER_TOKENS
    return kept


def endpoint_judge(stage: Stage[Any], params: JudgeParams, question: str) -> EndpointJudge:
    """The judge of `params` (`kind: api`) for this stage. Raises UserError where the key's variable is not set, and for
    a wrong template."""
    require_question(question)
    settings, address, model = stage.runtime.api, params.base_url, params.model
    assert address is not None
    assert model is not None
    budget = Budget(settings.max_requests, settings.max_tokens)
    client = openai.OpenAI(
        api_key=_key(params.key_variable),
        base_url=address,
        timeout=settings.timeout_seconds,
        max_retries=settings.retries,
        http_client=openai.DefaultHttpxClient(event_hooks={"request": [lambda _: budget.take()]}),
    )
    name = f"{model} at {address}"
    stage.exempt(f"the verdicts of {name} come from a server, which may answer differently another time")
    journal = Journal(stage.state_dir / "verdicts.journal", stage.log)
    return EndpointJudge(stage, client, model, name, question, budget, settings, journal)


def _key(variable: str | None) -> str:
    """The key of the environment; a word that is none where the endpoint needs no key."""
    if variable is None:
        return "none"
    if not (key := os.environ.get(variable, "").strip()):
        raise UserError(f"judge.key_variable: the environment has no {variable}; set it to the key of the endpoint")
    return key
