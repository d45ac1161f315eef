"""Fits the gate of a datastore, a network that computes W for each position, on a text that the store has not read.

The text's positions are cut into three parts: the network is trained on the first part, the second part selects its
best round and its bound, and the third part, which training never saw, gives the figures.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from txl_export.exporting import export
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StepSpec
from txl_runtime.errors import UsageError
from txl_runtime.model import Model
from txl_runtime.streaming.datastore import Entropies, Shares
from txl_runtime.streaming.inputs import require_tokens
from txl_runtime.types import Floats, Ids

from txl_deploy.console import Display
from txl_deploy.corpora.documents import Unit
from txl_deploy.corpora.encoding import Encoder
from txl_deploy.corpora.scoring import SEGMENTS_PER_CALL
from txl_deploy.corpora.sources import Corpus
from txl_deploy.retrieval import Mixture
from txl_deploy.retrieval.building import documents
from txl_deploy.retrieval.gate import BATCH, BUNDLE, FARTHEST, About, gate_inputs, write_about
from txl_deploy.retrieval.store import Store, open_store, softmax

LEAST, MOST = 1000, 1 << 17
"""Minimum and maximum number of a text's positions; distances of the maximum to 32 neighbours take 50 MB."""
PARTS = (0.6, 0.8)
"""Ends of the text's first and second part, as shares of its positions."""
TEMPERATURES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SHARES = tuple(step / 20 for step in range(1, 20))
"""Values that are tried for T, and for a W that is the same at all positions: 0.05 … 0.95."""
BOUNDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
KEPT = 0.98
"""Share of the gate's gain that has to remain: if no bound is given, the largest bound with this share is taken."""
LEAST_LIKELY = 1e-20
"""Minimum probability of a token in a loss, because neither the model nor a neighbour may expect the token."""
WIDTH, ROUNDS, ROWS, RATE = 64, 30, 512, 2e-3
"""The network's hidden width, number of rounds over the text, positions per training step, and Adam's learning rate."""
LARGEST = 0.99
"""Largest W, so that the model always keeps a share."""
Doubles = NDArray[np.float64]


class Network(nn.Module):
    """The gate: feature [B, F], entropy [B, 1], squared distances [B, K] → W before the search, and W, [B, 1] each."""

    mean: Tensor
    scale: Tensor

    def __init__(self, inputs: dict[str, Floats]) -> None:
        super().__init__()
        rows = self._row(**{name: torch.from_numpy(part) for name, part in inputs.items()})
        self.register_buffer("mean", rows.mean(dim=0))
        self.register_buffer("scale", 1 / rows.std(dim=0).clamp(min=1e-3))
        self.known = rows.shape[1] - inputs["distances"].shape[1]
        self.before, self.after = (
            nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
            for width in (self.known, rows.shape[1])
        )

    def _row(self, feature: Tensor, entropy: Tensor, distances: Tensor) -> Tensor:
        near = torch.log(1.0 + distances.clamp(0.0, FARTHEST))
        return torch.cat([feature, entropy, near], dim=1)

    def forward(self, feature: Tensor, entropy: Tensor, distances: Tensor) -> tuple[Tensor, Tensor]:
        """Return W as it is estimated before the search, and W after the search, [n, 1] each.

        For example, feature [2, 512], entropy [2, 1] and squared distances [2, 8] give [2, 1] twice.
        """
        row = (self._row(feature, entropy, distances) - self.mean) * self.scale
        before, after = self.before(row[:, : self.known]), self.after(row)
        return LARGEST * torch.sigmoid(before), LARGEST * torch.sigmoid(after)


class _Recorder:
    """A datastore that records each search. All its shares are 0, so the stream scores as without a datastore."""

    def __init__(self, store: Store) -> None:
        self.store, self.parts = store, list[tuple[Floats, Doubles, Ids, Doubles]]()

    def shares(self, features: Floats, entropies: Entropies) -> tuple[Ids, Shares]:
        """Record features, entropies and neighbours; return shares of 0 in the form of `Datastore`."""
        features = self.store.own(features)
        self.parts.append((features.copy(), entropies(), *self.store.nearest(features)))
        return np.zeros((len(features), 1), np.int32), np.zeros((len(features), 1))


