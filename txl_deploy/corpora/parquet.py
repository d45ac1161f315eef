"""Documents in the rows of a parquet file: a column with text or with token ids, and `id` if there is one.

pyarrow reads them; it is no dependency, and is looked for when a parquet file is met.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from txl_runtime.errors import BackendError, UsageError, one_line
from txl_runtime.streaming.checks import shown

from txl_deploy.corpora.documents import Bad, Document, Done, spelled
from txl_deploy.corpora.json_lines import MOST_OF_ID, broken_off

ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 1 << 24
"""Of values, by what the file says of them: a file of a few hundred bytes may hold large ones many times."""


def require_pyarrow(file: Path) -> None:
    """Refuse a parquet file where pyarrow is not installed.

    Raises:
        BackendError: it is not.
    """
    if find_spec("pyarrow") is None:
        raise BackendError(
            f"{spelled(file)}: parquet files need pyarrow, not installed here; pip install pyarrow, or give JSON lines"
        )


def read_parquet(
    file: Path, name: str, named: str | None, index: int, done: Done
) -> Generator[Document | Bad, None, int]:
    """The documents of a file, but for those that are done; as `read_json_lines`.

    A file that holds no parquet, or not the columns, is one bad document.
    """
    number, place = 0, spelled(file)
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(file) as looked:
                schema = looked.schema_arrow
                column, has_id = _column(schema.names, named), "id" in schema.names
                columns = [column, *(["id"] if has_id and column != "id" else [])]
                once, rows = [each for each in columns if _is_text(schema.field(each).type)], _rows(looked.metadata)
        except (ArrowInvalid, UsageError) as error:  # of what the file holds: every run finds the same
            if not done(index, 0):
                is_ours = isinstance(error, UsageError)
                said = str(error) if is_ours else f"{one_line(error)}, expected a parquet file; check it"
                yield Bad(index, name, 0, f"{place}: {said}")
            return index + 1
        with ParquetFile(file, read_dictionary=once) as opened:  # a value that stands there once is held once
            weight = max(file.stat().st_size // max(opened.metadata.num_rows, 1), 1)
            for batch in opened.iter_batches(batch_size=rows, columns=columns):
                for at in range(batch.num_rows):
                    number += 1
                    if not done(index, weight):
                        here = Document(index, f"{name}:{number}", f"{place}:{number}", b"", weight)
                        yield _document(batch, at, column, has_id, here)
                    index += 1
    except Exception as error:  # pyarrow raises its own kinds and the system's
        raise broken_off(file, number, error) from None
    return index


def _is_text(kind: Any) -> bool:
    """Whether a column's values are text or bytes, by their type in pyarrow."""
    from pyarrow import types

    return any(
        is_kind(kind) for is_kind in (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    )


def _rows(metadata: Any) -> int:
    """How many rows to read at once, so that values of a mean size stay within `BYTES_AT_ONCE`."""
    rows = ROWS_AT_ONCE
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(each) for each in range(group.num_columns)]
        most = max((max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks), default=0)
        rows = min(rows, max(1, BYTES_AT_ONCE * group.num_rows // max(most, 1)))
    return rows


def _column(there: Sequence[str], named: str | None) -> str:
    """Which column holds the documents.

    Raises:
        UsageError: there is none, or it is not clear which.
    """
    if named is not None:
        if named not in there:
            raise UsageError(f"has columns {shown(list(there)[:8])}, expected {shown(named)}; check --field")
        return named
    known = [column for column in ("text", "tokens") if column in there]
    if len(known) != 1:
        raise UsageError(f"has columns {shown(list(there)[:8])}, expected one of text and tokens; name it with --field")
    return known[0]


def _document(batch: Any, row: int, column: str, has_id: bool, at: Document) -> Document | Bad:
    """What a row holds; `at` says its place, and its name where it has none of its own."""
    id = at.id
    try:
        given = batch.column("id")[row].as_py() if has_id else None
        id = at.id if given is None else str(given)[:MOST_OF_ID]
        value = batch.column(column)[row].as_py()
    except ValueError as error:  # a text that is no UTF-8, say
        what = f"{at.place}: {one_line(error)}, expected a text or a list of token ids"
    else:
        if isinstance(value, str):
            return Document(at.index, id, at.place, value.encode(errors="surrogatepass"), at.weight)
        whole = isinstance(value, list) and all(type(each) is int and 0 <= each < 2**31 for each in value)
        if isinstance(value, bytes) or whole:
            return Document(at.index, id, at.place, value, at.weight)
        what = f"{at.place}: {column} is {shown(value)}, expected a text or a list of token ids"
    return Bad(at.index, id, at.weight, f"{what}; mend it, or leave such documents out with --skip-bad")
