"""A browser for the tests of pages: Debian's Chromium without a window, and everything that a page asks for or says.

`make browser` installs what drives it into `.browser`. The tests skip with a reason where that or Chromium is missing.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

FOLDER = Path(__file__).parents[2] / ".browser"
"""The folder of `make browser`: Playwright for Python, axe-core and TypeScript."""

WIDTHS = (380, 800, 1400)
SCHEMES = ("light", "dark")
FLAGS = (
    "--no-sandbox",  # a container's root has no sandbox; the pages are this project's own
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",  # no name is ever looked up
)

# A payload that is executed sets this, and the browser notes its refusals; `Window.faults` reads both.
_WATCH = """
window.refusals = [];
document.addEventListener("securitypolicyviolation", (event) => {
    window.refusals.push(event.violatedDirective + ": " + event.blockedURI);
});
"""


def chromium() -> Path:
    """Return the path of Chromium, or $CHROMIUM; skip the test if there is none."""
    named = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not named or not Path(named).exists():
        pytest.skip("no Chromium here; apt-get install chromium")
    return Path(named)


def tool(path: str) -> Path:
    """A file that `make browser` installs; the test is skipped where it is missing."""
    found = FOLDER / path
    if not found.exists():
        pytest.skip(f".browser/{path} is not installed; make browser")
    return found


@contextlib.contextmanager
def browser(*flags: str) -> Iterator[Any]:
    """Chromium with new user data, which are gone at its end. While it runs, its thread can start no event loop.

    Args:
        flags: of Chromium, beside those that every test has.
    """
    tool("playwright/__init__.py")
    program = chromium()
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # the last on the path, so nothing that is installed is hidden
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=[*FLAGS, *flags], timeout=60_000)
        try:
            yield started
        finally:
            started.close()


@dataclass
class Window:
    """One page, and what happened in it.

    Attributes:
        page: Playwright's page.
        foreign: addresses outside the page's own that it asked for; none of them was let out.
        said: what was written to the console, and errors that nothing caught.
        dialogs: texts of windows that a script opened.
    """

    page: Any
    foreign: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Everything that a page of this project never does; a test says `assert window.faults() == []`."""
        found = [f"asked for {address}" for address in self.foreign]
        found += [f"said {line}" for line in self.said]
        found += [f"opened a dialog: {text}" for text in self.dialogs]
        found += [f"refused {line}" for line in self.page.evaluate("window.refusals")]
        found += [f"executed {name}" for name in self.page.evaluate("Object.keys(window).filter(n => /owned/.test(n))")]
        return found


@contextlib.contextmanager
def opened(
    browser: Any,
    address: str,
    *,
    width: int = 800,
    height: int = 900,
    scheme: str = "light",
    allowed: Sequence[str] = (),
    **options: Any,
) -> Iterator[Window]:
    """A page in a context of its own: no cookies, no cache. `address` is http://… or file://….

    It may ask the origins that are `allowed`, beside its own.
    """
    options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme} | options
    context = browser.new_context(service_workers="block", **options)
    context.set_default_timeout(60_000)
    try:
        window = Window(context.new_page())
        own = _origin(address)

        def decide(route: Any) -> None:
            asked = route.request.url
            if _origin(asked) in (own, *allowed) or asked.startswith(("data:", "blob:")):
                route.continue_()
            else:
                window.foreign.append(asked)
                route.abort()

        context.route("**/*", decide)
        window.page.on("websocket", lambda socket: window.foreign.append(socket.url))
        window.page.on("console", lambda message: window.said.append(f"{message.type}: {message.text}"))
        window.page.on("pageerror", lambda error: window.said.append(f"error: {error}"))
        window.page.on("dialog", lambda dialog: (window.dialogs.append(dialog.message), dialog.dismiss()))
        context.add_init_script(_WATCH)
        window.page.goto(address)
        yield window
    finally:
        context.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder at an origin of its own, such as that of a page of somebody else's."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _origin(address: str) -> str:
    """Return the part of an address that a request shares with the page: scheme and host, or a file's whole path."""
    parts = urlsplit(address)
    return parts.path if parts.scheme == "file" else f"{parts.scheme}://{parts.netloc}"


