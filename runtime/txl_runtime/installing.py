"""The pip command for a missing optional part. The command names a local path: the project is on no package index,
where a stranger could register its name.
"""

from __future__ import annotations

import shlex
from pathlib import Path


def pip_line(extra: str) -> str:
    """Return the pip command that installs an extra, e.g. "cpu", from the same folder or file as this package.

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
    # the package is not installed, or its record has an unknown form
    except (PackageNotFoundError, ValueError, AttributeError, OSError):
        pass
    return f"pip install '.[{extra}]' in a checkout of the project"
