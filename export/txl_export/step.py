"""The exportable step: one segment of fixed shape, memories as arguments.

The same function as `txl_export.reference`, in the form an engine wants. What does not depend on the input is folded
once (`fold`): 1/sqrt(d_head) into W_q, u and v; W_r·R into one table per layer; q, k and v into one matrix.

    inputs    tokens int32 [B, L] · valid int32 [B] · fill int32 [B] · memory per layer
    outputs   logprobs float32 [B, L, V] · memory per layer

    memory    K/V: key and value, float32 [B, H, M, d_head] each · hidden: float32 [B, M, D]

`fill` memory rows exist before the step and stand in the LAST slots, newest last. `valid` rows of the segment count and
stand first. The new memory is rows [valid, valid + M) of (memory ‖ segment), so that valid = 0 returns it bit for bit.
Query i sees slot k iff 0 <= d < W and k >= M - fill, with d = M + i - k. Scores of unseen slots are selected away
(`where`), not added to, so that nothing standing there can leak; token ids are clipped for the same reason.

Absolute positions (attn_type 2 and 3) are counted back from a stream's last valid row and added to memory and segment;
the memory keeps what was added, so only hidden memory can follow them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from txl_runtime.config import Dialect, ModelConfig
from txl_runtime.errors import UsageError

from txl_export.positions import last_distance, sinusoid
from txl_export.reference import activate
from txl_export.weights import State, layer_name

__all__ = ["MemoryForm", "Step", "StepShape", "fold", "memory_shapes", "tied_rows", "unfold"]

MemoryForm = Literal["kv", "hidden"]

# Far below any score, finite so that no engine guards against rows of infinities, representable in half precision.
UNSEEN = -1e4
# Added to queries or scores, so they take the scale of the queries.
SCALED = ("content_bias", "position_bias", "distance.biases")


class StepShape(NamedTuple):
    """The fixed sizes of one program."""

    batch_size: int
    segment_length: int
    memory_length: int
    memory: MemoryForm

    @property
    def slots(self) -> int:
        """K, the number of key slots a query meets: memory and segment."""
        return self.memory_length + self.segment_length


def distance_rows(config: ModelConfig, dialect: Dialect, shape: StepShape) -> int:
    """How many distances a program tells apart: those of its slots, or those a query can see, up to the clamp."""
    rows, last = shape.slots, last_distance(config, dialect)
    if dialect.window is not None and not config.absolute_positions:
        rows = min(rows, dialect.window)
    return rows if last is None else min(rows, last + 1)


def fold(config: ModelConfig, state: Mapping[str, Tensor]) -> State:
    """The parameters as the graphs use them; everything but the tables of relative positions.

    Matrices are transposed, [in, out], because graphs multiply from the left; `query_key_value` holds the three
    projections side by side with the scale folded into the first.
    """
    scale = config.d_head**-0.5
    folded: State = {}
    for name, tensor in state.items():
        if ".attention.query." in name:
            parts = [tensor * scale, state[name.replace("query", "key")], state[name.replace("query", "value")]]
            joined = torch.cat(parts)
            folded[name.replace("query", "query_key_value")] = joined.T.contiguous() if joined.dim() == 2 else joined
        elif ".attention.key." in name or ".attention.value." in name:
            continue
        elif name.endswith(SCALED):
            folded[name] = tensor * scale
        elif ".attention.output.weight" in name or ".feed_forward.inner.weight" in name or ".outer.weight" in name:
            folded[name] = tensor.T.contiguous()
        else:
            folded[name] = tensor
    return folded


def tied_rows(config: ModelConfig, folded: Mapping[str, Tensor]) -> dict[str, tuple[str, int, int]]:
    """Softmax tables that are rows [first, last) of the embedding's one table: name → (that table, first, last).

    Graphs see them as parameters of their own, because an engine would keep a copy of every slice; in the weight file
    they are ranges of the table's bytes.
    """
    if config.div_val > 1 or len(config.clusters) == 1:
        return {}
    named = ((f"softmax.tables.{c}", rows) for c, rows in enumerate(config.clusters))
    return {name: ("embedding.tables.0", *rows) for name, rows in named if name not in folded}


def unfold(config: ModelConfig, folded: Mapping[str, Tensor]) -> State:
    """The inverse of `fold`, to one rounding of the scale: canonical parameters from those of the graphs."""
    scale = config.d_head**-0.5
    state: State = {}
    for name, tensor in folded.items():
        if ".attention.query_key_value." in name:
            query, key, value = (tensor.T if tensor.dim() == 2 else tensor).chunk(3)
            parts = {"query": query / scale, "key": key, "value": value}
            state |= {name.replace("query_key_value", part): rows.contiguous() for part, rows in parts.items()}
        elif name.endswith(SCALED):
            state[name] = tensor / scale
        elif ".attention.output.weight" in name or ".feed_forward.inner.weight" in name or ".outer.weight" in name:
            state[name] = tensor.T.contiguous()
        else:
            state[name] = tensor
    return state


class _Rows(NamedTuple):
    """Which rows of (memory ‖ segment) count, the same for all layers: they depend on `fill` and `valid` alone.

    Attributes:
        visible: bool [B, 1, L, K], what each query may see.
        filled: bool [B, M], memory rows that exist.
        kept: int32 [B, M], the rows that are the memory after the step.
    """

    visible: Tensor
    filled: Tensor
    kept: Tensor


class Step(nn.Module):
    """One program: `logprobs` of a segment and the memory after it.

    Args:
        config, dialect: the model.
        shape: B, L, M and the form of the memory; M = 0 has no memory arguments at all.
        folded: the parameters from `fold`, shared between steps.
    """

    def __init__(self, config: ModelConfig, dialect: Dialect, shape: StepShape, folded: Mapping[str, Tensor]) -> None:
        super().__init__()
        if config.absolute_positions and shape.memory_length and shape.memory == "kv":
            raise UsageError(
                f"attn_type {config.attn_type} keeps positions in its memory, which keys and values cannot follow; "
                "expected hidden memory; give --memory hidden"
            )
        self.config, self.dialect, self.shape = config, dialect, shape
        self._buffer_names: dict[str, str] = {}
        for name, tensor in folded.items():
            if ".attention.position." not in name and ".attention.distance." not in name:
                self._keep(name, tensor)
        for name, (table, first, last) in tied_rows(config, folded).items():
            self._keep(name, folded[table][first:last])
        rows = distance_rows(config, dialect, shape)
        self._fold_positions(rows, folded)

        query, slot = torch.arange(shape.segment_length)[:, None], torch.arange(shape.slots)[None, :]
        distance = shape.memory_length + query - slot  # [L, K]
        seen = distance >= 0
        if dialect.window is not None:
            seen &= distance < dialect.window
        self._keep("seen", seen)
        self._keep("slot", slot[0].to(torch.int32))
        if dialect.segment_window:
            self._keep("behind", distance.to(torch.int32))
        if not config.absolute_positions:
            self._keep("distance", distance.clamp(0, rows - 1))

    def _keep(self, name: str, tensor: Tensor) -> None:
        """Register a buffer; torch allows no dots in names, so they are written `/` there and back in the graph."""
        attribute = name.replace(".", "/")
        self._buffer_names[name] = attribute
        self.register_buffer(attribute, tensor, persistent=False)

    def _fold_positions(self, rows: int, folded: Mapping[str, Tensor]) -> None:
        """Keep what positions come to for distances 0 … rows-1, one table per layer (attn_type 2: one)."""
        c, sinusoids = self.config, sinusoid(rows, self.config.d_model)
        if c.attn_type == 2:
            self._keep(self._table_name(0), sinusoids)
        for i in range(c.n_layer):
            name = f"{layer_name(i)}.attention"
            if c.attn_type == 0:
                weight, bias = folded[f"{name}.position.weight"], folded.get(f"{name}.position.bias")
                relative = F.linear(sinusoids, weight, bias).reshape(rows, c.n_head, c.d_head)
                self._keep(self._table_name(i), relative.permute(1, 2, 0).contiguous())  # [H, d_head, rows]
            elif c.attn_type == 1:
                relative, biases = folded[f"{name}.distance.keys"][:rows], folded[f"{name}.distance.biases"][:rows]
                self._keep(self._table_name(i), relative.permute(1, 2, 0).contiguous())
                self._keep(self._table_name(i, "bias."), biases.T[:, None].contiguous())  # [H, 1, rows]

    def _table_name(self, i: int, part: str = "") -> str:
        """The table of positions that layer i uses; a learned one of attn_type 3 serves programs of every length."""
        if self.config.attn_type == 3:
            return f"{layer_name(i)}.positions"
        return f"{layer_name(i)}.attention.position.table.{part}{self.shape.segment_length:04d}"

    def __getitem__(self, name: str) -> Tensor:
        tensor = getattr(self, self._buffer_names[name])
        assert isinstance(tensor, Tensor)
        return tensor

    def get(self, name: str) -> Tensor | None:
        """The parameter of that name, or None."""
        return self[name] if name in self._buffer_names else None

    def position_tables(self) -> State:
        """The tables of positions of this program: the parameters that are not shared between programs."""
        return {name: self[name] for name in self._buffer_names if ".table." in name}

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Arguments of the right shapes and dtypes, to trace with."""
        batch, length = self.shape.batch_size, self.shape.segment_length
        counts = torch.zeros(2, batch, dtype=torch.int32)
        tokens = torch.zeros(batch, length, dtype=torch.int32)
        return (tokens, counts[0], counts[1], *(torch.zeros(shape) for shape in memory_shapes(self.config, self.shape)))

    def forward(self, tokens: Tensor, valid: Tensor, fill: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """One step; see the module's table for names, shapes and dtypes."""
        m = self.shape.memory_length
        filled = self["slot"][None, :] >= (m - fill)[:, None]  # [B, K]
        visible = self["seen"][None, None] & filled[:, None, None, :]  # [B, 1, L, K]
        if self.dialect.segment_window:
            window = torch.where(valid > 1, valid, self.shape.slots)
            visible = visible & (self["behind"][None, None] < window[:, None, None, None])
        rows = _Rows(visible, filled[:, :m], valid[:, None] + self["slot"][None, :m])

        hidden = self._embed(tokens)
        after: list[Tensor] = []
        per_layer = len(memory) // self.config.n_layer
        for i in range(self.config.n_layer):
            remembered: Sequence[Tensor] = memory[i * per_layer : (i + 1) * per_layer]
            if self.config.attn_type == 3 or (self.config.attn_type == 2 and i == 0):
                hidden, remembered = self._add_positions(i, hidden, remembered, valid)
            hidden, kept = self._layer(i, hidden, remembered, rows)
            after.extend(kept)
        if self.config.final_norm:
            hidden = self._norm("final_norm", hidden)
        return (self._log_probabilities(hidden), *after)

    def _embed(self, tokens: Tensor) -> Tensor:
        c = self.config
        tokens = tokens.clamp(0, c.vocab_size - 1)
        if c.div_val == 1:
            embedded = self._project("embedding.projections.0", F.embedding(tokens, self["embedding.tables.0"]))
        else:
            parts = []
            for cluster, (first, last) in enumerate(c.clusters):
                rows = F.embedding((tokens - first).clamp(0, last - first - 1), self[f"embedding.tables.{cluster}"])
                rows = self._project(f"embedding.projections.{cluster}", rows)
                inside = ((tokens >= first) & (tokens < last))[..., None]
                parts.append(torch.where(inside, rows, torch.zeros((), dtype=rows.dtype)))
            embedded = torch.stack(parts).sum(dim=0)
        return embedded * c.embedding_scale

    def _add_positions(
        self, i: int, hidden: Tensor, memory: Sequence[Tensor], valid: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Absolute positions on what layer i reads; an idle stream's memory stays as it is, to the bit."""
        m, table = self.shape.memory_length, self[self._table_name(i)]  # [rows, D]
        behind = (m + valid)[:, None] - 1 - self["slot"][None, :]  # [B, K]: rows after this one, padding aside
        positions = F.embedding(behind.clamp(0, table.shape[0] - 1), table)
        hidden = hidden + positions[:, m:]
        if memory:
            memory = [torch.where((valid > 0)[:, None, None], memory[0] + positions[:, :m], memory[0])]
        return hidden, memory

    def _layer(self, i: int, hidden: Tensor, memory: Sequence[Tensor], rows: _Rows) -> tuple[Tensor, list[Tensor]]:
        attention, feed_forward = f"{layer_name(i)}.attention", f"{layer_name(i)}.feed_forward"
        if self.config.pre_lnorm:
            attended, kept = self._attend(i, hidden, memory, rows)
            hidden = hidden + attended
            return hidden + self._feed_forward(i, self._norm(f"{feed_forward}.norm", hidden)), kept
        attended, kept = self._attend(i, hidden, memory, rows)
        hidden = self._norm(f"{attention}.norm", hidden + attended)
        return self._norm(f"{feed_forward}.norm", hidden + self._feed_forward(i, hidden)), kept

    def _attend(self, i: int, hidden: Tensor, memory: Sequence[Tensor], rows: _Rows) -> tuple[Tensor, list[Tensor]]:
        name = f"{layer_name(i)}.attention"
        query, key, value, kept = self._project_heads(i, hidden, memory, rows)  # [B, H, L or K, d_head]

        if self.config.absolute_positions:
            scores = query @ key.transpose(2, 3)  # [B, H, L, K]
        else:
            content = (query + self[f"{name}.content_bias"][:, None]) @ key.transpose(2, 3)
            scores = content + self._by_distance(i, query).gather(3, self["distance"].expand(content.shape))
        scores = torch.where(rows.visible, scores, torch.full((), UNSEEN, dtype=scores.dtype))
        mixed = scores.softmax(dim=-1) @ value
        return self._linear(f"{name}.output", mixed.transpose(1, 2).flatten(start_dim=2)), kept

    def _project_heads(
        self, i: int, hidden: Tensor, memory: Sequence[Tensor], rows: _Rows
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Queries of the segment, keys and values of memory and segment, and the memory after the step."""
        c, name = self.config, f"{layer_name(i)}.attention"
        joined = f"{name}.query_key_value"
        source, kept = hidden, []
        if self.shape.memory_length and self.shape.memory == "hidden":
            # Rows that do not exist are selected away before they are projected: a huge value would overflow there.
            existing = torch.where(rows.filled[..., None], memory[0], torch.zeros((), dtype=hidden.dtype))
            source = torch.cat([existing, hidden], dim=1)  # [B, K, D]
            kept = [self._rows(torch.cat([memory[0], hidden], dim=1), rows.kept)]
        if c.pre_lnorm:
            source = self._norm(f"{name}.norm", source)
        query, key, value = self._heads(self._linear(joined, source), 3)
        if c.pre_lnorm and c.absolute_positions:
            # The released code takes these queries from what is not normalised.
            width = c.n_head * c.d_head
            (query,) = self._heads(hidden @ self[f"{joined}.weight"][:, :width], 1)
        query = query[:, :, query.shape[2] - self.shape.segment_length :]
        if self.shape.memory_length and self.shape.memory == "kv":
            key, value = torch.cat([memory[0], key], dim=2), torch.cat([memory[1], value], dim=2)
            kept = [self._rows(key, rows.kept), self._rows(value, rows.kept)]
        return query, key, value, kept

    def _rows(self, rows: Tensor, keep: Tensor) -> Tensor:
        """Rows `keep` [B, M] of [B, (H,) K, width], as one gather over all rows of all streams and heads."""
        *outer, slots, width = rows.shape
        groups = 1
        for size in outer:
            groups *= size
        start = torch.arange(groups, dtype=torch.int32).reshape(outer)[..., None] * slots
        index = start + keep.reshape(keep.shape[0], *[1] * (len(outer) - 1), keep.shape[1])
        flat = rows.reshape(groups * slots, width).index_select(0, index.flatten())
        return flat.reshape(*outer, keep.shape[1], width)

    def _heads(self, joined: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[B, rows, parts·H·d_head] → parts of [B, H, rows, d_head]."""
        heads = joined.reshape(*joined.shape[:-1], parts, self.config.n_head, self.config.d_head)
        return heads.permute(2, 0, 3, 1, 4).unbind(0)

    def _by_distance(self, i: int, query: Tensor) -> Tensor:
        """What each query scores by distance alone: [B, H, L, rows]."""
        name, table = f"{layer_name(i)}.attention", self[self._table_name(i)]  # [H, d_head, rows]
        if self.config.attn_type == 1:
            return query @ table + self[self._table_name(i, "bias.")]
        return (query + self[f"{name}.position_bias"][:, None]) @ table

    def _feed_forward(self, i: int, hidden: Tensor) -> Tensor:
        name = f"{layer_name(i)}.feed_forward"
        return self._linear(f"{name}.outer", activate(self.config, self._linear(f"{name}.inner", hidden)))

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        c = self.config
        flat = hidden.flatten(end_dim=1)  # [B·L, D], so that a tied table is used untransposed (Gemm)
        head = self._cluster_logits(0, flat)
        if len(c.clusters) > 1:
            into = F.linear(
                self._softmax_input(0, flat), self["softmax.cluster.weight"], self.get("softmax.cluster.bias")
            )
            head = torch.cat([head, into], dim=-1).log_softmax(dim=-1)
            first = c.cutoffs[0]
            parts = [head[:, :first]]
            for cluster in range(1, len(c.clusters)):
                tail = self._cluster_logits(cluster, flat).log_softmax(dim=-1)
                parts.append(head[:, first + cluster - 1, None] + tail)
            head = torch.cat(parts, dim=-1)
        else:
            head = head.log_softmax(dim=-1)
        return head.reshape(self.shape.batch_size, self.shape.segment_length, -1)

    def _softmax_input(self, cluster: int, flat: Tensor) -> Tensor:
        projection = self.get(f"softmax.projections.{cluster}")
        if projection is None:
            projection = self.get(f"embedding.projections.{0 if self.config.div_val == 1 else cluster}")
        return flat if projection is None else flat @ projection

    def _cluster_logits(self, cluster: int, flat: Tensor) -> Tensor:
        table = self.get(f"softmax.tables.{cluster}")
        if table is None:
            table = self[f"embedding.tables.{cluster}"]
        return F.linear(self._softmax_input(cluster, flat), table, self.get(f"softmax.biases.{cluster}"))

    def _project(self, name: str, rows: Tensor) -> Tensor:
        projection = self.get(name)
        return (
            rows if projection is None else F.linear(rows.flatten(end_dim=-2), projection).reshape(*rows.shape[:-1], -1)
        )

    def _linear(self, name: str, x: Tensor) -> Tensor:
        product, bias = x @ self[f"{name}.weight"], self.get(f"{name}.bias")
        return product if bias is None else product + bias

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self[f"{name}.weight"], self[f"{name}.bias"]
        return F.layer_norm(x, (self.config.d_model,), weight, bias, self.config.layer_norm_epsilon)


def memory_shapes(config: ModelConfig, shape: StepShape) -> list[tuple[int, ...]]:
    """Shapes of the memory arguments in order; none when M is 0."""
    if not shape.memory_length:
        return []
    if shape.memory == "hidden":
        return [(shape.batch_size, shape.memory_length, config.d_model)] * config.n_layer
    return [(shape.batch_size, config.n_head, shape.memory_length, config.d_head)] * (2 * config.n_layer)
