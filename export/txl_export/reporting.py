"""Writes a page into an exported bundle that shows what the bundle contains and how it was verified."""

from __future__ import annotations

from pathlib import Path

import txl_runtime
from txl_report.facts.model import PAGE
from txl_report.page import Measures
from txl_report.rendering import require_jinja
from txl_report.writing import measure, page_for_export
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import BackendError, one_line
from txl_runtime.listener import Listener

from txl_export.families.registry import facts_of_bundle
from txl_export.graphs.emulation import runnable
from txl_export.options import ExportOptions
from txl_export.token_files import read_tokens


def add_page(folder: Path, name: str, options: ExportOptions, listener: Listener) -> bool:
    """Write the page of a sealed bundle into its folder; the caller has to seal the bundle again.

    If the page cannot be made, the export goes on, and the listener receives the reason. Only a disk error ends the
    export, because later files would not fit either.

    Returns:
        True if the page was written.

    Raises:
        OSError: the page cannot be written.
    """
    listener.stage("write the page")
    try:
        require_jinja()
        bundle = open_bundle(folder)

        def measured() -> Measures:
            ids = read_tokens(options.text, options.tokens, bundle.vocabulary(), bundle.manifest.vocab_size)
            assert ids is not None
            text = options.text if options.text is not None else options.tokens
            source = Path(text).name if isinstance(text, str | Path) else "token ids"
            with runnable(folder, bundle.manifest, "cpu") as runs:
                return measure(txl_runtime.load(runs, "cpu"), ids, source, context=False, listener=listener)

        real = options.text is not None or options.tokens is not None
        judged = real and bundle.manifest.vocab_size > 0
        described = facts_of_bundle(bundle.manifest)
        page = page_for_export(bundle, name, described, measured if judged else None, listener)
    except BackendError as error:
        listener.warn(f"the bundle has no {PAGE}: {error}")
        return False
    except OSError:
        raise
    except Exception as error:  # a defect of the page's code must not fail a good bundle
        listener.warn(f"the bundle has no {PAGE}: {type(error).__name__}: {one_line(error)}; report this")
        return False
    (folder / PAGE).write_bytes(page)
    return True
