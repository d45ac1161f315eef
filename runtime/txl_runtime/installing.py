"""What to type where an optional part is missing: the project is on no index, and anyone may register its name."""

from __future__ import annotations

import shlex
from pathlib import Path


def pip_line(extra: str) -> str:
    """The line that adds an extra: from where this environment's package came, else from a checkout.

    pip notes in `direct_url.json` which folder or file it installed; it notes nothing where it was given a name.
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
    except (PackageNotFoundError, ValueError, AttributeError, OSError):  # not installed, or noted by something else
        pass
    return f"pip install '.[{extra}]' in a checkout of the project"
