"""Write a folder to serve: the bundle, the runtime in JavaScript, ONNX Runtime for WebAssembly, and a page.

DIR/index.html, *.css, *.js          the page, which a server has at /playground
DIR/model/                           the files of the bundle that a page reads
DIR/txl-runtime/                     the runtime in JavaScript
DIR/onnxruntime-web/                 the engine, from the npm package
DIR/txl-package.json
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from txl_export.bundle.placing import check_destination, publishing
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import MANIFEST, open_bundle
from txl_runtime.errors import BackendError, UsageError

from txl_deploy.packages import REPOSITORY, model_name, seal
from txl_deploy.page import HTML, STATIC, STYLES, files
from txl_deploy.places import refuse_inside

TARGET = "web"
POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; connect-src 'self'; img-src data:"
"""Content security policy of a folder's page: it loads nothing from a different address."""
STYLE = "\n".join(f'<link rel="stylesheet" href="/playground/{path.name}">' for path in STYLES)
SCRIPT = '<script type="module" src="/playground/page.js"></script>'
RUNTIME = (Path(__file__).parent / "runtime", Path(__file__).parents[2] / "runtime" / "js")
"""Folders of the runtime in JavaScript: in an installed package, and in a checkout."""
ENGINE = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
MODULES = Path("node_modules/onnxruntime-web")


@dataclass(frozen=True)
class WebPackage:
    """Facts about a package that was written.

    Attributes:
        folder: the package's folder, or its single file.
        name: the model's name, which is also the page's title.
        bundle_bytes, engine_bytes, page_bytes: uncompressed bytes of each part that a page downloads, or bytes that the
            part takes in a single file; `page_bytes` includes the runtime.
    """

    folder: Path
    name: str
    bundle_bytes: int
    engine_bytes: int
    page_bytes: int


def package_web(bundle: Path, out: Path, force: bool = False, engine: Path | None = None) -> WebPackage:
    """Write a package for a browser.

    Args:
        bundle: the bundle's folder.
        out: the folder to write; it must not exist without `force`.
        force: True to replace a package that was written before.
        engine: the folder of the npm package onnxruntime-web; None for `node_modules/onnxruntime-web` here.

    Raises:
        UsageError: the folder cannot be written, or the npm package is missing.
        BundleError: the bundle cannot be read.
        BackendError: a page cannot run the bundle.
    """
    check_destination(out, force, REPOSITORY)
    refuse_inside(out, bundle)
    library = library_of(engine or MODULES, ENGINE)
    manifest = open_bundle(bundle).manifest
    names = used_files(bundle, manifest)
    with publishing(out, force, REPOSITORY) as folder:
        for name in names:
            _copy(bundle / name, folder / "model" / name)
        for name in ENGINE:
            _copy(library / name, folder / "onnxruntime-web" / name)
        for each, path in runtime_files().items():
            _copy(path, folder / "txl-runtime" / each)
        for path in page_files():
            _copy(path, folder / path.name)
        style, script = (line.replace("/playground/", "") for line in (STYLE, SCRIPT))
        (folder / "index.html").write_text(page(POLICY, style, script), "utf-8")
        seal(folder, TARGET, [model_name(bundle)], manifest)
    fetched = [name for name in names if name != manifest.selftest]
    own = [out / "index.html", *(out / path.name for path in page_files()), *(out / "txl-runtime").rglob("*.js")]
    return WebPackage(
        out,
        model_name(bundle),
        _size(out / "model" / name for name in fetched),
        _size(out / "onnxruntime-web" / name for name in ENGINE),
        _size(own),
    )


def used_files(bundle: Path, manifest: Manifest) -> list[str]:
    """Return the names of the files that a page may read, with the programs of one update rule, which is not the ring.

    Raises:
        BackendError: the bundle's only update rule is the ring.
    """
    rules = [rule for rule in manifest.updates if rule != "ring"]
    if not rules:
        raise BackendError(
            f"{bundle}: this bundle has memory in a ring alone, which onnxruntime-web cannot write in place, expected "
            "programs of rolled memory; export the model again with these"
        )
    programs = {program.file for program in manifest.programs if program.update == rules[0]}
    more = {name for name in (manifest.vocabulary, manifest.selftest) if name is not None}
    return sorted({MANIFEST, manifest.weights, *programs, *more})


def page_files() -> list[Path]:
    """Return all files of the page except its HTML."""
    return [path for path in files() if path.name != HTML]


def page(policy: str, style: str, script: str) -> str:
    """Return the HTML of a page that runs the model itself.

    Args:
        policy: the page's content security policy.
        style, script: the tags that load the page's styles and its script.
    """
    html = (STATIC / HTML).read_text("utf-8")
    meta = '<meta charset="utf-8">'
    for old, new in (
        (meta, f'{meta}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        (STYLE, style),
        (SCRIPT, script),
        ('<body class="blank">', '<body class="blank local">'),
    ):
        assert old in html, old
        html = html.replace(old, new)
    return html


def runtime_files() -> dict[str, Path]:
    """Return the files of the runtime in JavaScript, by their names in its package, e.g. "src/model.js"."""
    folder = next(folder for folder in RUNTIME if (folder / "index.js").is_file())
    paths = (folder / "index.js", *sorted((folder / "src").glob("*.js")))
    return {path.relative_to(folder).as_posix(): path for path in paths}


def library_of(engine: Path, names: Sequence[str]) -> Path:
    """Return the folder with the built files of the npm package onnxruntime-web.

    Raises:
        UsageError: one of the files in `names` is missing.
    """
    folder = engine / "dist"
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UsageError(
            f"{folder}: no {missing[0]} in it, expected the npm package onnxruntime-web; npm install onnxruntime-web, "
            "or give --onnxruntime-web FOLDER"
        )
    return folder


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)
