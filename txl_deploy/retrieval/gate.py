"""The gate of a datastore: a small network that computes W for each position, and whether a search is worth its time.

The gate is an ordinary bundle, `gate.txl` in the datastore's folder; `gate.json` says for which model and numbers it
was fitted. Its step has two outputs. `before` is W from only the feature and the entropy: if it is below a bound, no
search is made. `weight` is W from the feature, the entropy and the distances.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import txl_runtime
from msgspec import Meta, Struct
from numpy.typing import NDArray
from txl_runtime.bundle.writing import write_named
from txl_runtime.errors import UsageError, brief, one_line
from txl_runtime.files import open_plain
from txl_runtime.model import Model
from txl_runtime.types import Array, Floats

from txl_deploy.retrieval import MOST
from txl_deploy.retrieval.folder import Feature, Header, Sha

BUNDLE, ABOUT = "gate.txl", "gate.json"
BATCH = 64
"""Number of positions that a gate computes at a time."""
FARTHEST = 1e30
"""Squared distance that stands for a missing neighbour."""
AGAIN = "fit it again with `txl-deploy datastore fit`"


class About(Struct, frozen=True, kw_only=True):
    """The content of `gate.json`.

    Attributes:
        model_id, feature: id of the language model, and kind of its features that the gate reads.
        gate_id: the `model_id` of the gate's own bundle.
        neighbours, temperature: K and T of the fit.
        bound: the least W for which a search is made.
    """

    format: Literal["txl-deploy.gate/1"] = "txl-deploy.gate/1"
    model_id: str
    feature: Feature
    gate_id: Sha
    neighbours: Annotated[int, Meta(ge=1, le=MOST)]
    temperature: Annotated[float, Meta(gt=0)]
    bound: Annotated[float, Meta(ge=0, lt=1)]


class Gate:
    """An opened gate. Threads may share it."""

    def __init__(self, model: Model, about: About) -> None:
        self.about, self._model, self._own = about, model, threading.local()

    def worthwhile(self, features: Floats, entropy: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return True for each position that is worth a search, bool [n].

        For example, [True, False] for features float32 [2, F] and entropies [3.1, 0.02] in nats.
        """
        far = np.zeros((len(features), self.about.neighbours))
        mask: NDArray[np.bool_] = self._run("before", features, entropy, far) >= self.about.bound
        return mask

    def weights(self, features: Floats, entropy: NDArray[np.float64], far: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return W of each position, float64 [n], e.g. [0.3, 0.0] for two positions.

        Args:
            features: float32 [n, F].
            entropy: entropies in nats [n].
            far: squared distances of the neighbours [n, at most K].

        Raises:
            UsageError: the gate returned a number that is not from 0 to 1.
        """
        return self._run("weight", features, entropy, far)

    def _run(
        self, output: str, features: Floats, entropy: NDArray[np.float64], far: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        stream, weights = getattr(self._own, "stream", None), np.zeros(len(features))
        if stream is None:
            stream = self._own.stream = self._model.stream()
        for first in range(0, len(features), BATCH):
            count = min(BATCH, len(features) - first)
            some = slice(first, first + count)
            inputs = gate_inputs(features[some], entropy[some], far[some])
            padded = {
                name: np.zeros((BATCH, self.about.neighbours if name == "distances" else part.shape[1]), np.float32)
                for name, part in inputs.items()
            }
            padded["distances"] += FARTHEST
            for name, part in inputs.items():
                padded[name][:count, : part.shape[1]] = part
            ran = stream.run(padded, (np.arange(BATCH) < count).astype(np.int32))
            weights[first : first + count] = ran[output][:count, 0]
        if not ((weights >= 0) & (weights <= 1)).all():
            raise UsageError(f"the gate of the datastore returned a W that is not from 0 to 1; {AGAIN}")
        return weights


def gate_inputs(features: Floats, entropy: Array, far: Array) -> dict[str, Floats]:
    """Return a gate's inputs, float32 [n, ...] each, by name.

    For example, {"feature": [2, 512], "entropy": [2, 1]}.
    """
    return {
        "feature": features.astype(np.float32),
        "entropy": entropy[:, None].astype(np.float32),
        "distances": np.minimum(far, FARTHEST).astype(np.float32),
    }


def open_gate(folder: Path, header: Header) -> Gate:
    """Open the gate of a datastore, and check that it was fitted for the datastore's model and features.

    Raises:
        UsageError: there is no gate, or it was fitted for a different model or different features.
        BundleError: the gate's bundle is damaged.
    """
    place = folder / ABOUT
    try:
        with open_plain(place) as (file, _):
            about = msgspec.json.decode(file.read(1 << 16), type=About)
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror or error}, expected a gate; {AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: {brief(one_line(error))}, expected what a fit wrote; {AGAIN}") from None
    if (about.model_id, about.feature) != (header.model_id, header.feature):
        raise UsageError(
            f"{place}: is of {about.feature} features of model {brief(about.model_id[:12])}, expected {header.feature} "
            f"features of {header.model_id[:12]}; {AGAIN}"
        )
    model = txl_runtime.load(folder / BUNDLE, "cpu", threads=1)
    manifest = model.manifest
    shapes = {entry.name: entry.shape for entry in manifest.inputs}
    shapes |= {entry.name: entry.shape for entry in manifest.outputs}
    expected = {"feature": ("B", header.width), "entropy": ("B", 1), "distances": ("B", about.neighbours)}
    expected |= {"before": ("B", 1), "weight": ("B", 1)}
    fits = {name: shapes.get(name) for name in expected} == expected and manifest.batch_size == BATCH
    if manifest.model_id != about.gate_id or not fits:
        raise UsageError(
            f"{folder / BUNDLE}: is {manifest.model_id[:12]}, expected the gate {about.gate_id[:12]} for "
            f"features of {header.width} and {about.neighbours} neighbours; {AGAIN}"
        )
    return Gate(model, about)


def write_about(folder: Path, about: About) -> None:
    """Write `gate.json`; raise TxlError if the folder has no room or may not be written."""
    write_named(folder / ABOUT, msgspec.json.format(msgspec.json.encode(about)))
