"""From a document to the token ids that are scored.

Where the manifest names a boundary token, it is the context of a document's first token, so that every token of the
document is scored: what lm-eval's rolling log-likelihood does with its prefix token. Elsewhere the first token is only
context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.vocabulary import Vocabulary
from txl_runtime.errors import UsageError

from txl_deploy.corpora.documents import Bad, Document, Unit


class Encoder:
    """Makes units of documents.

    Args:
        manifest: of the bundle.
        vocabulary: of the bundle; without one only documents of token ids can be scored.
    """

    def __init__(self, manifest: Manifest, vocabulary: Vocabulary | None) -> None:
        self._vocab_size, self._vocabulary = manifest.vocab_size, vocabulary
        boundary = manifest.boundary_token
        self._context = np.array([] if boundary is None else [boundary], np.int32)
        self._unknown: int | None = getattr(vocabulary, "unknown", None)  # bytes know every word

    def units(self, documents: Iterable[Document | Bad]) -> Iterator[Unit | Bad]:
        """Units in the documents' order; what has no token ids becomes bad."""
        for document in documents:
            if isinstance(document, Bad):
                yield document
                continue
            try:
                yield self.unit(document)
            except UsageError as error:
                yield Bad(document.index, document.id, document.weight, f"{document.place}: {error}")

    def unit(self, document: Document) -> Unit:
        """The unit of a document.

        Raises:
            UsageError: there is no vocabulary to read a text with, a word is not in it, or ids are out of range.
        """
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
            scored_bytes = len(content) - (0 if len(context) else len(self._vocabulary.decode(ids[:1])))
        return Unit(
            index=document.index,
            id=document.id,
            place=document.place,
            weight=document.weight,
            data=np.concatenate([context, ids]).tobytes(),
            tokens=len(ids),
            scored_bytes=None if scored_bytes is None else max(scored_bytes, 0),
            unknown=0 if self._unknown is None else int((ids == self._unknown).sum()),
        )
