"""The shared corpus of bad bundles (tests/fixtures/bad_bundles), as its README tells to build them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parents[1] / "fixtures" / "bad_bundles"


@cache
def index() -> dict[str, Any]:
    """The list of cases."""
    found: dict[str, Any] = json.loads((CORPUS / "index.json").read_text("utf-8"))
    return found


def build(case: dict[str, Any], into: Path) -> Path:
    """A case's bundle, in a folder that is not there yet."""
    shutil.copytree(CORPUS / index()["bases"][case["base"]], into)
    for change in case["changes"]:
        _apply(change, into, into / change["file"])
    return into


def _apply(change: dict[str, Any], bundle: Path, path: Path) -> None:
    match change["do"]:
        case "delete":
            path.unlink()
        case "put":
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(CORPUS / "files" / change["from"], path)
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
