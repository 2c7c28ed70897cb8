"""The web admin as a process, and a real browser to look at it: Debian's Chromium, without a screen."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from playwright.sync_api import Browser, sync_playwright

from tests.e2e.processes import Process, until

T = TypeVar("T")

SERVES = re.compile(r"Web admin for .*: (http://\S+)")


@contextlib.contextmanager
def web_admin(directory: Path, endpoint: str, stream_url: str, *flags: str) -> Iterator[str]:
    """Yields its URL."""
    output = directory / f"web-{len(list(directory.glob('web-*.log')))}.log"
    command = [
        *(sys.executable, "-m", "pydanube", "admin", "serve", "--listen-addr", "127.0.0.1:0"),
        *("--broker-endpoint", endpoint, "--service-addr", stream_url, *flags),
    ]
    with Process(command, output) as process:

        def found() -> re.Match[str] | None:
            assert process.exit_code is None, process.text()
            return SERVES.search(process.text())

        match = until(found, "the web admin serves", say=process.text)
        assert match is not None
        yield match[1]
        assert "Traceback" not in process.text(), process.text()


def aside(call: Callable[..., T], *arguments: object) -> T:
    """In another thread: a browser has the event loop of this one, and commands bring their own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *arguments).result()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