class Positions:
    """Consecutive positions of a text.

    Attributes:
        inputs: the gate's inputs by name, float32 [n, ...].
        far: squared distances, float64 [n, K].
        hits: True for neighbours whose next token is the text's next token, bool [n, K].
        nll: the model's own negative log-likelihoods, float64 [n], in nats.
    """

    def __init__(self, inputs: dict[str, Floats], far: Doubles, hits: NDArray[np.bool_], nll: Doubles) -> None:
        self.inputs, self.far, self.hits, self.nll = inputs, far, hits, nll

    def part(self, first: int, end: int) -> Positions:
        """Return the positions first … end - 1."""
        inputs = {name: part[first:end] for name, part in self.inputs.items()}
        return Positions(inputs, self.far[first:end], self.hits[first:end], self.nll[first:end])

    def found(self, temperature: float) -> Doubles:
        """Return the probabilities that the neighbours give to the text's next tokens, float64 [n]."""
        probability: Doubles = (softmax(self.far, temperature) * self.hits).sum(axis=1)
        return probability

    def loss(self, weight: float | Doubles, found: Doubles) -> float:
        """Return the mixture's mean negative log-likelihood in bits, for one W or for a W per position."""
        return float(-np.log2(np.maximum(weight * found + (1 - weight) * np.exp(-self.nll), LEAST_LIKELY)).mean())


def fit(
    model: Model,
    folder: Path,
    heldout: Path,
    neighbours: int | None = None,
    temperature: float | None = None,
    bound: float | None = None,
) -> dict[str, Any]:
    """Fit the gate of a datastore, export it to the datastore's folder, and return its gain.

    Raises:
        UsageError: a number is out of range; or the text is too short, or cannot be read.
        CheckError: the exported gate does not compute what the network computes.
    """
    if bound is not None and not 0 <= bound < 1:
        raise UsageError(f"--bound is {bound}, expected at least 0 and less than 1; check it")
    require_tokens(model.manifest, "datastore fit")
    store = open_store(model, Mixture(folder, neighbours, temperature))
    assert store is not None, "the W of none given is not 0"
    with Display() as display:
        positions = _positions(model, store, heldout, display)
        ends = [0, *(int(len(positions.nll) * share) for share in PARTS), len(positions.nll)]
        learn, choose, judge = (positions.part(*pair) for pair in pairwise(ends))
        known = positions.part(0, ends[2])
        heats = TEMPERATURES if temperature is None else (temperature,)
        _, heat, share = min((known.loss(w, known.found(t)), t, w) for t in heats for w in SHARES)
        network = _learnt(learn, choose, heat, display)
        figures = {least: _figures(network, choose, heat, least) for least in BOUNDS}
        if bound is None:
            most = choose.loss(0.0, choose.found(heat)) - figures[0.0][0]
            bound = max(least for least in BOUNDS if figures[least][0] - figures[0.0][0] <= (1 - KEPT) * max(most, 0.0))
        some = {name: part[:4096] for name, part in judge.inputs.items()}
        spec = StepSpec(
            network,
            [InputSpec(name, ("B", part.shape[1])) for name, part in positions.inputs.items()],
            [],
            [OutputSpec("before", ("B", 1)), OutputSpec("weight", ("B", 1))],
            samples=some,
        )
        exported = export(spec, folder / BUNDLE, force=True, batch_size=[BATCH], listener=display)
        about = About(
            model_id=model.manifest.model_id,
            feature=store.feature,
            gate_id=exported.manifest.model_id,
            neighbours=positions.inputs["distances"].shape[1],
            temperature=heat,
            bound=bound,
        )
        write_about(folder, about)
        alone, fixed = (judge.loss(weight, judge.found(heat)) for weight in (0.0, share))
        gated, saved = _figures(network, judge, heat, bound)
        result = {
            "positions": len(positions.nll),
            "judged_on": len(judge.nll),
            "neighbours": about.neighbours,
            "temperature": heat,
            "weight": share,
            "bound": bound,
            "bits_without": alone,
            "bits_with_one_weight": fixed,
            "bits_with_the_gate": gated,
            "searches_saved": saved,
            "by_bound": {f"{least:g}": _figures(network, judge, heat, least) for least in BOUNDS},
        }
        if gated >= min(alone, fixed):
            display.warn("the gate is no better than one W, or than no store: give more text of the kind to come")
    return result


