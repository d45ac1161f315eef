"""Turn a document into the token ids that are scored.

If the manifest names a boundary token, it is put before a document's first token, so that every token of the document
is scored; lm-eval's rolling log-likelihood does the same with its prefix token. Without a boundary token, the first
token is not scored.
"""

from __future__ import annotations

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.vocabulary import Vocabulary
from txl_runtime.errors import UsageError

from txl_deploy.corpora.documents import Bad, Document, Unit


class Encoder:
    """An encoder, which turns documents into units.

    Args:
        manifest: the bundle's manifest, which may name a boundary token.
        vocabulary: the bundle's vocabulary; if it is None, only documents of token ids can be encoded.
    """

    def __init__(self, manifest: Manifest, vocabulary: Vocabulary | None) -> None:
        self._vocab_size, self._vocabulary = manifest.vocab_size, vocabulary
        boundary = manifest.boundary_token
        self._context = np.array([] if boundary is None else [boundary], np.int32)
        self._unknown: int | None = getattr(vocabulary, "unknown", None)  # a byte vocabulary has no unknown words

    def unit(self, document: Document | Bad) -> Unit | Bad:
        """Encode a document; return `Bad` if there is no vocabulary, a word is unknown, or an id is out of range."""
        if isinstance(document, Bad):
            return document
        try:
            return self._unit(document)
        except UsageError as error:
            return Bad(document.index, document.id, f"{document.place}: {error}")

    def _unit(self, document: Document) -> Unit:
        content, context = document.content, self._context
        if not isinstance(content, bytes):
            token_ids = np.asarray(content, np.int64)
            wrong = (token_ids < 0) | (token_ids >= self._vocab_size)
            if wrong.any():
                raise UsageError(
                    f"holds id {token_ids[wrong][0]}, expected 0 … {self._vocab_size - 1}; check the vocabulary the "
                    "ids come from"
                )
            ids, scored_bytes = token_ids.astype(np.int32), None
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
