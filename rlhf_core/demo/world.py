"""The demo world: seeded prompts, and demonstrations of mixed quality, which do not depend on the rubric."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random

from rlhf_core.demo.phrases import (
    ANY_FRAMES,
    DISMISSALS,
    FILLERS,
    LIST_FRAMES,
    PLAIN_END,
    PROMPT_FRAMES,
    REASON_ENDS,
    RUNNING_EXAMPLE,
    capitalised,
    joined,
)
from rlhf_core.demo.scanner import prompt_scanner
from rlhf_core.demo.topics import DOMAIN_OF, DOMAINS, NEEDS, TOPICS, Domain, Topic
from rlhf_core.errors import UserError

NEEDS_PER_DOMAIN = min(len(domain.needs) for domain in DOMAINS)


@dataclass(frozen=True)
class Question:
    """The topic and the need (a key of `NEEDS`, or None) of a prompt."""

    topic: Topic
    need: str | None


@dataclass(frozen=True)
class DemoWorld:
    """Short prompts and answers. Equal seeds give equal text on every machine, in any order of calls."""

    seed: int
    domains: int = len(DOMAINS)
    """Number of domains, food first; fewer make a smaller language."""
    needs: int = NEEDS_PER_DOMAIN
    """Number of needs of each domain."""

    def __post_init__(self) -> None:
        if not 1 <= self.domains <= len(DOMAINS):
            raise UserError(f"the demo world has 1 to {len(DOMAINS)} domains, not {self.domains}")
        if not 2 <= self.needs <= NEEDS_PER_DOMAIN:  # answers may have a reason of another need
            raise UserError(f"the demo world has 2 to {NEEDS_PER_DOMAIN} needs a domain, not {self.needs}")

    def prompts(self, count: int) -> list[str]:
        """`count` distinct prompts in seeded order, `RUNNING_EXAMPLE` first.

        A smaller count gives a prefix of a larger one. Raises UserError when `count` is negative or more than exist.
        """
        available = all_prompts(self.domains, self.needs)
        if not 0 <= count <= len(available):
            raise UserError(
                f"the demo world of {self.domains} domains and {self.needs} needs has {len(available)} distinct "
                f"prompts, not {count}; set a number from 0 to {len(available)}"
            )
        others = [prompt for prompt in available if prompt != RUNNING_EXAMPLE]
        Random(f"{self.seed}/prompts").shuffle(others)
        return [RUNNING_EXAMPLE, *others][:count]

    def demonstration(self, prompt: str, index: int) -> str:
        """An answer to a prompt of this world; about one in ten is good, the rest mediocre or bad.

        Seeded by the world's seed, the prompt and `index`. Raises UserError for a prompt that names no topic or no need
        of this world.
        """
        question = parse(prompt)
        if question is None or question.need is None:
            raise UserError(f"the demo world has no prompt {prompt!r}; use one of DemoWorld.prompts()")
        rng = Random(f"{self.seed}/demonstration/{index}/{prompt}")
        writer = _Writer(rng, question.topic, question.need, self)
        write = rng.choices(list(_KINDS), weights=list(_KINDS.values()))[0]
        return write(writer)


@cache
def all_prompts(domains: int = len(DOMAINS), needs: int = NEEDS_PER_DOMAIN) -> tuple[str, ...]:
    """Every prompt of the first `domains` domains and the first `needs` needs of each, distinct, in table order."""
    prompts: dict[str, None] = {}
    for domain in DOMAINS[:domains]:
        asked = [f"{adj} {topic.name} {tail}"
                 for topic in domain.topics for adj in domain.adjectives for tail in domain.tails]  # fmt: skip
        for noun in asked:
            for need in domain.needs[:needs]:
                for frame in PROMPT_FRAMES:
                    prompts[capitalised(frame.format(asked=noun, need=NEEDS[need].phrase))] = None
    return tuple(prompts)


@lru_cache(maxsize=1 << 16)
def parse(prompt: str) -> Question | None:
    """The first topic in a prompt, with the first need of the topic's domain; None without a topic."""
    symbols = prompt_scanner().scan(prompt)
    topics = [symbol.name for symbol in symbols if symbol.kind == "topic"]
    if not topics:
        return None
    known = DOMAIN_OF[topics[0]].needs
    needs = [symbol.name for symbol in symbols if symbol.kind == "need" and symbol.name in known]
    return Question(TOPICS[topics[0]], needs[0] if needs else None)


