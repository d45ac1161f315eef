"""A process that scores, and that dies where it is told to.

The bundle's folder has a file `deaths` beside it: lines "ID COUNT". A process that is given a document of that name
dies of it, so often in all.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from txl_deploy.corpora.documents import Unit
from txl_deploy.corpora.scoring import Scorer
from txl_deploy.corpora.worker import Settings, work

FOREVER = "forever"
"""The name of a document that is never finished."""
HEARD = "heard"
"""The name of the folder in which every process that gets a document leaves a file of that document's name."""


def die_there(connection: Connection, settings: bytes) -> None:
    """As `worker.work`."""
    place = Path(msgspec.msgpack.decode(settings, type=Settings).bundle).parent
    score = Scorer.score

    def fatal(self: Scorer, units: list[Unit], *told: Any) -> Any:
        for unit in units:
            (place / HEARD).mkdir(exist_ok=True)
            (place / HEARD / f"{unit.id}.{os.getpid()}").touch()
            if unit.id == FOREVER:
                time.sleep(600)
            file = place / "deaths" / unit.id
            if file.exists() and int(file.read_text()) > 0:
                file.write_text(str(int(file.read_text()) - 1))
                os.kill(os.getpid(), signal.SIGKILL)
        return score(self, units, *told)

    Scorer.score = fatal  # type: ignore[assignment, method-assign]
    work(connection, settings)
