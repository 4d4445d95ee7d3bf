"""The page in a real browser: Debian's Chromium, headless."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import trio
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect, sync_playwright

from farandole.node.status.status import NodeStatus

from ....patience import PATIENCE
from ...statuses import BOB, STATUS
from .page import Shown, open_page

SHARE_OF_BLACK = """() => {
    const code = document.getElementById("invitation-code");
    const pixels = code.getContext("2d").getImageData(0, 0, code.width, code.height).data;
    return pixels.filter((value, index) => index % 4 === 0 && value === 0).length / (pixels.length / 4);
}"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
expect.set_options(timeout=1_000 * PATIENCE)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: on Debian, apt install chromium")


@dataclass
class Browser:
    page: Page
    problems: list[str] = field(default_factory=list)
    """Errors on the console, exceptions, and requests to other places."""


@contextmanager
def open_browser(link: str, *, awaited: str = "#members tr", **context: Any) -> Iterator[Browser]:
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        page = chromium.new_context(**context).new_page()
        browser = Browser(page)
        page.set_default_timeout(1_000 * PATIENCE)
        page.on("console", lambda message: browser.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: browser.problems.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((link.partition("#")[0], "data:"))
                else browser.problems.append(request.url)
            ),
        )
        page.goto(link)
        page.wait_for_selector(awaited)
        yield browser
        chromium.close()


async def in_browser(look: Callable[[Shown], None], status: NodeStatus = STATUS) -> Shown:
    async with open_page() as shown:
        shown.status = status
        await trio.to_thread.run_sync(look, shown)
        return shown


async def test_the_page_shows_live_data_without_an_error() -> None:
    def look(shown: Shown) -> None:
        with open_browser(shown.link) as browser:
            page = browser.page
            assert page.inner_text("#headline").startswith("training with 2 others, round 7")
            assert "token" not in page.url
            assert shown.place.token not in page.url
            assert page.locator("#members tr").count() == 3
            assert BOB[-8:] in page.inner_text("#exchanges")
            assert "the trainer died" in page.inner_text("#warnings")
            assert page.inner_text("#held-now").strip() == ", 2.610 (1.234 bits per byte)"

            shown.status = msgspec.structs.replace(STATUS, round=8)
            expect(page.locator("#headline")).to_contain_text("round 8")
            assert browser.problems == []

    last = STATUS.last_exchange
    assert last is not None
    await in_browser(look, msgspec.structs.replace(STATUS, recent_exchanges=[last]))


async def test_a_person_pauses_invites_and_sets_caps() -> None:
    def look(shown: Shown) -> None:
        with open_browser(shown.link) as browser:
            page = browser.page
            page.click("#pause")
            expect(page.locator("#answer")).to_have_text("pausing")
            page.click("#invite")
            expect(page.locator("#invitation-text")).to_have_value("farandole join farandole1" + "x" * 300)
            expect(page.locator("#invitation-note")).to_contain_text("Warning: no peer reaches this node")
            assert 0.3 < page.evaluate(SHARE_OF_BLACK) < 0.6
            page.keyboard.press("Escape")
            expect(page.locator("#invitation")).to_be_hidden()
            page.click("#limit")
            page.fill("#caps-up", "0.1")
            page.fill("#caps-down", "20")
            page.click("#caps-set")
            expect(page.locator("#caps-problem")).to_contain_text("0.5 Mbit/s or more")
            page.fill("#caps-up", "2")
            page.keyboard.press("Enter")
            expect(page.locator("#caps")).to_be_hidden()
            expect(page.locator("#answer")).to_contain_text("upload at most 2 Mbit/s, download at most 20 Mbit/s")
            expect(page.locator("#limits")).to_contain_text("upload: 2 Mbit/s")
            page.click("#limit")
            expect(page.locator("#caps-down")).to_have_value("20")
            page.fill("#caps-quiet", "at night")
            page.click("#caps-set")
            expect(page.locator("#caps-problem")).to_contain_text("no quiet hours")
            page.fill("#caps-quiet", "22:00-07:30")
            page.click("#caps-set")
            expect(page.locator("#caps")).to_be_hidden()
            expect(page.locator("#answer")).to_contain_text("quiet hours 22:00-07:30")
            expect(page.locator("#limits")).to_contain_text("quiet hours: 22:00-07:30")
            assert [problem for problem in browser.problems if "409" not in problem] == []

    assert (await in_browser(look)).actions == ["pause"]


