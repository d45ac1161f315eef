"""The sample for Ray: a local cluster of two actors, one of which is killed in the middle."""

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
from collections.abc import Iterator
from pathlib import Path

import pytest
import txl_runtime
from frozen import frozen

from txl_deploy.corpora.running import Keeping, Machine, score_corpus
from txl_deploy.corpora.sources import Corpus

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".clients" / "bin" / "python"
TOKENS = frozen("0.8/tokens")
DOCUMENTS, EARLIER = 600, 100


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


def killing_one(command: list[str], out: Path, short: Path) -> tuple[int, str, str, list[int]]:
    """Run the sample and kill an actor at the first result: exit code, what was printed and said, and the actor."""
    environment = os.environ | {"RAY_TMPDIR": str(short), "RAY_USAGE_STATS_ENABLED": "0"}
    with (short / "printed").open("w+") as printed, (short / "said").open("w+") as said:
        driver = subprocess.Popen(command, stdout=printed, stderr=said, env=environment, start_new_session=True)
        try:
            while driver.poll() is None and out.read_bytes().count(b"\n") <= EARLIER + 1:
                time.sleep(0.01)
            killed = actors_of(driver.pid)[:1]
            for number in killed:
                os.kill(number, signal.SIGKILL)
            driver.wait(200)
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
        return driver.returncode, (short / "printed").read_text(), (short / "said").read_text(), killed


@pytest.mark.slow
@pytest.mark.skipif(not CLIENTS.exists(), reason="Ray is not installed; make clients")
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_an_actor_is_killed_and_every_document_is_there_once(tmp_path: Path, short: Path) -> None:
    """What an earlier run left is kept as it is, and a line that it tore is made good."""
    draws, corpus, out = random.Random(0), tmp_path / "corpus.jsonl", tmp_path / "out.jsonl"
    tokens = [draws.choices(range(41), k=draws.randrange(400)) for _ in range(DOCUMENTS)]
    tokens[7] = [99]
    lines = [{"id": f"d{index}", "tokens": each} for index, each in enumerate(tokens)]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = txl_runtime.load(TOKENS, threads=1)
    first = {"model_id": model.manifest.model_id, "documents": "corpus.jsonl"}
    earlier = [{"index": 0, "id": f"d{index}", "tokens": 1, "scored": 1, "nll": 7.0} for index in range(EARLIER)]
    earlier[7]["id"] = f"d{DOCUMENTS - 1}"
    before = "".join(json.dumps(line) + "\n" for line in [first, *earlier]) + '{"index": 0, "id": "d2'
    command = [CLIENTS, ROOT / "samples" / "ray" / "score.py", TOKENS, corpus, "-o", out, "--actors", "2"]
    for _ in range(3):
        out.write_text(before)
        code, printed, said, killed = killing_one(list(map(str, command)), out, short)
        if "The current node timed out during startup" not in said:  # Ray gives it 30 seconds
            break
    assert code == 0, said[-3000:]
    assert killed, "the actors had ended before one could be killed"
    header, *rows = map(json.loads, out.read_text().splitlines())
    assert header == first
    assert sorted(row["id"] for row in rows) == sorted(line["id"] for line in lines)
    assert [row["nll"] for row in rows[:EARLIER]] == [7.0] * EARLIER
    found = {row["id"]: row for row in rows[EARLIER:]}
    assert "holds id 99" in found["d7"]["error"]
    assert json.loads(printed[printed.rindex("{\n") :])["documents"] == DOCUMENTS - 1  # Ray prints there too
    here = tmp_path / "here.jsonl"
    score_corpus(Machine(TOKENS, threads=1), Corpus(corpus), Keeping(here, skip_bad=True))
    _, *expected = map(json.loads, here.read_text().splitlines())
    for row in expected:
        if row["id"] in found and row["id"] != "d7":
            assert found[row["id"]]["nll"] == (row["nll"] and pytest.approx(row["nll"], abs=1e-4))


NAMES = """
import sys
sys.path.insert(0, sys.argv[1])
import score
assert score.name_in("/data/docs", "/data/docs/a/x.txt") == "a/x.txt"
assert score.name_in("/data/docs/", "/data/docs/x.txt") == "x.txt"
assert score.name_in("/data/docs/x.txt", "/data/docs/x.txt") == "x.txt"
assert score.name_in("s3://bucket/docs", "bucket/docs/b/x.txt") == "b/x.txt"
"""


@pytest.mark.slow
@pytest.mark.skipif(not CLIENTS.exists(), reason="Ray is not installed; make clients")
def test_texts_are_called_by_their_paths_in_the_folder() -> None:
    done = subprocess.run(
        [CLIENTS, "-c", NAMES, ROOT / "samples" / "ray"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not CLIENTS.exists(), reason="Ray is not installed; make clients")
def test_two_documents_of_one_id_are_refused(tmp_path: Path, short: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": name, "tokens": [1, 2, 3]}) + "\n" for name in ("a", "b", "a")))
    command = [CLIENTS, ROOT / "samples" / "ray" / "score.py", TOKENS, corpus, "-o", tmp_path / "out", "--actors", "1"]
    environment = os.environ | {"RAY_TMPDIR": str(short), "RAY_USAGE_STATS_ENABLED": "0"}
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
        if "The current node timed out during startup" not in done.stderr:
            break
    assert done.returncode == 1
    assert "two documents have the id 'a', expected one of its own for each" in done.stderr
