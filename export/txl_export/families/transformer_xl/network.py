"""Defines the common base of all graphs: parameters, embedding, layers and softmax.

The graphs differ in their memory: `step` (rolled) and `ring` compute the keys and values that queries meet, and the
memory after the step.

In half precision (fp16, bf16) weights, products and memory have 16 bits, with explicit casts. The statistics of layer
norms (inside LayerNormalization), both softmaxes, and the computation of the tables of positions stay in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig

from txl_export.families.transformer_xl.folding import tied_rows
from txl_export.families.transformer_xl.paper_model import activate
from txl_export.families.transformer_xl.positions import last_distance, sinusoid
from txl_export.families.transformer_xl.weights import Weights, layer_name
from txl_export.graphs.tracing import Traceable

MemoryForm = Literal["kv", "hidden"]

# Score of a key that a query must not see: far below other scores, within fp16's range, and finite, so that engines
# need no code for infinities.
UNSEEN = -1e4
EVERY = 2**20
"""A window larger than any number of keys, so that it hides no key."""


def count_distances(config: ModelConfig, dialect: Dialect, slots: int) -> int:
    """Return the number of distances with positions of their own: the slots or the window, limited by the clamp."""
    rows, last = slots, last_distance(config, dialect)
    if dialect.window is not None and not config.absolute_positions:
        rows = min(rows, dialect.window)
    return rows if last is None else min(rows, last + 1)


class Network(Traceable):
    """A network with a model's parameters as buffers, and the parts of a step that do not depend on its memory.

    Args:
        folded: the parameters from `fold`, shared between all networks of a model, in the dtype to compute in.
        distances: number of distances in the tables of positions; 0 for a network without layers.

    Attributes:
        dtype: the dtype of weights, products and memory.
    """

    def __init__(self, config: ModelConfig, dialect: Dialect, folded: Mapping[str, Tensor], distances: int) -> None:
        super().__init__()
        self.config, self.dialect, self.distances = config, dialect, distances
        self.dtype = folded["embedding.tables.0"].dtype
        for name, tensor in folded.items():
            if ".attention.position." not in name and ".attention.distance." not in name:
                self._keep(name, tensor)
        for name, (table, first, last) in tied_rows(config, folded).items():
            self._keep(name, folded[table][first:last])
        if distances:
            self._fold_positions(distances, folded)

    def _keep(self, name: str, tensor: Tensor) -> None:
        """Register a buffer under `name` with "/" in place of ".", which torch forbids; the graph has "." again."""
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        self.register_buffer(name.replace(".", "/"), tensor, persistent=False)

    def _fold_positions(self, rows: int, folded: Mapping[str, Tensor]) -> None:
        """Register the tables of positions for distances 0 … rows-1.

        Each layer has a table; with attn_type 2 all layers share one.
        """
        c, sinusoids = self.config, sinusoid(rows, self.config.d_model)
        if c.attn_type == 2:
            self._keep(self._table_name(0), sinusoids)
        for i in range(c.n_layer):
            name = f"{layer_name(i)}.attention"
            if c.attn_type == 0:
                weight, bias = folded[f"{name}.position.weight"].float(), folded.get(f"{name}.position.bias")
                bias = None if bias is None else bias.float()
                relative = F.linear(sinusoids, weight, bias).reshape(rows, c.n_head, c.d_head)
                self._keep(self._table_name(i), relative.permute(1, 2, 0).contiguous())  # table [H, d_head, rows]
            elif c.attn_type == 1:
                relative, biases = folded[f"{name}.distance.keys"][:rows], folded[f"{name}.distance.biases"][:rows]
                # Clone: with one head or one row, the permuted tensor would share the parameter's memory.
                self._keep(self._table_name(i), relative.permute(1, 2, 0).clone(memory_format=torch.contiguous_format))
                self._keep(self._table_name(i, "bias."), biases.T[:, None].clone(memory_format=torch.contiguous_format))

    def _table_name(self, i: int, part: str = "") -> str:
        """Return the name of layer i's table of positions; a learned table (attn_type 3) serves all programs."""
        if self.config.attn_type == 3:
            return f"{layer_name(i)}.positions"
        return f"{layer_name(i)}.attention.position.table.{part}{self.distances:05d}"

    def __getitem__(self, name: str) -> Tensor:
        return self.get_buffer(name.replace(".", "/"))

    def get(self, name: str) -> Tensor | None:
        """Return the parameter called `name`, or None. For example, `get("embedding.tables.0")` is [256, 32]."""
        return getattr(self, name.replace(".", "/"), None)

    def position_tables(self) -> Weights:
        """Return the computed tables of positions; networks with equal `distances` have the same tables."""
        names = (attribute.replace("/", ".") for attribute, _ in self.named_buffers())
        return {name: self[name] for name in names if ".table." in name}

    def window_by_count(self, valid: Tensor, memory_length: int) -> Tensor | None:
        """Return the number of keys that each query may see if `valid` decides it: int32 [B] → int32 [B]; else None.

        For example, with `segment_window`, valid [5, 1] gives [5, 2**20]: a single token sees all keys.
        """
        dialect, window = self.dialect, torch.full((), EVERY, dtype=torch.int32)
        if not dialect.segment_window and dialect.single_steps is None:
            return None
        if dialect.segment_window:
            window = torch.where(valid > 1, valid, window)
        if dialect.single_steps is not None:
            step = torch.full((), memory_length + 1, dtype=torch.int32)
            window = torch.where(valid > dialect.single_steps, window, step)
        return window

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids, which are clipped to 0 … V-1: int [B, L] → [B, L, D]. For example, [2, 5] → [2, 5, 32]."""
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

    def around(self, i: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Run layer i after its attention: residuals, norms and the feed-forward part, [..., D] → [..., D].

        For example, [2, 5, 32] → [2, 5, 32].
        """
        return self.around_entering(i, hidden, attended)[0]

    def around_entering(self, i: int, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Run layer i after its attention; return its result and the input of its feed-forward part, [..., D] each.

        For example, [2, 5, 32] gives [2, 5, 32] twice.
        """
        attention, feed_forward = f"{layer_name(i)}.attention", f"{layer_name(i)}.feed_forward"
        if self.config.pre_lnorm:
            hidden = hidden + attended
            entering = self.norm(f"{feed_forward}.norm", hidden)
            return hidden + self._feed_forward(i, entering), entering
        entering = self.norm(f"{attention}.norm", hidden + attended)
        return self.norm(f"{feed_forward}.norm", entering + self._feed_forward(i, entering)), entering

    def heads(self, joined: Tensor, parts: int, rows: tuple[int, int] | None = None) -> tuple[Tensor, ...]:
        """Split [B, rows, parts·H·d_head] into `parts` tensors [B, H, rows, d_head], with one transpose for all parts.

        With `rows` = (B, rows), `joined` is [B·rows, parts·H·d_head]. For example, [2, 5, 96] becomes three tensors
        [2, 4, 5, 8].
        """
        c, width = self.config, (parts * self.config.n_head, self.config.d_head)
        heads = torch.unflatten(joined, -1, width) if rows is None else joined.reshape(*rows, *width)
        return torch.split(heads.transpose(1, 2), c.n_head, dim=1) if parts > 1 else (heads.transpose(1, 2),)

    def mix(
        self,
        i: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: Tensor | None,
        visible: Tensor,
        flat: bool = False,
    ) -> Tensor:
        """Compute the attention of layer i.

        Args:
            query: [B, H, L, d_head], scaled. key, value: [B, H, K, d_head].
            index: int64 [B, H, L, K], the row of the table of distances per query and key; None if positions are
                absolute.
            visible: bool [B, 1, L, K]. The score of an invisible key is replaced; to add a large negative number would
                let NaN through.
            flat: return two axes, because engines fuse a product with its bias only if it has two axes.

        Returns:
            The attention's output before the residual is added: [B·L, D] if `flat`, else [B, L, D].
        """
        name = f"{layer_name(i)}.attention"
        if index is None:
            scores = query @ key.transpose(2, 3)  # scores [B, H, L, K]
        else:
            content = (query + self[f"{name}.content_bias"][:, None]) @ key.transpose(2, 3)
            scores = content + self._by_distance(i, query).gather(3, index)
        scores = torch.where(visible, scores, torch.full((), UNSEEN, dtype=scores.dtype))
        # mixed [B, H, L, d_head] holds the weighted values
        mixed = scores.float().softmax(dim=-1).to(self.dtype) @ value
        rows, width = mixed.transpose(1, 2), self.config.n_head * self.config.d_head
        return self.linear(f"{name}.output", rows.reshape(-1, width) if flat else rows.flatten(start_dim=2))

    def _by_distance(self, i: int, query: Tensor) -> Tensor:
        """Return the part of each query's score that depends on the distance: [B, H, L, d_head] → [B, H, L, rows]."""
        name, table = f"{layer_name(i)}.attention", self[self._table_name(i)]  # table [H, d_head, rows]
        if self.config.attn_type == 1:
            return query @ table + self[self._table_name(i, "bias.")]
        return (query + self[f"{name}.position_bias"][:, None]) @ table

    def _feed_forward(self, i: int, hidden: Tensor) -> Tensor:
        name = f"{layer_name(i)}.feed_forward"
        return self.linear(f"{name}.outer", activate(self.config, self.linear(f"{name}.inner", hidden)))

    def head_logprobs(self, flat: Tensor) -> Tensor:
        """Return log-probabilities of cluster 0's words, then a log-probability for each further cluster.

        [n, D] → float32 [n, words of cluster 0 + clusters - 1].
        """
        head = self._cluster_logits(0, flat)
        if len(self.config.clusters) > 1:
            into = F.linear(
                self._softmax_input(0, flat), self["softmax.cluster.weight"], self.get("softmax.cluster.bias")
            )
            head = torch.cat([head, into], dim=-1)
        return head.float().log_softmax(dim=-1)

    def tail_logprobs(self, cluster: int, flat: Tensor) -> Tensor:
        """Return log-probabilities of words within their cluster: [n, D] → float32 [n, words of the cluster].

        A cluster of 200 words: [3, 32] → [3, 200].
        """
        return self._cluster_logits(cluster, flat).float().log_softmax(dim=-1)

    def logprobs(self, flat: Tensor) -> Tensor:
        """Return log-probabilities of the whole vocabulary, by token id: [n, D] → float32 [n, V].

        For example, [3, 32] → [3, 256].
        """
        head, first = self.head_logprobs(flat), self.config.clusters[0][1]
        if len(self.config.clusters) == 1:
            return head
        tails = (
            head[:, first + cluster - 1, None] + self.tail_logprobs(cluster, flat)
            for cluster in range(1, len(self.config.clusters))
        )
        return torch.cat([head[:, :first], *tails], dim=-1)

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
        if projection is None:
            return rows
        return F.linear(rows.flatten(end_dim=-2), projection).reshape(*rows.shape[:-1], -1)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return x @ W + b, with weight and bias called `name`; the bias may be absent.

        For example, x [2, 5, 32] and W [32, 96] give [2, 5, 96].
        """
        product, bias = x @ self[f"{name}.weight"], self.get(f"{name}.bias")
        return product if bias is None else product + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply the layer norm called `name`, over the last axis [D]. For example, [2, 5, 32] → [2, 5, 32]."""
        weight, bias = self[f"{name}.weight"], self[f"{name}.bias"]
        return F.layer_norm(x, (self.config.d_model,), weight, bias, self.config.layer_norm_epsilon)