async def test_a_node_that_joins_shows_its_steps_and_then_charts_to_read() -> None:
    def look(shown: Shown) -> None:
        with open_browser(shown.link) as browser:
            page = browser.page
            expect(page.locator("#steps .now")).to_have_text("fetch weights")
            assert page.locator("#steps .done").count() == 2
            shown.status = STATUS
            expect(page.locator("#steps")).to_be_hidden()
            rounds = iter(range(8, 100))

            def play_until_drawn() -> None:
                """The page has a loss now and then, and draws two or more, of the later half too."""
                for number in rounds:
                    members = [msgspec.structs.replace(each, round=number, loss=20 / number) for each in STATUS.members]
                    shown.status = msgspec.structs.replace(STATUS, round=number, members=members)
                    expect(page.locator("#headline")).to_contain_text(f"round {number}")
                    if number > 9 and page.locator("#loss canvas").count() == 1:
                        return
                raise AssertionError("nothing is drawn")

            play_until_drawn()
            inside, card = page.locator("#loss canvas").bounding_box(), page.locator("#loss").bounding_box()
            assert inside is not None
            assert card is not None
            assert inside["width"] == pytest.approx(card["width"], abs=2)
            page.hover("#loss .u-over")
            expect(page.locator("#loss-at")).to_contain_text("this node")
            page.check("#log")
            page.select_option("#range", "0.5")
            page.select_option("#smooth", "0.9")
            play_until_drawn()
            assert browser.problems == []

    await in_browser(look, msgspec.structs.replace(STATUS, phase="fetching weights"))


async def test_without_the_token_the_page_and_a_click_say_where_to_get_it() -> None:
    def look(shown: Shown) -> None:
        with open_browser(shown.place.url, awaited="#headline.trouble") as browser:
            expect(browser.page.locator("#headline")).to_contain_text("farandole dashboard")
            assert browser.page.locator("#members tr").count() == 0
            browser.page.click("#pause")
            expect(browser.page.locator("#answer")).to_contain_text("farandole dashboard")

    assert (await in_browser(look)).actions == []


async def test_what_peers_say_is_text_and_nothing_else() -> None:
    evil = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    members = [msgspec.structs.replace(member, device=evil, path=evil) for member in STATUS.members]

    def look(shown: Shown) -> None:
        with open_browser(shown.link) as browser:
            assert evil in browser.page.inner_text("#members")
            assert browser.page.title() != "owned"
            assert browser.page.locator("#members img").count() == 0

    await in_browser(look, msgspec.structs.replace(STATUS, members=members, warnings=[evil]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_a_phone_and_axe_core_finds_nothing_that_keeps_people_out(scheme: str) -> None:
    """WCAG 2.2 A and AA, and axe-core's best practices: contrast, names for screen readers, keyboard, structure."""

    def look(shown: Shown) -> None:
        with open_browser(shown.link, color_scheme=scheme) as browser:
            for width, height in ((1440, 900), (360, 740)):
                browser.page.set_viewport_size({"width": width, "height": height})
                assert browser.page.evaluate("document.documentElement.scrollWidth") <= width
                ground = browser.page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (ground == "rgb(20, 22, 26)") == (scheme == "dark")
                browser.page.click("#invite")
                expect(browser.page.locator("#invitation")).to_be_visible()
                assert Axe().run(browser.page).violations_count == 0
                browser.page.click("#close")
                browser.page.click("#limit")
                expect(browser.page.locator("#caps")).to_be_visible()
                assert Axe().run(browser.page).violations_count == 0
                browser.page.click("#caps-close")
                result = Axe().run(browser.page)
                assert result.violations_count == 0, result.generate_report()
                assert len(result.response["passes"]) > 20

    await in_browser(look)


async def test_a_thousand_members_are_drawn_a_page_at_a_time_and_found_by_typing() -> None:
    example = STATUS.members[1]
    members = [STATUS.members[0]] + [
        msgspec.structs.replace(example, peer_id=f"12D3KooW{index:08d}", round=index % 7) for index in range(1_000)
    ]

    def look(shown: Shown) -> None:
        with open_browser(shown.link) as browser:
            page = browser.page
            rows, which = page.locator("#members tr"), page.locator("#rows")
            expect(page.locator("#members-count")).to_have_text("1001")
            expect(rows).to_have_count(100)
            expect(page.locator("#before")).to_be_disabled()
            for _ in range(10):
                page.click("#after")
                assert rows.count() <= 100
            expect(which).to_have_text("1001 to 1001")
            expect(page.locator("#after")).to_be_disabled()
            page.fill("#filter", "00000777")
            expect(rows).to_have_count(1)
            expect(which).to_be_hidden()
            page.fill("#filter", "")
            expect(which).to_have_text("1 to 100")
            assert page.locator("*").count() < 2_500
            assert browser.problems == []

    await in_browser(look, msgspec.structs.replace(STATUS, members=members))
