"""Several processes: every document once, whoever dies; nobody outlives the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from resealing import copied
from stand_ins import dying_worker
from support import until
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import BackendError

from txl_deploy.corpora import processes
from txl_deploy.corpora.documents import Outcome, Unit
from txl_deploy.corpora.processes import Processes
from txl_deploy.corpora.scoring import Scorer
from txl_deploy.corpora.worker import Settings, identity

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "deaths").mkdir()
    return copied(frozen("0.8/clusters"), tmp_path / "model.txl")


def unit(index: int, name: str = "") -> Unit:
    ids = np.random.default_rng(index).integers(41, size=1 + index * 3)
    return Unit(index, name or f"d{index}", "", 1, ids.astype(np.int32).tobytes(), len(ids))


def pairs(units: list[Unit]) -> Iterator[list[Unit]]:
    return (units[first : first + 2] for first in range(0, len(units), 2))


def scored(bundle: Path, units: list[Unit], many: int = 2) -> dict[int, Outcome]:
    """Outcomes by document, each of them once."""
    found: dict[int, Outcome] = {}
    model = identity(open_bundle(bundle).manifest)
    with Processes(Settings(bundle=str(bundle)), many, model) as opened:
        for batch, outcomes in opened.score(pairs(units)):
            for each, outcome in zip(batch, outcomes, strict=True):
                assert each.index not in found
                found[each.index] = outcome
    return found


def ended(*numbers: int) -> bool:
    """Whether these processes have ended; one that nobody waits for counts as ended."""
    return all(_state(number) in ("", "Z") for number in numbers)


def _state(number: int) -> str:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_processes_find_what_one_finds(
    bundle: Path, plant: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And import nothing from the folder that their user stands in."""
    plant(bundle)
    monkeypatch.chdir(bundle)
    units = [unit(index) for index in range(9)]
    scorer = Scorer(txl_runtime.load(bundle, threads=1))
    expected = [outcome for batch in pairs(units) for outcome in scorer.score(batch)]
    found = scored(bundle, units)
    assert [found[index] for index in range(9)] == expected


@pytest.mark.slow
def test_a_process_that_dies_is_replaced_and_its_documents_are_repeated(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a document that no process survives, it alone is named, and its neighbour has a result."""
    units = [unit(index) for index in range(8)]
    scorer = Scorer(txl_runtime.load(bundle, threads=1))
    expected = [outcome for batch in pairs(units) for outcome in scorer.score(batch)]
    monkeypatch.setattr(processes, "work", dying_worker.die_there)
    for name, deaths in {"d1": 1, "d2": 2, "d5": 99}.items():
        (bundle.parent / "deaths" / name).write_text(str(deaths))
    found = scored(bundle, units)
    assert sorted(found) == list(range(8))
    for index, outcome in found.items():
        if index == 5:
            assert outcome.total is None
            assert "its process ended with SIGKILL, 3 times in all" in str(outcome.why)
        else:
            assert outcome.total == pytest.approx(expected[index].total, abs=1e-4)
    heard = [path.name.partition(".")[0] for path in (bundle.parent / dying_worker.HEARD).iterdir()]
    assert [heard.count(name) for name in ("d0", "d1", "d5", "d6")] == [2, 2, 3, 1]


@pytest.mark.parametrize("other", [0, 1], ids=["model", "weights"])
def test_another_model_than_the_one_that_was_read_is_refused(bundle: Path, other: int) -> None:
    model = list(identity(open_bundle(bundle).manifest))
    model[other] = "ab" * 32
    with (
        Processes(Settings(bundle=str(bundle)), 1, (model[0], model[1])) as opened,
        pytest.raises(BackendError, match=r"model\.txl: was replaced while it was read; start again"),
    ):
        list(opened.score(pairs([unit(1)])))


PARENT = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
if __name__ == "__main__":
    from stand_ins import dying_worker
    from test_processes import unit
    from txl_deploy.corpora import processes
    from txl_deploy.corpora.worker import Settings
    processes.work = dying_worker.die_there
    with processes.Processes(Settings(bundle={bundle!r}), 2, {model!r}) as opened:
        list(opened.score(iter([[unit(3, "forever")], [unit(4, "forever")]])))
"""


@pytest.mark.slow
def test_a_parent_that_dies_takes_its_processes_along(bundle: Path) -> None:
    """In the middle of a batch that never ends."""
    here = Path(__file__)
    path = [str(here.parent), str(here.parents[2]), str(here.parents[2] / "helpers")]
    model = identity(open_bundle(bundle).manifest)
    program = bundle.parent / "parent.py"
    program.write_text(PARENT.format(path=path, bundle=str(bundle), model=model))
    parent = subprocess.Popen([sys.executable, str(program)], stderr=subprocess.PIPE, start_new_session=True)
    heard = bundle.parent / dying_worker.HEARD
    try:
        until(lambda: heard.is_dir() and len(list(heard.iterdir())) == 2)
        workers = [int(each.name.rpartition(".")[2]) for each in heard.iterdir()]
        assert all(_state(worker) for worker in workers)
        parent.kill()
        parent.wait(30)
        until(lambda: ended(*workers))
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
        assert parent.stderr is not None
        parent.stderr.close()
