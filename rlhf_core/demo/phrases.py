"""The wording of the demo world: frames of prompts and answers, and phrases of bad answers. Prompts, answers and the
rubric's grammar are all made from these frames."""

from collections.abc import Iterator, Sequence

from rlhf_core.demo.topics import DOMAINS

RUNNING_EXAMPLE = "What are some healthy breakfast options for someone with diabetes?"

PROMPT_FRAMES = (
    "What are some {asked} {need}?",
    "Can you suggest some {asked} {need}?",
    "I need some {asked} {need}.",
    "Please give me {asked} {need}.",
    "Which {asked} are best {need}?",
    "Do you know any {asked} {need}?",
    "I am looking for {asked} {need}.",
    "Could you share some {asked} {need}?",
    "{need}, what are some {asked}?",
    "Please tell me about {asked} {need}.",
    "Are there any {asked} {need}?",
    "Help me find {asked} {need}.",
)

# Frames that read well with any number of options.
ANY_FRAMES = (
    "Try {options}",
    "You could try {options}",
    "I would suggest {options}",
    "{need}, I would try {options}",
)
# Frames that need two options or more.
LIST_FRAMES = (
    "Good choices are {options}",
    "Good {topic} {tail} include {options}",
    "Good {topic} {tail} are {options}",
    "{need}, good choices are {options}",
    "Some good {tail} are {options}",
)
# What follows the options: the end, or the reason in one of two forms.
PLAIN_END = "{sentence}."
REASON_ENDS = ("{sentence}. {reason}.", "{sentence}, because {reason}.")

DISMISSALS = (
    "Just {verb} whatever you want.",
    "It does not really matter.",
    "The choice does not really matter.",
    "That is up to you.",
    "Just look it up.",
)
# An answer with one of these is dismissive.
DISMISSIVE_PHRASES = (
    "whatever you want", "does not really matter", "up to you", "look it up",
    "doesn't really matter", "do not care", "don't care", "who cares", "not my problem", "whatever you like",
)  # fmt: skip

FILLERS = (
    "Well, that is an interesting question.",
    "There are many things to think about.",
    "It is hard to say.",
    "It depends on a lot of things.",
    "People say many different things about this.",
)
# An answer with one of these rambles.
FILLER_PHRASES = (
    "an interesting question", "many things to think about", "hard to say", "it depends", "many different things",
    "a good question", "a great question", "at the end of the day", "as you may know", "so many ways",
)  # fmt: skip


def capitalised(text: str) -> str:
    """The text with its first letter in upper case and nothing else changed."""
    return text[:1].upper() + text[1:]


def joined(options: Sequence[str], conjunction: str = "or") -> str:
    """Options as English lists them: "a", "a or b", "a, b, or c"."""
    if len(options) < 3:
        return f" {conjunction} ".join(options)
    return ", ".join(options[:-1]) + f", {conjunction} {options[-1]}"


def sample_answers(option: str, reason: str, need: str) -> Iterator[str]:
    """Every wording of an answer, with this option, reason and need; the rubric's grammar is made from them."""
    lists = [joined([option] * count, word) for count in (1, 2, 3) for word in ("or", "and")]
    for domain in DOMAINS:
        topic = domain.topics[0].name
        for frame in ANY_FRAMES + LIST_FRAMES:
            for tail in domain.tails:
                for listed in lists:
                    sentence = frame.format(options=listed, need=need, topic=topic, tail=tail)
                    yield PLAIN_END.format(sentence=sentence)
                    yield from (end.format(sentence=sentence, reason=reason) for end in REASON_ENDS)
        yield from (dismissal.format(verb=domain.verb) for dismissal in DISMISSALS)
    yield from FILLERS
