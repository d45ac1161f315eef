"""The sample for Ray: a local cluster of two actors, one of which is killed in the middle, and its driver later."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import txl_runtime
from frozen import frozen

from txl_deploy.corpora.running import score_corpus
from txl_deploy.corpora.sources import Corpus

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".clients" / "bin" / "python"
KV = frozen("0.8/clusters")
"""A Transformer-XL of 41 tokens."""
DOCUMENTS = int(os.environ.get("TXL_DOCUMENTS", "600"))
"""The number of documents that are scored; the figures are of more, and shorter ones."""
TIMEOUT = 200 + DOCUMENTS // 100
"""Seconds that a run of the sample may take."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLIENTS.exists(), reason="Ray is not installed; make clients"),
]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name: Ray's sockets lie below it."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def actors_of(driver: int) -> list[int]:
    """Processes of actors below a driver."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal():
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:
            continue

    def below(number: int) -> bool:
        return number == driver or (number in parents and below(parents[number]))

    return [number for number, name in names.items() if name.startswith(b"ray::MapWorker(") and below(number)]


def command(*arguments: object) -> list[str]:
    return [str(each) for each in (CLIENTS, ROOT / "samples" / "ray" / "score.py", KV, *arguments)]


def run(
    line: list[str], short: Path, meanwhile: Callable[[subprocess.Popen[str]], None] = lambda driver: None
) -> tuple[int, str, str]:
    """Run the sample, and something beside it: exit code, what was printed and what was said."""
    environment = os.environ | {"RAY_TMPDIR": str(short), "RAY_USAGE_STATS_ENABLED": "0"}
    for _ in range(3):
        with (short / "printed").open("w") as printed, (short / "said").open("w") as said:
            driver = subprocess.Popen(
                line, stdout=printed, stderr=said, env=environment, start_new_session=True, text=True
            )
            try:
                meanwhile(driver)
                driver.wait(TIMEOUT)
            finally:
                if driver.poll() is None:
                    os.killpg(driver.pid, signal.SIGKILL)
                    driver.wait()
        told = (short / "said").read_text()
        if "The current node timed out during startup" not in told:  # Ray gives it 30 seconds
            break
    return driver.returncode, (short / "printed").read_text(), told


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The results in a file, behind its first line."""
    return [json.loads(line) for line in out.read_text().splitlines()[1:]]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_an_actor_and_the_driver_are_killed_and_every_document_is_there_once(tmp_path: Path, short: Path) -> None:
    """With the results of one process without Ray."""
    draws, corpus, out, here = random.Random(0), *(tmp_path / name for name in ("corpus.jsonl", "out", "here"))
    tokens = [draws.choices(range(41), k=draws.randrange(max(240_000 // DOCUMENTS, 12))) for _ in range(DOCUMENTS)]
    tokens[7] = [99]
    lines = [{"id": f"d{index}", "tokens": each} for index, each in enumerate(tokens)]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    killed: list[int] = []

    def kill(driver: subprocess.Popen[str]) -> None:
        def come_to(share: float) -> None:
            while driver.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") > share * DOCUMENTS):
                time.sleep(0.01)

        come_to(0.1)
        for number in actors_of(driver.pid)[:1]:
            os.kill(number, signal.SIGKILL)
            killed.append(number)
        come_to(0.5)
        driver.kill()

    line = command(corpus, "-o", out, "--actors", "2")
    code, _, said = run(line, short, kill)
    assert code == -signal.SIGKILL, said[-3000:]
    assert killed, "the actors had ended before one could be killed"
    before = out.read_bytes()
    assert 0.5 * DOCUMENTS < before.count(b"\n") < DOCUMENTS
    out.write_bytes(before + b'{"index": 0, "id": "d2')
    code, printed, said = run(line, short)
    assert code == 0, said[-3000:]
    assert out.read_bytes().startswith(before), "what was there is kept as it is"
    found = rows_of(out)
    assert sorted(row["id"] for row in found) == sorted(line["id"] for line in lines)
    by_name = {row["id"]: row for row in found}
    assert "holds id 99" in by_name["d7"]["error"]
    total = score_corpus(txl_runtime.load(KV, threads=1), Corpus(corpus), here, skip_bad=True)
    expected = rows_of(here)
    assert len(expected) == DOCUMENTS
    for row in expected:
        assert by_name[row["id"]]["nll"] == (row["nll"] and pytest.approx(row["nll"], rel=0, abs=1e-5))
    told = json.loads(printed[printed.rindex("{\n") :])  # Ray prints there too
    assert told.pop("perplexity") == pytest.approx(total.pop("perplexity"), rel=1e-5), "whose exponent is the mean"
    assert told == {name: each and pytest.approx(each, rel=1e-6, abs=0) for name, each in total.items()}


PARQUET = """
import sys
import pandas
rows = {"id": ["a", "b", "c"], "tokens": [[1, 2, 3], [], [4, 40, 0, 7, 9]]}
pandas.DataFrame(rows).to_parquet("corpus.parquet")
pandas.read_parquet("corpus.parquet").to_json("corpus.jsonl", orient="records", lines=True)
"""


def test_parquet_is_read_by_ray_or_made_json_lines(tmp_path: Path, short: Path) -> None:
    subprocess.run([CLIENTS, "-c", PARQUET], cwd=tmp_path, check=True, timeout=120)
    out, here = tmp_path / "out", tmp_path / "here"
    code, _, said = run(command(tmp_path / "corpus.parquet", "-o", out, "--actors", "1"), short)
    assert code == 0, said[-3000:]
    score_corpus(txl_runtime.load(KV, threads=1), Corpus(tmp_path / "corpus.jsonl"), here)
    found, expected = ({row["id"]: row["nll"] for row in rows_of(path)} for path in (out, here))
    assert list(expected) == ["c", "a", "b"]
    assert found.keys() == expected.keys()
    for name, nll in expected.items():
        assert found[name] == (nll and pytest.approx(nll, rel=0, abs=1e-5))


NAMES = """
import sys
sys.path.insert(0, sys.argv[1])
import score
assert score.name_in("/data/docs", "/data/docs/a/x.txt") == "a/x.txt"
assert score.name_in("/data/docs/", "/data/docs/x.txt") == "x.txt"
assert score.name_in("/data/docs/x.txt", "/data/docs/x.txt") == "x.txt"
assert score.name_in("s3://bucket/docs", "bucket/docs/b/x.txt") == "b/x.txt"
"""


def test_texts_are_called_by_their_paths_in_the_folder() -> None:
    done = subprocess.run(
        [CLIENTS, "-c", NAMES, ROOT / "samples" / "ray"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_two_documents_of_one_id_are_refused(tmp_path: Path, short: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": name, "tokens": [1, 2, 3]}) + "\n" for name in ("a", "b", "a")))
    code, _, said = run(command(corpus, "-o", tmp_path / "out", "--actors", "1"), short)
    assert code == 1
    assert "two documents have the id 'a', expected one of its own for each" in said