def accessibility(page: Any, enhanced: bool = True) -> list[str]:
    """Return axe-core's findings against a page, a line for each rule and element: all, or those on by default."""
    axe = tool("node_modules/axe-core/axe.min.js").read_text()
    page.evaluate(axe)
    every = "Object.fromEntries(axe.getRules().map(rule => [rule.ruleId, {enabled: true}]))"
    rules = every if enhanced else "{}"
    found = page.evaluate(f"axe.run(document, {{resultTypes: ['violations'], rules: {rules}}})")
    return [
        f"{rule['id']}: {node['target']}: {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


def too_wide(page: Any) -> list[str]:
    """Elements that make the document wider than the window; none of those inside scroll areas of their own."""
    return page.evaluate(
        """() => {
            const wide = document.documentElement.clientWidth;
            if (document.documentElement.scrollWidth <= wide) return [];
            const out = [...document.body.querySelectorAll("*")].filter((element) => {
                const box = element.getBoundingClientRect();
                const spills = getComputedStyle(element).overflowX === "visible" ? box.left + element.scrollWidth : 0;
                if (Math.max(box.right, spills) <= wide + 0.5) return false;
                for (let up = element.parentElement; up; up = up.parentElement)
                    if (/auto|scroll|hidden|clip/.test(getComputedStyle(up).overflowX)) return false;
                return true;
            });
            return [`document is ${document.documentElement.scrollWidth} wide, window ${wide}`].concat(
                out.slice(0, 10).map((e) => `${e.tagName}.${e.getAttribute("class")} ${e.textContent.slice(0, 60)}`));
        }"""
    )


def reached_by_tab(page: Any, most: int = 2000) -> list[str]:
    """Press Tab from the start of the page until it leaves it; returns what it reached, in order. A trap never leaves.

    Each is named by its place in the document ("12 A#parity"), so that `to_reach` can be compared.
    """
    start = "const body = document.body; body.tabIndex = -1; body.focus(); body.removeAttribute('tabindex');"
    page.evaluate(f"() => {{ {start} document.activeElement?.blur(); }}")
    reached: list[str] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        now = page.evaluate(_HERE)
        if now is None or now in reached:
            return reached
        reached.append(now)
    raise AssertionError(f"Tab does not leave the page within {most} steps")


_NAME = """(element) => [...document.querySelectorAll("*")].indexOf(element) + " " + element.tagName
    + (element.id ? "#" + element.id : "")"""
_HERE = f"""() => {{
    const now = document.activeElement;
    return now && now !== document.body && now !== document.documentElement ? ({_NAME})(now) : null;
}}"""


def to_reach(page: Any) -> list[str]:
    """Return the places that Tab has to reach: controls shown and not disabled, and areas that can be scrolled.

    Of radio buttons of one name Tab reaches one; arrows reach the others.
    """
    return page.evaluate(
        f"""() => {{
            const name = {_NAME}, groups = new Set();
            const shown = (e) => e.checkVisibility({{visibilityProperty: true, contentVisibilityAuto: false}})
                && e.getClientRects().length > 0;
            const managed = (e) => e.tabIndex < 0 && e.closest("[role=menu],[role=listbox],[role=toolbar],[role=grid],"
                + "[role=tablist],[role=radiogroup]");
            return [...document.querySelectorAll("*")].filter((e) => {{
                if (!shown(e) || e === document.body || e === document.documentElement) return false;
                if (e.matches("a[href],button,input,select,textarea,summary,[role=button],[role=switch],[role=slider]"))
                {{
                    if (e.disabled || e.type === "hidden" || managed(e)) return false;
                    if (e.type !== "radio") return true;
                    if (groups.has(e.name)) return false;
                    groups.add(e.name);
                    return (document.querySelector(`input[name="${{e.name}}"]:checked`) ?? e) === e;
                }}
                const style = getComputedStyle(e);
                return (/auto|scroll/.test(style.overflowX) && e.scrollWidth > e.clientWidth + 1)
                    || (/auto|scroll/.test(style.overflowY) && e.scrollHeight > e.clientHeight + 1);
            }}).map(name);
        }}"""
    )
