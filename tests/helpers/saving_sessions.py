"""A server in small, to be killed: it serves, and saves its sessions again and again.

    python -m saving_sessions BUNDLE FOLDER SEED ROUNDS

Every session is fed tokens that follow from its name and from how many it was fed, in whole segments: so whoever
restores a session knows what its memory has to be. What is said is a line before a checkpoint, with how much each of
its sessions was fed, and the same line after it.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
from txl_runtime import load
from txl_runtime.sessions import Request, Sessions
from txl_runtime.sessions.checkpoint import Checkpoint
from txl_runtime.sessions.state import SessionState

NAMES = tuple(f"session {number}" for number in range(12))


def tokens_of(name: str, count: int, vocabulary: int) -> np.ndarray:
    """The first tokens that a session is fed, int32 [count]."""
    return np.random.default_rng(list(name.encode())).integers(0, vocabulary, count).astype(np.int32)


def main() -> None:
    """Serve until killed."""
    bundle, folder, seed, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    model = load(bundle, "cpu", 1)
    draws, longest = np.random.default_rng(seed), model.segment_lengths[0]
    sessions = Sessions(model, 3)
    with Checkpoint(folder, model.manifest.model_id) as checkpoint:
        lost = checkpoint.restore(sessions)
        assert not lost, lost
        print("restored", flush=True)
        saving: threading.Thread | None = None
        for _ in range(rounds):
            name = NAMES[int(draws.integers(len(NAMES)))]
            if name not in sessions or not sessions.info(name).running:
                seen = sessions.info(name).seen if name in sessions else 0
                end = seen + longest * int(draws.integers(1, 4))
                sessions.submit(Request(tokens_of(name, end, model.vocab_size)[seen:]), name)
            for _ in range(int(draws.integers(1, 4))):
                sessions.round()
            if saving is None or not saving.is_alive():  # states are copied between rounds, and written beside them
                versions = sessions.versions()
                states = {name: sessions.take(name) for name in versions}
                saving = threading.Thread(target=save, args=(checkpoint, versions, states))
                saving.start()
        if saving is not None:
            saving.join()
    sessions.shut()


def save(checkpoint: Checkpoint, versions: dict[str, int], states: dict[str, SessionState]) -> None:
    """Make a checkpoint, and say so before and after it."""
    said = json.dumps({name: state.seen for name, state in states.items()})
    print("saving", said, flush=True)
    with checkpoint.begin(versions) as saving:
        for name in saving.wanted:
            saving.add(name, states[name])
        saving.finish()
    print("saved", said, flush=True)


if __name__ == "__main__":
    main()
