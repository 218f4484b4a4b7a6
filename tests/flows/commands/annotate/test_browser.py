"""The page in headless Chromium, driven by playwright: keys, mouse, touch, attacks, and a server that goes away."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.commands.annotate.conftest import Served, write_questions, write_rows
from tests.security.test_page import ATTACKS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine"),
]
WAIT = 60_000
"""Milliseconds; a busy machine is slow."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page; whatever its console or a script reports as an error fails the test, but a server that is away."""
    context = browser.new_context()
    context.set_default_timeout(WAIT)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda one: problems.append(one.text) if one.type in {"error", "warning"} else None)
    yield opened
    context.close()
    assert [text for text in problems if "Failed to load resource" not in text] == []


def done(page: Any) -> int:
    """How many tasks the page says are done."""
    page.wait_for_selector("html[data-done]")
    return int(page.locator("html").get_attribute("data-done"))


def wait_for_other(page: Any, before: int) -> None:
    """Wait until another number of tasks is done. By a selector, because the page's policy forbids to evaluate text."""
    page.wait_for_selector(f"html[data-done]:not([data-done='{before}'])")


def press(page: Any, *keys: str) -> None:
    """Press keys, and wait until the page has moved on."""
    before = done(page)
    for key in keys:
        page.keyboard.press(key)
    wait_for_other(page, before)


def texts(page: Any) -> list[str]:
    """The answers on the screen; a page that was just loaded has none yet."""
    page.wait_for_selector("#answers .text")
    return [str(text).strip() for text in page.locator("#answers .text").all_inner_texts()]


def exported(served: Served, path: Path) -> list[dict[str, Any]]:
    finished = served.command("--export", str(path))
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_whole_session_of_30_pairs_with_the_keyboard_only(served: Served, page: Any, tmp_path: Path) -> None:
    """With undo, tie, skip, flag, a reload, and a server that is killed and started again."""
    options = ["--from", str(write_questions(tmp_path / "own.jsonl", 30)), "--pairs", "30", "--annotators", "anna"]
    page.goto(served.start(*options)["anna"])
    pressed: list[tuple[str, str, str, str]] = []
    keys = ["ArrowLeft", "ArrowRight", "=", "ArrowRight", "s", "ArrowLeft", "f", "ArrowLeft", "ArrowRight", "ArrowLeft"]
    for number in range(30):
        key = keys[number % len(keys)]
        assert done(page) == number
        if number in {4, 17}:  # a wrong key, taken back
            before = page.locator("#prompt").inner_text()
            press(page, "=")
            press(page, "u")
            assert page.locator("#prompt").inner_text() == before
        if number == 12:
            page.reload()
        if number == 20:
            served.stop(signal.SIGKILL)
            page.keyboard.press(key)
            page.wait_for_selector("#alert:not([hidden])")
            assert page.locator("#alert").inner_text().startswith("Not saved, trying again")
            pressed.append((key, *texts(page), page.locator("#prompt .text").inner_text()))  # type: ignore[arg-type]
            served.start(*options)
            wait_for_other(page, 20)
            assert page.locator("#alert").is_hidden()
            continue
        pressed.append((key, *texts(page), page.locator("#prompt .text").inner_text()))  # type: ignore[arg-type]
        press(page, key)
    page.wait_for_selector("#end:not([hidden])")
    assert "30 of 30" in page.locator("#count").inner_text()
    served.stop()
    expected = []
    for key, first, second, prompt in pressed:
        if key in {"ArrowLeft", "="}:
            expected.append((prompt, first, second, key == "=", [1, 2]))
        elif key == "ArrowRight":
            expected.append((prompt, second, first, False, [2, 1]))
    rows = exported(served, tmp_path / "labels.jsonl")
    made = [(row["prompt"][0]["content"], row["chosen"], row["rejected"], row["tie"], row["order"]) for row in rows]
    assert made == expected
    assert len(made) == 24


def test_four_answers_are_ranked_by_keys_and_by_mouse(served: Served, page: Any, tmp_path: Path) -> None:
    source = write_questions(tmp_path / "own.jsonl", 3, answers=4)
    page.goto(served.start("--from", str(source), "--answers", "4", "--pairs", "18", "--annotators", "anna")["anna"])
    rankings = []
    for how in ("keys", "buttons", "cards"):
        assert done(page) == len(rankings)
        shown = texts(page)
        for place in (2, 0, 3):
            if how == "keys":
                page.keyboard.press(str(place + 1))
            elif how == "buttons":
                page.locator("#picks button").nth(place).click()
            else:
                page.locator("#answers article").nth(place).click()
        assert "rank 2" in page.locator("#answers h2").nth(0).inner_text()
        page.keyboard.press("u")  # takes back a pick that is not stored yet
        assert "rank" not in page.locator("#answers h2").nth(3).inner_text()
        press(page, "2", "4")
        rankings.append([shown[place] for place in (2, 0, 1, 3)])
    rows = exported(served, tmp_path / "labels.jsonl")
    assert len(rows) == 18
    for number, ranking in enumerate(rankings):
        part = rows[6 * number : 6 * number + 6]
        assert [(row["chosen"], row["rejected"]) for row in part] == [
            (ranking[a], ranking[b]) for a, b in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
        ]


