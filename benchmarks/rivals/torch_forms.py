"""Make further forms in which a Transformer-XL can be run, besides those that `txl-deploy bench` knows.

torch-bhlk     eager, hidden memory, scores [B, H, L, K]
torch-compile  torch.compile of torch-kv
torch-bf16     torch-kv in bfloat16
onnx-hidden    this project's bundle with hidden memory: every step projects the memory again
onnx-rolled    the bundle's own graphs with the update rule rolled, which return the whole memory

`plain_exports` has onnx-kv, openvino and openvino-bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
import txl_runtime
from plain_exports import Engine, OnnxRuntime, OpenVino, PlainExport, no_openvino
from torch import Tensor
from torch.nn import functional as F
from txl_export.exporting import export
from txl_export.families.transformer_xl.weights import Weights
from txl_runtime.errors import UsageError
from txl_runtime.model import Model
from txl_runtime.types import Array, Ids

from benchmarks.shared.models import weights_of
from txl_deploy.bench.competitor import BundleCompetitor, Competitor, Maker
from txl_deploy.bench.competitors import NAMES as PLAIN
from txl_deploy.bench.competitors import competitors, why_not
from txl_deploy.bench.competitors.cached import KeyValue, by_distance, shift
from txl_deploy.bench.competitors.hidden import TimeFirstHidden
from txl_deploy.bench.competitors.own_module import no_compiler
from txl_deploy.bench.competitors.shared_layers import SharedLayers, Work

__all__ = ["FORMS", "USUAL", "BatchFirstHidden", "CompiledKeyValue", "GraphLayers", "forms"]

OPENVINO = {"openvino": ("f32", "fp32"), "openvino-bf16": ("bf16", "bf16")}
"""The precisions of OpenVINO's forms: OpenVINO's name of the precision, and this project's name."""
FORMS = (*PLAIN, "torch-bhlk", "torch-compile", "torch-bf16", "onnx-hidden", "onnx-rolled", "onnx-kv", *OPENVINO)
USUAL = tuple(name for name in FORMS if name != "openvino-bf16")
"""The forms that are run by default: bfloat16 in OpenVINO, emulated on older processors, takes 39 times as long there.
"""


def forms(names: tuple[str, ...], model: Model, threads: int, folder: Path) -> tuple[dict[str, Maker], dict[str, str]]:
    """Return functions that make the named forms, by name, and the reasons for forms that cannot run here, by name.

    PyTorch is set to use `threads` threads.

    Args:
        names: some of `FORMS`.
        model: the bundle whose weights the forms get.
        threads: of each form.
        folder: the folder for exported files; existing files of onnx-kv and OpenVINO are used again.

    Raises:
        UsageError: a name is not one of `FORMS`.
    """
    if unknown := [name for name in names if name not in FORMS]:
        raise UsageError(f"--against has {unknown[0]!r}, expected some of {', '.join(FORMS)}, or none")
    plain, left_out = competitors(tuple(name for name in names if name in PLAIN), model, threads)
    torch.set_num_threads(threads)
    m, state = model.manifest, weights_of(model)
    size = m.config, m.dialect, m.memory_length, state

    def exported(name: str, opened: Callable[[Path], Engine], precision: str = "fp32") -> Competitor:
        return PlainExport(name, GraphLayers(*size), m.batch_size, opened, folder / "plain", precision)

    makers: dict[str, Maker] = {
        **plain,
        "torch-bhlk": lambda: BatchFirstHidden(SharedLayers(*size), m.batch_size),
        "torch-compile": lambda: CompiledKeyValue(GraphLayers(*size), m.batch_size, m.segment_lengths[0]),
        "torch-bf16": lambda: HalfKeyValue(SharedLayers(*size, torch.bfloat16), m.batch_size),
        "onnx-hidden": lambda: _onnx_hidden(model, state, threads, folder),
        "onnx-rolled": lambda: _onnx_rolled(model, threads),
        "onnx-kv": lambda: exported("onnx-kv", partial(OnnxRuntime, threads=threads)),
    }
    for name, (hint, precision) in OPENVINO.items():
        makers[name] = partial(exported, name, partial(OpenVino, threads=threads, precision=hint), precision)
    left_out |= {name: why for name in names if name not in PLAIN and (why := _why_not(name, model))}
    return {name: makers[name] for name in names if name not in left_out}, left_out


