"""Score many documents: read documents, sort and batch them by length, score on several threads, and write results.

`documents` defines a document, `sources` finds and reads documents, `encoding` turns them into token ids, `scoring`
batches and scores them, `results` writes the results. A corpus is never held in memory as a whole.
"""
