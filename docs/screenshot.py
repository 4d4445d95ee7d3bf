"""Play the demo, and take the picture of a node's page that the README shows: python docs/screenshot.py.

It needs Chromium, as the tests of the page do.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from farandole.node.base.control import call
from farandole.protocol.wire.errors import FarandoleError

PICTURE = Path(__file__).with_name("dashboard.png")
# By then the demo's curves have a shape, and it is not over yet.
ROUND = re.compile(r"round ([89]|1\d)")
TIMEOUT = 300.0


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        program = "from farandole.node.cli import main; main()"
        command = [sys.executable, "-c", program, "testnet", "run", "demo", "--out", folder]
        demo = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            take_picture(wait_for_page(Path(folder)))
        finally:
            demo.terminate()
            demo.wait()


def wait_for_page(folder: Path) -> str:
    """Return the link to the page of the demo's first node."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        for home in sorted(folder.glob("nodes/*")):
            with suppress(FarandoleError):
                page = call(home, "dashboard")
                return f"{page['url']}#{page['token']}"
        time.sleep(0.5)
    raise SystemExit("no node of the demo serves a page")


def take_picture(link: str) -> None:
    """Once the run is in its middle."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1180, "height": 1320})
        page.goto(link)
        expect(page.locator("#headline")).to_contain_text(ROUND, timeout=TIMEOUT * 1_000)
        page.screenshot(path=PICTURE)
        chromium.close()


if __name__ == "__main__":
    main()