def _why_not(name: str, model: Model) -> str:
    """Return the reason why a form cannot run here with this model; "" if it can."""
    m = model.manifest
    if name == "onnx-hidden":
        if m.dialect.segment_window or m.dialect.window not in (None, m.memory_length):
            return f"a window of {m.dialect.window or 'the segment'} cannot be exported from canonical weights"
        return "the bundle keeps hidden memory itself" if m.transformer_xl.memory == "hidden" else ""
    if name == "onnx-rolled":
        kept = {program.update for program in m.programs}
        return "" if kept >= {"rolled", "ring"} else f"the bundle has {' and '.join(sorted(kept))} programs only"
    here = no_openvino() if name in OPENVINO else (no_compiler() or "") if name == "torch-compile" else ""
    return why_not(model) or here


def _onnx_hidden(model: Model, state: Weights, threads: int, folder: Path) -> Competitor:
    m = model.manifest
    config: dict[str, object] = msgspec.to_builtins(m.config)
    export(
        state,
        folder / "hidden.txl",
        config=config | {"memory_start": m.dialect.memory_start},
        segment_length=m.segment_lengths,
        memory_length=m.memory_length,
        clamp_length=m.dialect.clamp_length or 0,
        same_length=m.dialect.window is not None,
        batch_size=m.batch_size,
        memory="hidden",
        verify=False,
    )
    other = txl_runtime.load(folder / "hidden.txl", threads=threads, verify_files=False)
    return BundleCompetitor("onnx-hidden", other)


def _onnx_rolled(model: Model, threads: int) -> Competitor:
    other = txl_runtime.load(model.bundle.path, threads=threads, verify_files=False, update="rolled")
    return BundleCompetitor("onnx-rolled", other)


class BatchFirstHidden(TimeFirstHidden):
    """Eager PyTorch with hidden memory [B, M, D] and scores [B, H, L, K] by batched matrix products.

    Only the segment's positions have queries, and W_r·R is computed once for each length.
    """

    name = "torch-bhlk"
    description = "eager PyTorch, hidden memory, scores [B, H, L, K], W_r·R folded"
    _of: tuple[int, int] | None = None
    _tables: list[Tensor]
    _mask: Tensor | None

    def __init__(self, parts: SharedLayers, batch_size: int) -> None:
        super().__init__(parts, batch_size)
        self.joined = parts.joined({"key": 1.0, "value": 1.0})

    def reset(self) -> None:
        super().reset()
        self.memory = [rows.transpose(0, 1) for rows in self.memory]

    def segment(self, tokens: Tensor) -> Tensor:
        hidden = self.parts.embed(tokens)
        length, rows = hidden.shape[1], self.memory[0].shape[1]
        if self._of != (length, rows):
            self._tables = self.parts.tables(rows + length)
            self._mask = None if self.parts.sees_all(length, rows) else self.parts.unseen(length, rows)
            self._of = (length, rows)
        first, after = max(0, rows + length - self.parts.memory_length), []
        for i, remembered in enumerate(self.memory):
            context = torch.cat([remembered, hidden], dim=1)
            after.append(context[:, first:].detach())
            if self.parts.config.pre_lnorm:
                context = self.parts.norm(f"{self.parts.attention[i]}.norm", context)
            hidden = self.parts.feed_forward(i, hidden, self._attended(i, context, length))
        self.memory = after
        return self.parts.final(hidden)

    def _attended(self, i: int, context: Tensor, length: int) -> Tensor:
        parts, name = self.parts, self.parts.attention[i]
        query = self._heads(parts.linear(f"{name}.query", context[:, -length:]))
        key, value = map(self._heads, F.linear(context, *self.joined[i]).chunk(2, dim=-1))
        content = (query + parts.state[f"{name}.content_bias"][:, None]) @ key.transpose(2, 3)
        distance = by_distance(query + parts.state[f"{name}.position_bias"][:, None], self._tables[i])
        scores = (content + shift(distance)) * self.scale
        if self._mask is not None:
            scores = scores.masked_fill(self._mask, float("-inf"))
        mixed = scores.softmax(dim=-1) @ value
        return parts.linear(f"{name}.output", mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], *self.parts.heads).transpose(1, 2)


class HalfKeyValue(KeyValue):
    """The form torch-kv in bfloat16."""

    name, precision = "torch-bf16", "bf16"
    description = f"{KeyValue.description}, bfloat16"


def _in_graph() -> bool:
    return torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()


