"""Write one HTML file that needs no server and no network; it holds the page, its modules, the engine and a bundle."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path

from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.writing import write_named
from txl_runtime.errors import UsageError

from txl_deploy.packages import model_name
from txl_deploy.page import STYLES
from txl_deploy.places import refuse_inside
from txl_deploy.web.package import MODULES, WebPackage, library_of, page, page_files, runtime_files, used_files

ENGINE = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
"""Files of onnxruntime-web: a script that contains its glue code, so that a page fetches none, and the engine."""
UNPACK = Path(__file__).parent / "unpack.js"
PACKED = b'id="packed"'
"""Bytes by which a page of one file is recognised; `--force` replaces only files that have them."""


def package_single(bundle: Path, out: Path, force: bool = False, engine: Path | None = None) -> WebPackage:
    """Write a page of one file, which holds the bundle, the engine and the runtime in packed form.

    Args:
        bundle: the bundle's folder.
        out: the file to write; it must not exist without `force`.
        force: True to replace a page that was written before.
        engine: as in `package_web`.

    Raises:
        UsageError: the file is there and may not be replaced, or cannot be written; or the npm package is missing.
        BundleError: the bundle cannot be read.
        BackendError: a page cannot run the bundle.
    """
    if out.exists() and not force:
        raise UsageError(f"{out}: already exists, expected a free path; give --force to replace it")
    if out.is_file() and PACKED not in out.read_bytes():
        raise UsageError(f"{out}: not a page that this command wrote, expected one or a free path; choose another path")
    refuse_inside(out, bundle)
    library, name = library_of(engine or MODULES, ENGINE), model_name(bundle)
    names = used_files(bundle, open_bundle(bundle).manifest)
    parts = [
        {f"model/{each}": (bundle / each).read_bytes() for each in names},
        {f"onnxruntime-web/{each}": (library / each).read_bytes() for each in ENGINE},
        {f"txl-runtime/{each}": path.read_bytes() for each, path in runtime_files().items()}
        | {path.name: path.read_bytes() for path in page_files() if path.suffix == ".js"},
    ]
    packed = [{each: _packed(data) for each, data in part.items()} for part in parts]
    write_named(out, _page(name, {each: text for part in packed for each, text in part.items()}).encode())
    bundle_bytes, engine_bytes, page_bytes = (sum(map(len, part.values())) for part in packed)
    return WebPackage(out, name, bundle_bytes, engine_bytes, page_bytes)


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


def _page(name: str, files: dict[str, str]) -> str:
    style = "".join(path.read_text("utf-8") for path in STYLES)
    script = f"\n{UNPACK.read_text('utf-8')}"
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    allowed = f"script-src 'sha256-{digests[0]}' blob: data: 'wasm-unsafe-eval'; style-src 'sha256-{digests[1]}'"
    held = json.dumps({"name": name, "files": files}).replace("<", "\\u003c")
    whole = page(f"default-src 'none'; {allowed}; img-src data:", f"<style>{style}</style>", "")
    scripts = f'<script type="application/json" id="packed">{held}</script>\n<script type="module">{script}</script>'
    return whole.replace("</body>", f"{scripts}\n</body>")