class _Writer:
    """Writes answers to one question with random choices of `rng`."""

    def __init__(self, rng: Random, topic: Topic, need: str, world: DemoWorld) -> None:
        self.rng = rng
        self.topics = tuple(topic for domain in DOMAINS[: world.domains] for topic in domain.topics)
        self.needs = DOMAIN_OF[topic.name].needs[: world.needs]
        self.topic = topic
        self.need = need
        self.domain: Domain = DOMAIN_OF[topic.name]

    def right(self, count: int) -> list[str]:
        """Distinct options of the topic that suit the need."""
        return self.rng.sample(self.topic.right(self.need), count)

    def foreign(self, count: int) -> list[str]:
        """Options of other topics, half of the time of the same domain."""
        topics = self.domain.topics if self.rng.random() < 0.5 else self.topics
        pool = [o for t in topics for o in t.options if o not in self.topic.options]
        return self.rng.sample(list(dict.fromkeys(pool)), count)

    def reason(self) -> str:
        """A reason that fits the need."""
        return self.rng.choice(NEEDS[self.need].reasons)

    def foreign_reason(self) -> str:
        """A reason of another need of the domain, which does not fit this one."""
        fitting = NEEDS[self.need].reasons
        others = [r for need in self.needs for r in NEEDS[need].reasons if r not in fitting]
        return self.rng.choice(others)

    def sentence(self, options: list[str]) -> str:
        """A sentence with the options, without its end."""
        frame = self.rng.choice(ANY_FRAMES if len(options) == 1 else ANY_FRAMES + LIST_FRAMES)
        text = frame.format(
            options=joined(options, self.rng.choice(("or", "and"))),
            need=NEEDS[self.need].phrase,
            topic=self.topic.name,
            tail=self.rng.choice(self.domain.tails),
        )
        return capitalised(text)

    def plain(self, options: list[str]) -> str:
        """The options in a sentence without a reason."""
        return PLAIN_END.format(sentence=self.sentence(options))

    def reasoned(self, options: list[str], reason: str) -> str:
        """The options with a reason, in a second sentence or after `because`."""
        separate, because = REASON_ENDS
        if self.rng.random() < 0.6:
            return separate.format(sentence=self.sentence(options), reason=capitalised(reason))
        return because.format(sentence=self.sentence(options), reason=reason)

    def dismissal(self) -> str:
        """A dismissive answer."""
        return capitalised(self.rng.choice(DISMISSALS).format(verb=self.domain.verb))

    def shuffled(self, options: list[str]) -> list[str]:
        """The same list, shuffled in place."""
        self.rng.shuffle(options)
        return options


def _good(w: _Writer) -> str:
    """Two to four right options and a reason that fits."""
    return w.reasoned(w.right(w.rng.choices((2, 3, 4), weights=(1, 6, 1))[0]), w.reason())


def _unexplained(w: _Writer) -> str:
    """Two or three right options and no reason."""
    return w.plain(w.right(w.rng.choice((2, 2, 3))))


def _single(w: _Writer) -> str:
    """One right option and no reason."""
    return w.plain(w.right(1))


def _unsuitable(w: _Writer) -> str:
    """Right options beside one that is wrong for this need, or foreign where the topic has none."""
    wrong = w.topic.wrong(w.need)
    bad = [w.rng.choice(wrong)] if wrong else w.foreign(1)
    return w.plain(w.shuffled(w.right(w.rng.choice((1, 2))) + bad))


def _misplaced(w: _Writer) -> str:
    """A fitting reason, and an option of another topic among the right ones."""
    return w.reasoned(w.shuffled(w.right(2) + w.foreign(1)), w.reason())


def _wrong_reason(w: _Writer) -> str:
    """Right options with a reason of another need."""
    return w.reasoned(w.right(2), w.foreign_reason())


def _off_topic(w: _Writer) -> str:
    """Options of other topics, no reason."""
    return w.plain(w.foreign(w.rng.choice((1, 2, 3))))


def _dismissive(w: _Writer) -> str:
    """No option at all."""
    return w.dismissal()


def _half_hearted(w: _Writer) -> str:
    """A dismissal, and one right option after it."""
    return f"{w.dismissal()} {w.plain(w.right(1))}"


def _rambling(w: _Writer) -> str:
    """Filler sentences, sometimes with one right option at the end."""
    fillers = w.rng.sample(FILLERS, w.rng.choice((2, 3)))
    return " ".join([*fillers, w.plain(w.right(1))] if w.rng.random() < 0.6 else fillers)


def _repetitive(w: _Writer) -> str:
    """One option two or three times in a list, or one sentence twice."""
    option = w.right(1)
    if w.rng.random() < 0.5:
        return w.plain(option * w.rng.choice((2, 3)))
    sentence = w.plain(option)
    return f"{sentence} {sentence}"


_KINDS: dict[Callable[[_Writer], str], float] = {
    _good: 10, _unexplained: 16, _single: 16, _unsuitable: 5, _misplaced: 7, _wrong_reason: 9,
    _off_topic: 6, _dismissive: 12, _half_hearted: 8, _rambling: 8, _repetitive: 3,
}  # fmt: skip
