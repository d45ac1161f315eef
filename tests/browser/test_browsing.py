"""The checks that tests of pages make, shown on pages that have these faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from browsing import accessibility, opened, reached_by_tab, served, to_reach, too_wide

pytestmark = pytest.mark.slow(keep=9)

SOUND = """<!doctype html><html lang="en"><head><title>t</title><meta name="viewport" content="width=device-width">
<style>#area { overflow: auto; height: 3em; }
a, summary, input { display: inline-block; margin: 12px; }</style></head><body><main><h1>A page</h1>
<p>Text</p><a href="#end">end</a><details><summary>more</summary><button>hidden at first</button></details>
<input type="radio" name="r" id="a"><label for="a">a</label><input type="radio" name="r" id="b"><label for="b">b</label>
<div id="area" tabindex="0" role="region" aria-label="numbers"><p>1</p><p>2</p><p>3</p><p>4</p></div>
<p id="end">END</p></main></body></html>"""


def page(folder: Path, change: str = "", to: str = "") -> str:
    """The address of a sound page, or of one with a fault."""
    assert change in SOUND
    file = folder / "page.html"
    file.write_text(SOUND.replace(change, to), encoding="utf-8")
    return file.as_uri()


def test_a_sound_page_has_no_faults(chrome, tmp_path):
    with opened(chrome, page(tmp_path), width=380) as window:
        assert window.faults() == []
        assert accessibility(window.page) == []
        assert too_wide(window.page) == []
        assert set(to_reach(window.page)) == set(reached_by_tab(window.page)), "and the end of the page is left"
        assert len(to_reach(window.page)) == 4


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("<img src='http://elsewhere.invalid/x.png' alt=''>", "asked for http://elsewhere.invalid/x.png"),
        ("<link rel='stylesheet' href='file:///etc/other.css'>", "asked for file:///etc/other.css"),
        ("<script>fetch('https://elsewhere.invalid').catch(() => 0)</script>", "asked for https://elsewhere.invalid/"),
        ("<script>new WebSocket('ws://127.0.0.1:9/x')</script>", "asked for ws://127.0.0.1:9/x"),
        ("<script>console.log('hello')</script>", "said log: hello"),
        ("<script>throw Error('no')</script>", "said error: no"),
        ("<script>alert('hm')</script>", "opened a dialog: hm"),
        ("<img src='data:x' alt='' onerror='window.owned = 1'>", "executed owned"),
    ],
)
def test_what_a_page_must_not_do_is_noticed(chrome, tmp_path, fault, told):
    with opened(chrome, page(tmp_path, "Text", fault)) as window:
        window.page.wait_for_timeout(50)
        assert told in window.faults()


def test_what_the_policy_of_a_page_refuses_is_noticed(chrome, tmp_path):
    policy = "<meta http-equiv='Content-Security-Policy' content=\"script-src 'none'\"><title>t</title>"
    with opened(chrome, page(tmp_path, "<title>t</title>", policy + "<script>1</script>")) as window:
        assert "refused script-src-elem: inline" in window.faults()


def test_what_cannot_be_used_is_noticed(chrome, tmp_path):
    with opened(chrome, page(tmp_path, "Text", f"<pre>{'x' * 900}</pre>"), width=380) as window:
        assert "PRE" in "".join(too_wide(window.page)), "wider than the window"
    with opened(chrome, page(tmp_path, "Text", "<button tabindex='-1'>b</button>")) as window:
        assert [left.split()[1] for left in set(to_reach(window.page)) - set(reached_by_tab(window.page))] == ["BUTTON"]
    trap = "<button onkeydown='event.preventDefault()'>b</button>"
    with opened(chrome, page(tmp_path, "Text", trap)) as window:
        assert len(reached_by_tab(window.page)) < len(to_reach(window.page)), "nothing behind a trap is reached"
    with opened(chrome, page(tmp_path, "Text", "<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>")) as window:
        assert any(line.startswith("image-alt:") for line in accessibility(window.page))
    with opened(chrome, page(tmp_path, "Text", "<p style='color:#999'>pale</p>")) as window:
        assert any(line.startswith("color-contrast:") for line in accessibility(window.page))


def test_a_page_of_a_server_may_ask_its_own_address_alone(chrome, tmp_path):
    page(tmp_path, "Text", "<img src='/own.png' alt=''><img src='http://localhost:1/other.png' alt=''>")

    with served(tmp_path) as origin, opened(chrome, f"{origin}/page.html") as window:
        window.page.wait_for_load_state("networkidle")
        assert window.foreign == ["http://localhost:1/other.png"]
