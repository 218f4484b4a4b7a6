"""`chat.py`: the identity of a prompt, and when two prompts count as the same one."""

import hashlib

from rlhf_core.data.chat import Conversation, as_text, opening, prompt_id

TURN: Conversation = [{"role": "user", "content": "Grüße"}]
LONG: Conversation = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What  shall I\neat?"},
    {"role": "assistant", "content": "Oats."},
    {"role": "user", "content": "And then?"},
]


def test_prompt_id_is_the_hash_of_the_canonical_json() -> None:
    expected = hashlib.sha256('[{"role":"user","content":"Grüße"}]'.encode()).hexdigest()[:16]
    assert prompt_id(TURN) == expected


def test_prompt_id_ignores_the_order_of_keys_and_other_keys() -> None:
    other = [{"content": "Grüße", "role": "user", "name": "Ann"}]
    assert prompt_id(other) == prompt_id(TURN)  # type: ignore[arg-type]


def test_prompt_id_differs_by_role_text_and_turns() -> None:
    prompts: list[Conversation] = [
        TURN,
        [{"role": "system", "content": "Grüße"}],
        [{"role": "user", "content": "grüße"}],
        TURN + TURN,
    ]
    assert len({prompt_id(prompt) for prompt in prompts}) == len(prompts)


def test_prompt_id_takes_a_lone_surrogate() -> None:
    assert len(prompt_id([{"role": "user", "content": "\ud800"}])) == 16


def test_opening_folds_case_and_white_space_of_the_first_user_message() -> None:
    assert opening(LONG) == "what shall i eat?"
    assert opening([{"role": "user", "content": " STRASSE\t"}]) == opening([{"role": "user", "content": "straße"}])
    assert opening([{"role": "system", "content": "x"}]) == ""


def test_as_text_names_the_roles_of_a_longer_prompt() -> None:
    assert as_text(TURN) == "Grüße"
    assert as_text(LONG).splitlines()[0] == "system: Be brief."
    assert as_text(LONG).endswith("user: And then?")