def _positions(model: Model, store: Store, heldout: Path, display: Display) -> Positions:
    """Search at the positions of a text or of a folder's texts, at most `MOST`; return them with their neighbours.

    The rows of a text itself are hidden while it is searched.
    """
    stream, chunk = model.stream(1), model.segment_lengths[0] * SEGMENTS_PER_CALL
    recorder, nll, targets, count, held = _Recorder(store), list[Floats](), list[Ids](), 0, 0
    units = list[Unit]()
    for unit in documents([Corpus(heldout, None, False)], Encoder(model.manifest, model.vocabulary)):
        units.append(unit)
        held += len(unit.ids) - 1
        if held >= MOST:
            break
    display.stage("search", min(held, MOST))
    for unit in units:
        recorder.store = store.excluding(unit.own)
        stream.reset()
        for first in range(0, len(unit.ids) - 1, chunk):
            if count >= MOST:
                break
            some = unit.ids[first : first + chunk + 1]
            nll.append(stream.score(some[None], datastore=recorder)[0])
            targets.append(some[1:])
            count += len(some) - 1
            display.advance(len(some) - 1)
    if count < LEAST:
        raise UsageError(f"{heldout}: holds {count:,} positions, expected at least {LEAST:,} to fit a gate to")
    if count >= MOST:
        display.warn(f"the first {count:,} positions are taken")
    losses = np.concatenate(nll).astype(np.float64)
    if np.isnan(losses).any():
        raise UsageError(f"{heldout}: its loss is NaN at position {np.isnan(losses).argmax()}, expected numbers")
    features, entropy, followed, far = (np.concatenate(parts) for parts in zip(*recorder.parts, strict=True))
    hits = followed == np.concatenate(targets)[:, None]
    return Positions(gate_inputs(features, entropy, far), far, hits, losses)


def _learnt(learn: Positions, choose: Positions, heat: float, display: Display) -> Network:
    """Train the network on `learn`; return it as it was after the round with the least loss on `choose`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network(learn.inputs)
        optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
        tensors = [*map(torch.from_numpy, learn.inputs.values())]
        neighbours, alone = (torch.from_numpy(each).float() for each in (learn.found(heat), np.exp(-learn.nll)))
        best, best_state = np.inf, network.state_dict()
        display.stage("learn", ROUNDS)
        for _ in range(ROUNDS):
            for rows in torch.split(torch.randperm(len(neighbours)), ROWS):
                loss = torch.zeros(())
                for weight in network(*(part[rows] for part in tensors)):
                    share = weight[:, 0]
                    loss = loss - torch.log(share * neighbours[rows] + (1 - share) * alone[rows] + LEAST_LIKELY).mean()
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
            display.advance()
            judged = sum(choose.loss(weight, choose.found(heat)) for weight in _weights(network, choose))
            if judged < best:
                best, best_state = judged, {name: part.clone() for name, part in network.state_dict().items()}
        network.load_state_dict(best_state)
    return network.eval()


def _weights(network: Network, positions: Positions) -> list[Doubles]:
    with torch.no_grad():
        weights = network(*map(torch.from_numpy, positions.inputs.values()))
    return [weight[:, 0].numpy().astype(np.float64) for weight in weights]


def _figures(network: Network, positions: Positions, heat: float, bound: float) -> tuple[float, float]:
    """Return the bits per token with a bound, and the share of searches that the bound saves."""
    before, weight = _weights(network, positions)
    asked = before >= bound
    return positions.loss(np.where(asked, weight, 0.0), positions.found(heat)), float(1 - asked.mean())
