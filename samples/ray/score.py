"""Score documents on a cluster: the scorer of `txl-deploy score` in a pool of actors of Ray Data.

    python score.py BUNDLE DOCUMENTS -o OUT                        a cluster of this machine, for this run
    python score.py BUNDLE DOCUMENTS -o OUT --address auto         the cluster that this machine belongs to

DOCUMENTS is a folder of texts, a .jsonl or a .parquet file, on this machine or wherever Ray Data reads from. In a file,
every document has a different `id`; the id of a text in a folder is its path there. OUT gets a line of JSON per
document; a second run leaves out the documents that are in OUT. Every machine needs the extra `cpu` of txl-deploy,
`ray[data]`, and the bundle under the same path.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
import txl_runtime
from ray.data import ActorPoolStrategy, DataContext, Dataset
from ray.exceptions import RayError
from txl_runtime.errors import TxlError, UsageError

from txl_deploy.corpora.documents import Bad, Document, Unit
from txl_deploy.corpora.encoding import Encoder
from txl_deploy.corpora.scoring import Scorer, batches
from txl_deploy.corpora.sources import content_of
from txl_deploy.corpora.totals import Scores, Totals, left_out, scores_of

CPUS_PER_ACTOR = 0.5
"""The processors that an actor claims. If actors claimed all processors, none would be left for reading, and the job
would wait forever. An actor computes with one thread in any case.
"""
DOCUMENTS_PER_CALL = 64
"""Number of documents per call of an actor. It sorts them by length, so that few rows wait for a longer document."""
BLOCKS_PER_ACTOR = 8
"""Number of blocks of documents per actor. Ray repeats a whole block if the machine that scores it dies."""

Rows = dict[str, np.ndarray[Any, Any]]
"""A batch of rows as Ray Data passes it: arrays, one per column, by name."""


class Actor:
    """A process on any machine of the cluster, which holds the model and scores documents."""

    def __init__(self, bundle: str, model_id: str, place: str) -> None:
        model = txl_runtime.load(bundle, threads=1)
        if model.manifest.model_id != model_id:
            raise UsageError(f"{bundle}: holds another model on this machine, expected {model_id[:12]}; copy it again")
        self._place = place
        self._scorer, self._encoder = Scorer(model), Encoder(model.manifest, model.vocabulary)

    def __call__(self, rows: Rows) -> dict[str, list[bytes]]:
        """Return a line of JSON for each document: its scores, or the reason why it cannot be scored."""
        units = [self._encoder.unit(document) for document in as_documents(rows, self._place)]
        scores = [left_out(bad) for bad in units if isinstance(bad, Bad)]
        for batch in batches([unit for unit in units if isinstance(unit, Unit)], self._scorer.rows):
            for unit, total in zip(batch, self._scorer.score(batch), strict=True):
                bad = Bad(unit.index, unit.id, f"{unit.id}: {total}")
                scores.append(left_out(bad) if isinstance(total, str) else scores_of(unit, total))
        return {"line": [msgspec.json.encode(each) for each in scores]}


def as_documents(rows: Rows, place: str) -> list[Document]:
    """Return the documents in a batch of rows."""
    count = len(next(iter(rows.values()), ()))
    return [as_document({name: column[at] for name, column in rows.items()}, place) for at in range(count)]


def leave_out(rows: Rows, done: frozenset[str], place: str) -> Rows:
    """Return the rows whose documents have no result yet."""
    wanted = np.array([document.id not in done for document in as_documents(rows, place)], np.bool_)
    return {name: column[wanted] for name, column in rows.items()}


def as_document(row: dict[str, Any], place: str) -> Document:
    """Convert a row of Ray Data to a document. The row holds a line of JSON, the bytes of a file, or a table's row.

    Raises:
        UsageError: the row has no id or no content.
    """
    name: Any
    content: Any
    if "path" in row:
        name, content = name_in(place, str(row["path"])), row["bytes"]
    elif set(row) == {"text"}:
        fields = msgspec.json.decode(row["text"], type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(fields["id"], type=str | int) if "id" in fields else None
        content = content_of(fields, None)
    else:
        name, content = row.get("id"), row.get("text", row.get("tokens"))
        content = content.encode() if isinstance(content, str) else content
    if name is None or content is None:
        raise UsageError(f"a document has {sorted(row)}, expected an id of its own and a text or tokens; add them")
    return Document(0, str(name), str(name), content, 0)


def name_in(place: str, path: str) -> str:
    """Return a file's name in the results: its path inside the folder `place`, as `txl-deploy score` has it."""
    folder, file = (each.partition("://")[2] or each for each in (place, path))
    inside = file.removeprefix(folder.rstrip("/") + "/")
    return inside if inside != file else Path(file).name


