"""Documents in parquet files, with the pyarrow of `make clients`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parents[3] / ".clients" / "bin" / "python"
PROGRAM = """
import json, sys
from pathlib import Path
import pyarrow
from pyarrow import parquet
from txl_runtime.errors import UsageError
from txl_deploy.corpora.documents import Bad
from txl_deploy.corpora.sources import Corpus
folder = Path(sys.argv[1])
def write(name, **columns):
    parquet.write_table(pyarrow.table(columns), folder / name, row_group_size=100)
def read(name, done=lambda index, weight: False, **options):
    found = [*Corpus(folder / name, **options).documents(done)]
    return [[each.index, each.id, each.why if isinstance(each, Bad) else
             each.content.decode() if isinstance(each.content, bytes) else each.content] for each in found]
write("texts.parquet", id=["a", None, "c"], text=["one", "", None], other=[1, 2, 3])
write("ids.parquet", tokens=[[1, 2], [], [-1]])
write("both.parquet", tokens=[[1]], text=["t"])
write("body.parquet", body=["b"])
write("many.parquet", text=[str(number) for number in range(1000)])
(folder / "broken.parquet").write_bytes((folder / "many.parquet").read_bytes()[:-9])
no_text = pyarrow.array([b"one", b"\\xff", b"three"]).view(pyarrow.string())
write("latin.parquet", text=no_text)
def breaking_off():  # a disk that fails once: how much was read of the file, and what is said
    whole = parquet.ParquetFile.iter_batches
    def failing(self, **options):
        yield next(whole(self, **options))
        raise OSError(5, "Input/output error")
    parquet.ParquetFile.iter_batches, count = failing, 0
    try:
        for count, _ in enumerate(Corpus(folder / "many.parquet").documents(), 1):
            pass
        return [count, ""]
    except UsageError as error:
        return [count, str(error)]
    finally:
        parquet.ParquetFile.iter_batches = whole
def unopened():  # a file that was there when the corpus was listed
    corpus = Corpus(folder / "body.parquet")
    (folder / "body.parquet").unlink()
    try:
        return [each.why for each in corpus.documents()]
    except UsageError as error:
        return str(error)
print(json.dumps({
    "latin": read("latin.parquet"), "breaking off": breaking_off(),
    "broken, done": read("broken.parquet", done=lambda index, weight: True),
    "texts": read("texts.parquet"), "ids": read("ids.parquet"), "both": read("both.parquet"),
    "named": read("both.parquet", named="text"), "body": read("body.parquet", named="body"),
    "absent": read("body.parquet"), "many": len(read("many.parquet")),
    "rest": read("many.parquet", done=lambda index, weight: index != 501), "broken": read("broken.parquet"),
    "unopened": unopened(),
}))
"""


BOMBS = """
import json, sys
from pathlib import Path
import pyarrow
from pyarrow import parquet
from txl_deploy.corpora.parquet import read_parquet
file, found = Path(sys.argv[1]) / "bomb.parquet", {}
def bombs():
    one, places = pyarrow.array(["a" * 500_000]), pyarrow.array([0] * 256, pyarrow.int32())
    yield "text", pyarrow.DictionaryArray.from_arrays(places, one)
    yield "text", pyarrow.array(["a" * 500_000] * 256).cast(pyarrow.large_binary())
    yield "tokens", pyarrow.array([[0] * 50_000] * 256)
for name, column in bombs():
    for options in ({}, {"use_dictionary": False})[: 1 if name == "text" else 2]:  # a page is always held whole
        columns = {"id": column, name: column} if name == "text" else {name: column}
        parquet.write_table(pyarrow.table(columns), file, compression="zstd", store_schema=False, **options)
        size, before, most, lengths = file.stat().st_size, pyarrow.total_allocated_bytes(), 0, set()
        for document in read_parquet(file, "b", None, 0, lambda index, weight: False):
            most = max(most, pyarrow.total_allocated_bytes() - before)
            lengths.add((type(document).__name__, len(document.content)))
        found[f"{name} {column.type} {options}"] = [size, most, sorted(lengths)]
print(json.dumps(found))
"""


@pytest.mark.skipif(not CLIENTS.exists(), reason="pyarrow is not installed; make clients")
def test_a_small_file_of_large_rows_is_not_held_all_at_once(tmp_path: Path) -> None:
    """Values that stand there once, or in few bytes, and come 256 times: 128 MB, 102 MB of token ids."""
    done = subprocess.run([CLIENTS, "-c", BOMBS, tmp_path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    for size, most, lengths in found.values():
        assert size < 2_000_000
        assert most < 50_000_000, found
        assert lengths in ([["Document", 500_000]], [["Document", 50_000]])


@pytest.mark.skipif(not CLIENTS.exists(), reason="pyarrow is not installed; make clients")
def test_parquet_files_are_read_row_by_row(tmp_path: Path) -> None:
    done = subprocess.run([CLIENTS, "-c", PROGRAM, tmp_path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["texts"][:2] == [[0, "a", "one"], [1, "texts.parquet:2", ""]]
    assert f"{tmp_path}/texts.parquet:3: text is None, expected a text or a list of token ids" in found["texts"][2][2]
    assert found["ids"][:2] == [[0, "ids.parquet:1", [1, 2]], [1, "ids.parquet:2", []]]
    assert "ids.parquet:3: tokens is [-1], expected" in found["ids"][2][2]
    assert "both.parquet: has columns ['tokens', 'text'], expected one of text and tokens" in found["both"][0][2]
    assert found["named"] == [[0, "both.parquet:1", "t"]]
    assert found["body"] == [[0, "body.parquet:1", "b"]]
    assert "has columns ['body']" in found["absent"][0][2]
    assert found["many"] == 1000
    assert found["rest"] == [[501, "many.parquet:502", "501"]]
    assert len(found["broken"]) == 1
    assert "expected a parquet file; check it" in found["broken"][0][2]
    assert found["broken, done"] == []
    assert [row[:2] for row in found["latin"]] == [[number, f"latin.parquet:{number + 1}"] for number in range(3)]
    assert "latin.parquet:2: 'utf-8' codec can't decode byte 0xff" in found["latin"][1][2]
    assert found["latin"][2][2] == "three"
    count, said = found["breaking off"]
    assert f"many.parquet: breaks off after {count} documents (Input/output error), expected to be read" in said
    assert count >= 100
    assert "body.parquet: breaks off after 0 documents (" in found["unopened"]
