"""The page that an export writes into the bundle: it shows people what the bundle is and what proves it."""

from __future__ import annotations

from pathlib import Path

import txl_runtime
from txl_report.page import Measures
from txl_report.rendering import require_jinja
from txl_report.writing import PAGE, measure, page_for_export
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import BackendError, one_line
from txl_runtime.listener import Listener

from txl_export.families.registry import facts_of_bundle
from txl_export.graphs.emulation import runnable
from txl_export.options import ExportOptions
from txl_export.token_files import read_tokens


def add_page(folder: Path, name: str, options: ExportOptions, heard: Listener) -> bool:
    """Write the page of a sealed bundle into its folder; the caller has to seal the bundle again.

    An export that has passed does not fail for its page: if none can be made, the listener receives the reason. Only a
    disk that refuses it ends the export, because later files would not fit either.

    Returns:
        True if there is a page.

    Raises:
        OSError: the disk refuses it.
    """
    heard.stage("write the page")
    try:
        require_jinja()
        bundle = open_bundle(folder)

        def measured() -> Measures:
            ids = read_tokens(options.text, options.tokens, bundle.vocabulary(), bundle.manifest.vocab_size)
            assert ids is not None
            given = options.text if options.text is not None else options.tokens
            source = Path(given).name if isinstance(given, str | Path) else "token ids"
            with runnable(folder, bundle.manifest, "cpu") as runs:
                return measure(txl_runtime.load(runs, "cpu"), ids, source, context=False, listener=heard)

        real = options.text is not None or options.tokens is not None
        judged = real and bundle.manifest.vocab_size > 0
        described = facts_of_bundle(bundle.manifest)
        page = page_for_export(bundle, name, described, measured if judged else None, heard)
    except BackendError as error:
        heard.warn(f"the bundle has no {PAGE}: {error}")
        return False
    except OSError:
        raise
    except Exception as error:  # a defect in the page's own code; the bundle is right
        heard.warn(f"the bundle has no {PAGE}: {type(error).__name__}: {one_line(error)}; report this")
        return False
    (folder / PAGE).write_bytes(page)
    return True