def read(place: str, blocks: int) -> Dataset:
    """Read the documents from files and folders, on this machine or elsewhere."""
    if place.endswith(".jsonl"):
        return ray.data.read_text(place, override_num_blocks=blocks)
    if place.endswith(".parquet"):
        return ray.data.read_parquet(place, override_num_blocks=blocks)
    return ray.data.read_binary_files(place, include_paths=True, override_num_blocks=blocks)


def kept(out: Path, first: dict[str, str]) -> Iterator[Scores]:
    """Yield the results in a file, and cut off an incomplete last line.

    The file's first line is `first`, which names the model and the documents; an empty file gets this line.

    Raises:
        UsageError: the results belong to a different model or different documents.
    """
    with out.open("a+b") as stream:
        stream.seek(0)
        whole = 0
        for line in stream:
            if not line.endswith(b"\n"):
                break
            if not whole and json.loads(line) != first:
                raise UsageError(f"{out}: holds results of another run, expected {first}; give another -o")
            if whole:
                yield msgspec.json.decode(line, type=Scores)
            whole += len(line)
        stream.truncate(whole)
        if not whole:
            stream.write(json.dumps(first).encode() + b"\n")


def score(bundle: Path, documents: str, out: Path, actors: int) -> Totals:
    """Score the documents that `out` has no results of, append the results block by block, and return the totals.

    Raises:
        UsageError: two documents have the same id.
    """
    place = documents if "://" in documents else str(Path(documents).absolute())
    model_id = txl_runtime.load(bundle, threads=1).manifest.model_id
    totals, done = Totals(), set[str]()
    for each in kept(out, {"model_id": model_id, "documents": Path(documents).name}):
        totals.add(each)
        done.add(each.id)
    context = DataContext.get_current()
    # Ray repeats a call if its actor died; with this also after an OSError, because shared disks fail at times
    context.actor_task_retry_on_errors = [OSError]
    context.enable_progress_bars = sys.stderr.isatty()
    wanted = read(place, BLOCKS_PER_ACTOR * actors)
    if done:
        wanted = wanted.map_batches(leave_out, fn_kwargs={"done": frozenset(done), "place": place})
    scored = wanted.map_batches(
        Actor,
        fn_constructor_args=(str(bundle.resolve()), model_id, place),
        compute=ActorPoolStrategy(size=actors),
        batch_size=DOCUMENTS_PER_CALL,
        num_cpus=CPUS_PER_ACTOR,
    )
    with out.open("ab", buffering=0) as stream:
        for block in scored.iter_batches(batch_size=None, prefetch_batches=0):
            fresh = list[bytes]()
            for line in block.get("line", ()):
                each = msgspec.json.decode(line, type=Scores)
                if each.id in done:
                    stream.write(b"".join(fresh))
                    raise UsageError(f"two documents have the id {each.id!r}, expected one of its own for each")
                done.add(each.id)
                totals.add(each)
                fresh.append(bytes(line) + b"\n")
            stream.write(b"".join(fresh))
    return totals


def main() -> None:
    """Read the command line, join or start a cluster, score the documents, and print the totals."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("documents")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--address", help="of a cluster; without it one is started on this machine")
    parser.add_argument("--actors", type=int, default=os.cpu_count() or 1, help="in all, one thread each")
    options = parser.parse_args()
    local = {"num_cpus": options.actors + 1, "include_dashboard": False} if options.address is None else {}
    try:
        ray.init(address=options.address, log_to_driver=False, logging_level="warning", **local)
    except Exception as error:  # Ray raises its own classes, and different ones when time is over
        message = str(error).strip() or type(error).__name__
        sys.exit(f"error: no cluster could be reached or started: {message.splitlines()[-1]}")
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        totals = score(options.bundle, options.documents, options.output, options.actors)
    except (TxlError, RayError, OSError) as error:
        sys.exit(f"error: {str(error).strip().splitlines()[-1]}")
    finally:
        ray.shutdown()  # before the totals are printed, because the shutdown may print too
    print(json.dumps(totals.document(), indent=2))


if __name__ == "__main__":
    main()