def test_four_answers_are_ranked_by_dragging(served: Served, page: Any, tmp_path: Path) -> None:
    source = write_questions(tmp_path / "own.jsonl", 1, answers=4)
    page.goto(served.start("--from", str(source), "--answers", "4", "--annotators", "anna")["anna"])
    assert done(page) == 0
    first, second, third, fourth = texts(page)
    save = page.get_by_role("button", name="Save this order")
    assert save.is_hidden()
    headings, cards = page.locator("#answers h2"), page.locator("#answers article")
    headings.nth(3).drag_to(cards.nth(0))
    assert texts(page) == [fourth, first, second, third]
    headings.nth(1).drag_to(cards.nth(2))
    assert texts(page) == [fourth, second, first, third]
    assert headings.all_inner_texts() == [f"Answer {place} · rank {rank}" for rank, place in enumerate((4, 2, 1, 3), 1)]
    save.click()
    wait_for_other(page, 0)
    rows = exported(served, tmp_path / "labels.jsonl")
    assert [row["chosen"] for row in rows] == [fourth] * 3 + [second] * 2 + [first]
    assert rows[-1]["rejected"] == third
    assert rows[0]["order"] == [4, 2]


def test_digits_choose_one_of_two_answers(served: Served, page: Any, tmp_path: Path) -> None:
    source = write_questions(tmp_path / "own.jsonl", 2)
    page.goto(served.start("--from", str(source), "--annotators", "anna")["anna"])
    done(page)
    page.keyboard.press("3")
    press(page, "2")
    assert done(page) == 1, "there is no answer 3"
    press(page, "1")
    assert [row["order"] for row in exported(served, tmp_path / "labels.jsonl")] == [[2, 1], [1, 2]]


def test_a_text_that_markdown_hides_is_shown_as_it_is(served: Served, page: Any, tmp_path: Path) -> None:
    """And with the key r every text, also after a reload."""
    answers = ["__init__.py and 2*3*4\\*5", "4.", "> " * 110 + "deep", " \n"]
    source = write_rows(tmp_path / "own.jsonl", [{"prompt": "__main__", "responses": answers}])
    page.goto(served.start("--from", str(source), "--answers", "4", "--annotators", "anna")["anna"])
    done(page)
    boxes, prompt = page.locator("#answers .text"), page.locator("#prompt .text")
    assert {text.strip() for text in boxes.all_text_contents()} == {"init.py and 234*5", "4.", answers[2], ""}
    assert prompt.text_content().strip() == "main"
    assert page.locator("#answers .empty").count() == 1
    page.keyboard.press("r")
    assert sorted(boxes.all_text_contents()) == sorted(answers)
    page.reload()
    page.wait_for_selector("#answers .text")
    assert sorted(boxes.all_text_contents()) == sorted(answers)
    assert prompt.text_content() == "__main__"
    page.get_by_role("button", name="Plain text").click()
    assert prompt.text_content().strip() == "main"
    assert done(page) == 0


def test_a_skip_that_cannot_be_undone_is_explained(served: Served, page: Any, tmp_path: Path) -> None:
    source = write_questions(tmp_path / "own.jsonl", 2)
    addresses = served.start("--from", str(source), "--annotators", "anna,ben")
    page.goto(addresses["anna"])
    skipped = texts(page) if done(page) == 0 else []
    press(page, "s")
    other = page.context.new_page()
    other.goto(addresses["ben"])
    done(other)
    assert set(texts(other)) == set(skipped)
    page.keyboard.press("u")
    page.wait_for_selector("#alert:not([hidden])")
    assert page.locator("#alert").inner_text() == "Not undone: another annotator has this task now."
    assert done(page) == 1


