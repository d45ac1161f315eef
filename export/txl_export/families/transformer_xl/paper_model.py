"""Computes Transformer-XL as the paper defines it: the reference, with hidden memories and unfolded parameters.

Every graph, engine and precision is compared with the reference, so it is written to be read next to the paper (Dai et
al. 2019, section 3 and appendix B), not to be fast. Memory entry i is the input of layer i, [B, rows, D], oldest row
first. Memory starts empty and grows, or starts as M rows of zeros, as the dialect says. The paper compares three other
attention types (learned relative, absolute sinusoidal, absolute learned); for these the reference follows the paper's
released code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig

from txl_export.families.transformer_xl.positions import last_distance, sinusoid
from txl_export.families.transformer_xl.weights import layer_name, parameter_count

Memory = list[Tensor]

ROWS = 16
"""Number of rows of a softmax per call, few enough that intermediate results stay in the cores' caches."""


class PaperModel:
    """A Transformer-XL computed with PyTorch, one segment at a time.

    Args:
        dialect: initial memory, window and clamp.
        weights: the canonical parameters, from `weights.check_weights`.
        dtype: dtype of all arithmetic, except that the table of positions is always built in float32.

    Attributes:
        watch: None, or a function that is called with NAME and the input [..., in] of every product with a matrix
            "NAME.weight".
    """

    def __init__(
        self,
        config: ModelConfig,
        dialect: Dialect,
        memory_length: int,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.dialect, self.memory_length, self.dtype = config, dialect, memory_length, dtype
        self._weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.watch: Callable[[str, Tensor], None] | None = None

    @property
    def parameters(self) -> int:
        """The number of values in the weights."""
        return parameter_count(self._weights)

    def in_precision(self, dtype: torch.dtype) -> PaperModel:
        """Return this model computed in `dtype`; the same object if it already has that dtype."""
        if dtype == self.dtype:
            return self
        return PaperModel(self.config, self.dialect, self.memory_length, self._weights, dtype)

    def initial_memory(self, batch_size: int = 1) -> Memory:
        """Return the memory of new streams: zeros [B, M, D] per layer, or [B, 0, D] if memory starts empty."""
        rows = self.memory_length if self.dialect.memory_start == "zeros" else 0
        return [
            torch.zeros(batch_size, rows, self.config.d_model, dtype=self.dtype) for _ in range(self.config.n_layer)
        ]

    @torch.no_grad()
    def __call__(self, tokens: Tensor, memory: Iterable[Tensor]) -> tuple[Tensor, Memory]:
        """Run a segment: tokens int [B, T] and the memory before it → log-probabilities [B, T, V], memory after it."""
        hidden, after = self.hidden(tokens, memory)
        whole = torch.empty(*tokens.shape, self.config.vocab_size, dtype=self.dtype)
        rows, into = hidden.flatten(end_dim=-2), whole.flatten(end_dim=-2)
        for some, there in zip(torch.split(rows, ROWS), torch.split(into, ROWS), strict=True):
            self._softmax(some, there)
        return whole, after

    @torch.no_grad()
    def hidden(self, tokens: Tensor, memory: Iterable[Tensor]) -> tuple[Tensor, Memory]:
        """Run a segment without its softmax; return the layers' output [B, T, D] and the memory after it.

        For example, tokens [2, 5] and a memory of [2, 16, 32] per layer give [2, 5, 32].
        """
        hidden = self._embed(tokens)
        after: Memory = []
        for i, before in enumerate(memory):
            hidden, remembered = self._add_positions(i, hidden, before)
            rows = torch.cat([remembered, hidden], dim=1)
            after.append(rows[:, max(0, rows.shape[1] - self.memory_length) :])
            hidden = self._layer(i, hidden, remembered)
        if self.config.final_norm:
            hidden = self._norm("final_norm", hidden)
        return hidden, after

    def keys_and_values(self, memory: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's keys and values of a hidden memory: [B, rows, D] → [B, rows, H, d_head] twice.

        For example, [2, 16, 32] → [2, 16, 4, 8].
        """
        for i, remembered in enumerate(memory):
            name = f"{layer_name(i)}.attention"
            source = self._norm(f"{name}.norm", remembered) if self.config.pre_lnorm else remembered
            yield self._heads(f"{name}.key", source), self._heads(f"{name}.value", source)

    def _add_positions(self, i: int, hidden: Tensor, remembered: Tensor) -> tuple[Tensor, Tensor]:
        """Add absolute positions, counted back from the segment's last row, to layer i's input and memory.

        With attn_type 2 only layer 0 gets positions. Memory rows already contain the positions of earlier segments,
        which are not removed: the released code adds in place.
        """
        if not self.config.absolute_positions or (self.config.attn_type == 2 and i > 0):
            return hidden, remembered
        rows, first = remembered.shape[1] + hidden.shape[1], remembered.shape[1]
        learned = self._weights.get(f"{layer_name(i)}.positions")
        table = sinusoid(rows, self.config.d_model) if learned is None else learned
        last = last_distance(self.config, self.dialect)
        distances = torch.arange(rows).clamp(max=rows if last is None else last)
        positions = table[distances].to(self.dtype).flip(0)  # positions [rows, D], oldest row first
        return hidden + positions[first:], remembered + positions[:first]

    def _embed(self, tokens: Tensor) -> Tensor:
        c = self.config
        if c.div_val == 1:
            embedded = self._project("embedding.projections.0", self._weights["embedding.tables.0"][tokens.long()])
        else:
            embedded = torch.zeros(*tokens.shape, c.d_model, dtype=self.dtype)
            for cluster, (first, last) in enumerate(c.clusters):
                inside = (tokens >= first) & (tokens < last)
                rows = self._weights[f"embedding.tables.{cluster}"][(tokens[inside] - first).long()]
                embedded[inside] = self._project(f"embedding.projections.{cluster}", rows)
        return embedded * c.embedding_scale

    def _layer(self, i: int, hidden: Tensor, remembered: Tensor) -> Tensor:
        attention, feed_forward = f"{layer_name(i)}.attention", f"{layer_name(i)}.feed_forward"
        if self.config.pre_lnorm:
            context = self._norm(f"{attention}.norm", torch.cat([remembered, hidden], dim=1))
            # For absolute positions with pre-norm, the released code computes queries from the input before the norm.
            queries = hidden if self.config.absolute_positions else context[:, remembered.shape[1] :]
            hidden = hidden + self._attend(i, queries, context)
            return hidden + self._feed_forward(i, self._norm(f"{feed_forward}.norm", hidden))
        context = torch.cat([remembered, hidden], dim=1)
        hidden = self._norm(f"{attention}.norm", hidden + self._attend(i, hidden, context))
        return self._norm(f"{feed_forward}.norm", hidden + self._feed_forward(i, hidden))

    def _attend(self, i: int, queries_from: Tensor, context: Tensor) -> Tensor:
        """Compute attention of the segment's rows [B, T, D] to the rows of memory and segment [B, rows, D]."""
        name = f"{layer_name(i)}.attention"
        length, rows = queries_from.shape[1], context.shape[1]
        query = self._heads(f"{name}.query", queries_from)
        key, value = self._heads(f"{name}.key", context), self._heads(f"{name}.value", context)

        # distances [T, rows] from query to key
        distance = torch.arange(rows - length, rows)[:, None] - torch.arange(rows)[None, :]
        visible = distance >= 0
        window = self.dialect.window_of(length, self.memory_length)
        if window is not None:
            visible &= distance < window

        if self.config.absolute_positions:
            scores = torch.einsum("bthd,bkhd->bhtk", query, key)
        else:
            content = torch.einsum("bthd,bkhd->bhtk", query + self._weights[f"{name}.content_bias"], key)
            by_distance = self._by_distance(i, query, rows)
            farthest = by_distance.shape[-1] - 1
            scores = content + by_distance.gather(-1, distance.clamp(0, farthest).expand_as(content))
        scores = scores / self.config.d_head**0.5
        probabilities = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("bhtk,bkhd->bthd", probabilities, value)
        return self._linear(f"{name}.output", mixed.flatten(start_dim=2))

    def _by_distance(self, i: int, query: Tensor, rows: int) -> Tensor:
        """Return each query's score for each distance up to the clamp: [B, T, H, d_head] → [B, H, T, distances]."""
        name, last = f"{layer_name(i)}.attention", last_distance(self.config, self.dialect)
        count = rows if last is None else min(rows, last + 1)
        if self.config.attn_type == 1:
            keys, biases = (self._weights[f"{name}.distance.{part}"][:count] for part in ("keys", "biases"))
            return torch.einsum("bthd,rhd->bhtr", query, keys) + biases.T[:, None]
        table = sinusoid(count, self.config.d_model).to(self.dtype)
        relative = self._heads(f"{name}.position", table)  # R of the paper, [distances, H, d_head]
        return torch.einsum("bthd,rhd->bhtr", query + self._weights[f"{name}.position_bias"], relative)

    def _feed_forward(self, i: int, hidden: Tensor) -> Tensor:
        name = f"{layer_name(i)}.feed_forward"
        return self._linear(f"{name}.outer", activate(self.config, self._linear(f"{name}.inner", hidden)))

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yield log-probabilities of the vocabulary for rows [n, D], 16 rows at a time.

        For example, 24 rows give [16, V] and [8, V]. All results share one memory, so each result overwrites the result
        before: a large vocabulary takes longer to allocate than to compute.
        """
        into = torch.empty(min(ROWS, len(hidden)), self.config.vocab_size, dtype=self.dtype)
        for some in torch.split(hidden, ROWS):
            self._softmax(some, into[: len(some)])
            yield into[: len(some)]

    def _softmax(self, hidden: Tensor, into: Tensor) -> None:
        """Write log-probabilities of rows [n, D] to `into` [n, V]: head[cluster] + tail (Grave et al. 2017)."""
        clusters = self.config.clusters
        if len(clusters) == 1:
            torch.log_softmax(self._cluster_logits(0, hidden), dim=-1, out=into)
            return
        into_clusters = self._linear("softmax.cluster", self._softmax_input(0, hidden))
        head = torch.cat([self._cluster_logits(0, hidden), into_clusters], dim=-1).log_softmax(dim=-1)
        first = self.config.cutoffs[0]
        into[:, :first] = head[:, :first]
        for cluster in range(1, len(clusters)):
            low, high = clusters[cluster]
            tail = self._cluster_logits(cluster, hidden).log_softmax(dim=-1)
            torch.add(tail, head[:, first + cluster - 1, None], out=into[:, low:high])

    def _softmax_input(self, cluster: int, hidden: Tensor) -> Tensor:
        tied = f"embedding.projections.{0 if self.config.div_val == 1 else cluster}"
        projection = self._weights.get(f"softmax.projections.{cluster}", self._weights.get(tied))
        return hidden if projection is None else hidden @ projection

    def _cluster_logits(self, cluster: int, hidden: Tensor) -> Tensor:
        table = self._weights.get(f"softmax.tables.{cluster}")
        if table is None and self.config.div_val == 1:
            first, last = self.config.clusters[cluster]
            table = self._weights["embedding.tables.0"][first:last]
        elif table is None:
            table = self._weights[f"embedding.tables.{cluster}"]
        return F.linear(self._softmax_input(cluster, hidden), table, self._weights.get(f"softmax.biases.{cluster}"))

    def _project(self, name: str, rows: Tensor) -> Tensor:
        projection = self._weights.get(name)
        return rows if projection is None else rows @ projection.T

    def _linear(self, name: str, x: Tensor) -> Tensor:
        if self.watch is not None:
            self.watch(name, x)
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self._linear(name, x).reshape(*x.shape[:-1], self.config.n_head, self.config.d_head)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, (self.config.d_model,), weight, bias, self.config.layer_norm_epsilon)


def activate(config: ModelConfig, x: Tensor) -> Tensor:
    """Apply the feed-forward layer's activation. For example, "relu" makes [0, 2] of [-1, 2]."""
    if config.activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if config.activation == "gelu_tanh" else "none")