class GraphLayers(SharedLayers):
    """Layers for compilers and exporters, in whose graphs no shape depends on token ids."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of token ids; in a graph, every cluster computes rows for all ids."""
        c = self.config
        if c.div_val == 1 or not _in_graph():
            return super().embed(tokens)
        flat = tokens.flatten()
        embedded = self.zeros(len(flat), c.d_model)
        for cluster, (first, last) in enumerate(c.clusters):
            table, projection = (self.state[f"embedding.{part}.{cluster}"] for part in ("tables", "projections"))
            rows = F.linear(F.embedding((flat - first).clamp(0, last - first - 1), table), projection)
            embedded = torch.where(((flat >= first) & (flat < last))[:, None], rows, embedded)
        return embedded.view(*tokens.shape, -1) * c.embedding_scale

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the nats of the targets; in a graph, every tail runs for all rows."""
        if not _in_graph():
            return super().nll(hidden, targets)
        return -self.log_probabilities(hidden).gather(1, targets.long()[:, None])[:, 0]


class CompiledKeyValue(KeyValue):
    """The form torch-kv by torch.compile, with a static cache: a ring that is written in place.

    A call is one graph, from the token ids to the result. Weights and ring are marked as tensors whose address never
    changes, because CUDA graphs copy all other inputs before each step. The form runs eagerly until the memory is full,
    so that only one graph is compiled for each kind of work and segment length. `mode` is that of torch.compile.
    """

    name = "torch-compile"
    description = "torch.compile (inductor), K/V memory in a static ring, W_r·R folded"

    def __init__(self, parts: GraphLayers, batch_size: int, longest: int, mode: str | None = None) -> None:
        self._longest, self._mode = longest, mode
        self._graphs: dict[Work, Work] = {}
        super().__init__(parts, batch_size)
        size = parts.memory_length + longest
        self._ring, self._head = self._allocate(size), parts.zeros().long()
        self._by_distance = [table.flip(2).contiguous() for table in parts.tables(size)]
        joined = (tensor for pair in self.joined for tensor in pair if tensor is not None)
        folded = (*joined, *self.content, *self.position, *self._by_distance)
        for tensor in (*parts.state.values(), *folded, *self._ring, self._head):
            torch._dynamo.mark_static_address(tensor, guard=True)

    def reset(self) -> None:
        super().reset()
        self._in_ring = False

    @torch.inference_mode()
    def on_arrays(self, work: Work, tokens: Ids) -> Array:
        return np.asarray(self.answer(work, torch.from_numpy(tokens)))

    def answer(self, work: Work, tokens: Tensor) -> Tensor:
        """Return the result of a kind of work for token ids [B, T]; the caller has to be in inference mode."""
        if self.rows < self.parts.memory_length:
            return work(tokens)
        if work == self.nats and len(self.parts.config.clusters) > 1 and tokens.device.type == "cpu":
            # on a CPU it is faster to leave the graph and run each tail only for its own rows
            hidden = self.answer(self.segment, tokens[:, :-1])
            return self.parts.nll(hidden.flatten(0, 1), tokens[:, 1:].flatten()).view(len(tokens), -1)
        if not self._in_ring:
            for slots, rows in zip(self._ring, self.memory(), strict=True):
                slots[:, :, : self.rows] = rows
            self._head.fill_(self.rows)
            self._in_ring = True
        if work not in self._graphs:
            self._graphs[work] = torch.compile(work, dynamic=False, fullgraph=True, mode=self._mode)
        return self._graphs[work](tokens)

    def segment(self, tokens: Tensor) -> Tensor:
        if not self._in_ring:
            return super().segment(tokens)
        length, m = tokens.shape[1], self.parts.memory_length
        window = self.parts.dialect.window_of(length, m)
        size, head, ahead = m + self._longest, self._head, torch.arange(length, device=tokens.device)
        # for each slot, its distance from the first slot that this segment writes
        behind = (torch.arange(size, device=tokens.device) - head) % size
        row = torch.where(behind < length, behind, behind - size)  # the position of a slot's row, 0 for the first token
        distance = ahead[:, None] - row  # of each token from each slot's row, [L, size]
        visible = (distance >= 0) & (row >= -m)
        if window is not None:
            visible &= distance < window
        index, slots = distance.clamp(0, m + length - 1), (head + ahead) % size

        def join(i: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self._ring[2 * i], self._ring[2 * i + 1]
            return keys.index_copy_(2, slots, key), values.index_copy_(2, slots, value)

        def place(scores: Tensor) -> Tensor:
            return scores.gather(3, index.expand(*scores.shape[:3], -1)).masked_fill(~visible, float("-inf"))

        hidden = self.layers(tokens, [table[:, :, : m + length] for table in self._by_distance], join, place)
        head.copy_((head + length) % size)
        return hidden
