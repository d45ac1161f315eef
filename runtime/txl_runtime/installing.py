"""The pip line for a missing optional part: the project is on no index, and anyone may register its name there."""

from __future__ import annotations

import shlex
from pathlib import Path


def pip_line(extra: str) -> str:
    """Return the line that installs an extra, e.g. "cpu": from this environment's package, or a checkout.

    pip records in `direct_url.json` which folder or file it installed; for a package from an index it records nothing.
    """
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        came = json.loads(distribution("txl-deploy").read_text("direct_url.json") or "{}")
        url = urlsplit(came.get("url", ""))
        place = Path(url2pathname(url.path))
        if url.scheme == "file" and place.exists():
            editable = "-e " if came.get("dir_info", {}).get("editable") else ""
            return f"pip install {editable}{shlex.quote(f'{place}[{extra}]')}"
    except (PackageNotFoundError, ValueError, AttributeError, OSError):  # not installed, or a record in no known form
        pass
    return f"pip install '.[{extra}]' in a checkout of the project"