def test_a_phone_by_touch(served: Served, browser: Any, tmp_path: Path) -> None:
    address = served.start("--from", str(write_questions(tmp_path / "own.jsonl", 3)), "--annotators", "anna")["anna"]
    context = browser.new_context(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    context.set_default_timeout(WAIT)
    page = context.new_page()
    page.goto(address)
    for number, name in enumerate(("Answer 1 is better", "Tie", "Skip")):
        assert done(page) == number
        button = page.get_by_role("button", name=name)
        assert button.bounding_box()["height"] >= 44, "large enough for a finger"
        button.tap()
        wait_for_other(page, number)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, "nothing to scroll sideways"
    page.get_by_role("button", name="Undo the last one").tap()
    page.wait_for_selector("#work:not([hidden])")
    context.close()


def test_two_tabs_on_one_task(served: Served, page: Any, tmp_path: Path) -> None:
    source = write_questions(tmp_path / "own.jsonl", 3)
    address = served.start("--from", str(source), "--annotators", "anna")["anna"]
    page.goto(address)
    other = page.context.new_page()
    other.goto(address)
    assert done(page) == done(other) == 0
    assert texts(page) == texts(other)
    chosen = texts(page)
    press(page, "ArrowLeft")
    press(other, "ArrowRight")  # refused: judged in the first tab
    assert texts(other) == texts(page)
    assert done(other) == 1
    (row,) = exported(served, tmp_path / "labels.jsonl")
    assert (row["chosen"], row["rejected"]) == tuple(chosen)


def test_texts_cannot_run_code_in_the_page(served: Served, page: Any, tmp_path: Path) -> None:
    attacks = [*ATTACKS, "[x](javascript:document.title='owned')", "![x](http://127.0.0.1:1/x.png)"]
    rows = [{"prompt": f"{attack} ", "responses": [f"{attack} 1", f"2 {attack}"]} for attack in attacks]
    guide = tmp_path / "guide.md"
    guide.write_text("\n\n".join(attacks), encoding="utf-8")
    name = "<img src=x onerror=document.title=1>"
    options = ["--from", str(write_rows(tmp_path / "own.jsonl", rows)), "--guidelines", str(guide)]
    address = served.start(*options, "--annotators", name)[name]
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    seen = set()
    for number in range(len(attacks)):
        assert done(page) == number
        seen.update(texts(page))
        assert page.locator("#answers, #prompt").locator("a, img, script, iframe, svg, form, meta").count() == 0
        press(page, "=")
    page.keyboard.press("g")
    page.wait_for_selector("#guidelines[open]")
    assert page.title() == "Leash annotate"
    assert name in page.locator(".brand").inner_text()
    assert all(url.startswith(address.split("?")[0]) for url in requests)
    assert "<script>document.title='owned'</script> 1" in seen


def test_without_its_walls_the_page_would_run_them(browser: Any) -> None:
    """The attacks work in this browser: the test above can fail."""
    page = browser.new_page()
    page.set_content("<title>x</title><div id=a></div>")
    page.evaluate("html => { document.getElementById('a').innerHTML = html }", ATTACKS[1])
    page.wait_for_function("document.title === 'owned'")  # this page has no policy
    page.close()


def test_guidelines_statistics_and_focus_by_keys(served: Served, page: Any, tmp_path: Path) -> None:
    guide = tmp_path / "guide.md"
    guide.write_text("# Rules\nBe **fair**.", encoding="utf-8")
    gold = write_rows(tmp_path / "gold.jsonl", [{"prompt": "gold", "chosen": "right", "rejected": "wrong"}])
    options = ["--from", str(write_questions(tmp_path / "own.jsonl", 3)), "--guidelines", str(guide)]
    page.goto(served.start(*options, "--gold", str(gold), "--gold-every", "1", "--annotators", "anna")["anna"])
    page.wait_for_selector("#work:not([hidden])")
    page.keyboard.press("g")
    page.wait_for_selector("#guidelines[open]")
    assert page.locator("#guidelines strong").inner_text() == "fair"
    page.keyboard.press("ArrowLeft")
    assert done(page) == 0, "no judgement while a dialog is open"
    page.keyboard.press("g")
    page.wait_for_selector("#guidelines:not([open])", state="attached")
    press(page, "ArrowLeft")
    assert page.locator("#prompt .text").inner_text() == "gold"
    press(page, "ArrowLeft" if texts(page)[0] == "right" else "ArrowRight")
    page.keyboard.press("i")
    page.wait_for_selector("#statistics[open]")
    cells = page.locator("#statistics tbody td").all_inner_texts()
    assert (cells[0], cells[1], cells[-1]) == ("anna", "1", "1 of 1")
    page.keyboard.press("Escape")
    page.wait_for_selector("#statistics:not([open])", state="attached")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.action") == "tie":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is visible"
    press(page, "Enter")
    printed = served.stop()
    assert "2 of 3" in printed, "labels"
    assert "1 of 1" in printed, "gold questions"


def test_light_and_dark(served: Served, browser: Any, tmp_path: Path) -> None:
    address = served.start("--from", str(write_questions(tmp_path / "own.jsonl", 2)), "--annotators", "anna")["anna"]
    brightness = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(address)
        page.wait_for_selector("#work:not([hidden])")
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness[scheme] = sum(map(int, colour[4:-1].split(",")))
        page.close()
    assert brightness["light"] > 600 > 200 > brightness["dark"]
