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
write("body.parquet", body=["b"])
write("many.parquet", text=[str(number) for number in range(1000)])
(folder / "broken.parquet").write_bytes((folder / "many.parquet").read_bytes()[:-9])
print(json.dumps({
    "texts": read("texts.parquet"), "ids": read("ids.parquet"), "body": read("body.parquet", named="body"),
    "absent": read("body.parquet"), "broken": read("broken.parquet"),
    "rest": read("many.parquet", done=lambda index, weight: index != 501),
}))
"""


@pytest.mark.skipif(not CLIENTS.exists(), reason="pyarrow is not installed; make clients")
@pytest.mark.slow
def test_parquet_files_are_read_row_by_row(tmp_path: Path) -> None:
    done = subprocess.run([CLIENTS, "-c", PROGRAM, tmp_path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["texts"][:2] == [[0, "a", "one"], [1, "texts.parquet:2", ""]]
    assert f"{tmp_path}/texts.parquet:3: text is None, expected a text or a list of token ids" in found["texts"][2][2]
    assert found["ids"][:2] == [[0, "ids.parquet:1", [1, 2]], [1, "ids.parquet:2", []]]
    assert "ids.parquet:3: tokens is [-1], expected" in found["ids"][2][2]
    assert found["body"] == [[0, "body.parquet:1", "b"]]
    assert "has columns ['body']" in found["absent"][0][2]
    assert found["rest"] == [[501, "many.parquet:502", "501"]]
    assert len(found["broken"]) == 1
    assert "expected a parquet file; check it" in found["broken"][0][2]
