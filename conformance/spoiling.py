"""Bad bundles, built as `bad_bundles/README.md` tells, and what readers have to make of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import Any

from conformance.talking import Talk

CORPUS = Path(__file__).parent / "bad_bundles"
LONGEST_LINE = 4000
TRIED = "refused when tried"


@cache
def index(corpus: Path = CORPUS) -> dict[str, Any]:
    """The list of cases."""
    found: dict[str, Any] = json.loads((corpus / "index.json").read_text("utf-8"))
    return found


def build(case: dict[str, Any], into: Path, corpus: Path = CORPUS) -> Path:
    """A case's bundle, in a folder that is not there yet."""
    shutil.copytree(corpus / index(corpus)["bases"][case["base"]], into)
    for change in case["changes"]:
        _apply(corpus, change, into)
    return into


def allowed(expected: str) -> tuple[str, ...]:
    """The outcomes that are right where the list expects this."""
    more: dict[str, tuple[str, ...]] = {"refused when used": ("refused", "refused when used")}
    more[TRIED] = more["refused when used"]
    more["loads or refused"] = ("loads", "refused", "unsupported")
    return more.get(expected, (expected,))


def outcome(talk: Talk, path: Path, supported: Set[str], trial: bool = False) -> tuple[str, str]:
    """Let a driver open and use a bundle; returns the outcome in the list's words, or "unsupported", and its message.

    Raises:
        DriverFailed: the driver ended before it answered.
    """
    uses: dict[str, dict[str, Any]] = {"text": {"do": "encode", "bytes": ""}, "selftest": {"do": "selftest"}}
    requests: list[dict[str, Any]] = [{"do": "load", "path": str(path), "update": None, "trial": trial}]
    requests += [uses[name] for name in uses if name in supported]
    for number, request in enumerate(requests):
        reply = talk.ask(request)
        done, kind, said = reply.get("ok"), reply.get("kind"), str(reply.get("refused"))
        if "ok" in reply:
            if request["do"] == "selftest" and done != {"passed": True}:
                return "self-test fails", ""
        elif kind == "unsupported":
            return kind, said
        elif kind in ("bundle", "backend"):
            if not (said.isprintable() and 0 < len(said) < LONGEST_LINE):
                return "refused in other than one line", said
            return ("refused when used" if number else "refused"), said
        elif number == 0:  # a bundle without a vocabulary refuses to encode, as it should
            return f"refused as {kind!r}", said
    return ("loads", "") if supported >= uses.keys() else ("unsupported", "")


def _apply(corpus: Path, change: dict[str, Any], bundle: Path) -> None:
    """Make one change of a bundle."""
    path = bundle / change["file"]
    match change["do"]:
        case "delete":
            path.unlink()
        case "put":
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(corpus / "files" / change["from"], path)
        case "copy":
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / change["from"], path)
        case "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes.fromhex(change["hex"]) * change.get("times", 1))
        case "append":
            path.write_bytes(path.read_bytes() + bytes.fromhex(change["hex"]) * change.get("times", 1))
        case "cut":
            path.write_bytes(path.read_bytes()[: change["size"]])
        case "flip":
            data = bytearray(path.read_bytes())
            data[change["at"]] ^= 1 << change["bit"]
            path.write_bytes(data)
        case "replace":
            new = bytes.fromhex(change["hex"]) * change.get("times", 1)
            path.write_bytes(path.read_bytes().replace(change["old"].encode(), new, 1))
        case "set" | "remove" | "many":
            _edit(path, change)
        case "link":
            path.unlink(missing_ok=True)
            path.symlink_to(change["to"])
        case "pipe":
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        case "folder":
            path.unlink(missing_ok=True)
            path.mkdir(parents=True)
        case "list":
            data = path.read_bytes()
            facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            manifest = json.loads((bundle / "manifest.json").read_bytes())
            manifest["files"][change.get("as", change["file"])] = facts
            (bundle / "manifest.json").write_text(json.dumps(manifest), "utf-8")
        case unknown:
            raise ValueError(f"{unknown}: no such change")


def _edit(path: Path, change: dict[str, Any]) -> None:
    """Set or remove what a JSON pointer leads to, or put a list of numbered parts there."""
    document = json.loads(path.read_bytes())
    holder = document
    *parts, last = (part.replace("~1", "/").replace("~0", "~") for part in change["at"].split("/")[1:])
    for part in parts:
        holder = holder[int(part) if isinstance(holder, list) else part]
    key: Any = int(last) if isinstance(holder, list) else last
    if change["do"] == "remove":
        del holder[key]
    elif change["do"] == "many":
        holder[key] = [json.loads(change["each"].replace("#", str(n))) for n in range(1, 1 + change["times"])]
    else:
        holder[key] = change["to"]
    path.write_text(json.dumps(document), "utf-8")
