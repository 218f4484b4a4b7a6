"""Parameters of the judge that win rates are measured by, and that labels pairs with `preferences.source: model`."""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.config.paths import CONTROL, FolderName, plain_name
from tasks.params.scorer import JUDGES, PythonFile, TextModel

LANGUAGE_MODELS = ("model", "api")
"""Kinds of judge that compare two answers."""
LOCAL = ("model", "reward_model")
"""Kinds with a folder below models/judges/."""
SCORING = ("function", "reward_model")
"""Kinds that score single answers, in the place of the judge of the data."""


def _web_address(value: str) -> str:
    """`value` itself. Raises ValueError unless it is http(s)://HOST… without a name, password or query in it."""
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname or CONTROL.search(value) or " " in value:
        raise ValueError("must be an address such as http://127.0.0.1:8000/v1")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("must not hold a name, a password or a query; name the key's variable in key_variable")
    return value


def _variable(value: str) -> str:
    """`value` itself. Raises ValueError unless it can be the name of an environment variable."""
    if not re.fullmatch("[A-Z_][A-Z0-9_]*", value):
        raise ValueError("must be the name of an environment variable, such as OPENAI_API_KEY, never the key itself")
    return value


class JudgeParams(TextModel):
    """The judge of win rates, and of pairs with `preferences.source: model`. `label`, `reads` and `precision` are for
    `kind: reward_model`."""

    kind: Literal["data", "model", "api", "function", "reward_model"] = "data"
    """`data`: the demo's rubric; other data have no judge, so the model of `reward.judge_share` judges, else `scorer`.
    `model`: a language model, which compares each pair in both orders. `api`: the same behind an OpenAI-compatible
    endpoint. `function`: a Python function that gives gold scores. `reward_model`: the same with a reward model or
    classifier from elsewhere."""
    function: PythonFile | None = None
    """`kind: function`: a Python file below rewards/, which is not a term of `scorer`."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """`kind: model` or `reward_model`: folder below models/judges/, which is not a term of `scorer`. `kind: api`: the
    model's name on the server."""
    base_url: Annotated[str, AfterValidator(_web_address)] | None = None
    """`kind: api`: address, such as https://api.openai.com/v1."""
    key_variable: Annotated[str, AfterValidator(_variable)] | None = None
    """`kind: api`: name of the environment variable that holds the key, never the key itself. null: no key is sent."""
    answer_tokens: Annotated[int, Field(ge=1)] = 8
    """`kind: api`: longest reply, in tokens. Models that reason first need some thousands."""
    question: FolderName | None = None
    """`kind: model` or `api`: text file below models/judges/ with $prompt, $first and $second, and optionally
    $first_letter and $second_letter. null: the built-in question."""

    @model_validator(mode="after")
    def _names_its_model(self) -> "JudgeParams":
        if self.kind in {"data", "function"} and self.model is not None:
            raise ValueError(f"kind: {self.kind} has no `model`; set kind: model, reward_model or api, or remove it")
        if (self.kind == "function") != (self.function is not None):
            raise ValueError("kind: function needs a file below rewards/ in `function`, and only it does")
        if self.kind in LOCAL and self.model is None:
            raise ValueError(f"kind: {self.kind} needs the name of a folder below {JUDGES}/ in `model`")
        if self.kind != "reward_model" and any((self.label, self.reads, self.precision)):
            raise ValueError("label, reads and precision are for kind: reward_model; remove them")
        if self.kind == "reward_model" and self.question is not None:
            raise ValueError("kind: reward_model scores each answer, without a `question`; remove it")
        if self.kind == "api" and self.model is None:
            raise ValueError("kind: api needs the model's name on the server in `model`")
        if (self.kind == "api") != (self.base_url is not None):
            raise ValueError("kind: api needs the address of the endpoint in `base_url`, and only it does")
        if self.kind != "api" and self.key_variable is not None:
            raise ValueError("only kind: api has a key_variable")
        if self.kind in LOCAL and self.model is not None:
            plain_name(self.model)
        return self
