"""Turn a document into the token ids that are scored.

If the manifest names a boundary token, it is the context of a document's first token, so that every token of the
document is scored, as lm-eval's rolling log-likelihood does with its prefix token. Otherwise the first token is only
context.
"""

from __future__ import annotations

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.vocabulary import Vocabulary
from txl_runtime.errors import UsageError

from txl_deploy.corpora.documents import Bad, Document, Unit


class Encoder:
    """An encoder of documents as units.

    Args:
        vocabulary: the bundle's; without one only documents of token ids can be scored.
    """

    def __init__(self, manifest: Manifest, vocabulary: Vocabulary | None) -> None:
        self._vocab_size, self._vocabulary = manifest.vocab_size, vocabulary
        boundary = manifest.boundary_token
        self._context = np.array([] if boundary is None else [boundary], np.int32)
        self._unknown: int | None = getattr(vocabulary, "unknown", None)  # bytes know every word

    def unit(self, document: Document | Bad) -> Unit | Bad:
        """Encode a document as a unit; bad without a vocabulary, with an unknown word, or with ids out of range."""
        if isinstance(document, Bad):
            return document
        try:
            return self._unit(document)
        except UsageError as error:
            return Bad(document.index, document.id, f"{document.place}: {error}")

    def _unit(self, document: Document) -> Unit:
        content, context = document.content, self._context
        if not isinstance(content, bytes):
            given = np.asarray(content, np.int64)
            wrong = (given < 0) | (given >= self._vocab_size)
            if wrong.any():
                raise UsageError(
                    f"holds id {given[wrong][0]}, expected 0 … {self._vocab_size - 1}; check the vocabulary the ids "
                    "come from"
                )
            ids, scored_bytes = given.astype(np.int32), None
        elif self._vocabulary is None:
            raise UsageError(
                "the bundle has no vocabulary to read text with; give token ids, or export with --vocabulary FILE"
            )
        else:
            ids = self._vocabulary.encode(content)
            scored_bytes = max(len(content) - (0 if len(context) else len(self._vocabulary.decode(ids[:1]))), 0)
        return Unit(
            document.index,
            document.id,
            document.place,
            document.weight,
            ids=np.concatenate([context, ids]),
            tokens=len(ids),
            scored_bytes=scored_bytes,
            unknown=0 if self._unknown is None else int((ids == self._unknown).sum()),
        )
