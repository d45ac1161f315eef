"""Parameters, embedding, feed-forward layer and softmax that the PyTorch competitors share.

`benchmarks/rivals` builds further competitors from the same layers, also on a GPU and in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.transformer_xl.paper_model import activate
from txl_export.families.transformer_xl.weights import layer_name
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from txl_runtime.types import Array, Floats, Ids

from txl_deploy.bench.competitor import TokenCompetitor

Work = Callable[[Tensor], Tensor]
"""A computation on the token ids of a segment, int32 [B, T], which returns a tensor."""


class SharedLayers:
    """Parameters in one dtype, and the layers that all PyTorch competitors compute in the same way.

    Args:
        config, dialect: the model's configuration and dialect; only attn_type 0.
        memory_length: number of memory rows, M.
        state: parameters by the names of `txl_export.families.transformer_xl.weights`.
        dtype: dtype of parameters and activations; log-probabilities are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        dialect: Dialect,
        memory_length: int,
        state: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.dialect, self.memory_length, self.dtype = config, dialect, memory_length, dtype
        self.heads = (config.n_head, config.d_head)
        self.attention = [f"{layer_name(i)}.attention" for i in range(config.n_layer)]
        self.state = {name: tensor.to(dtype) for name, tensor in state.items()}
        device = next(iter(state.values())).device
        self.frequencies = 1 / (10000 ** (torch.arange(0.0, config.d_model, 2.0, device=device) / config.d_model))

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the parameters' dtype and on their device. For example, `zeros(4, 16, 32)`."""
        return torch.zeros(shape, dtype=self.dtype, device=self.frequencies.device)

    def positions(self, rows: int) -> Tensor:
        """Return sinusoids of distances rows-1 … 0, clamped: [rows, D]; sines first.

        For example, `positions(21)` is [21, 32].
        """
        distances = torch.arange(rows - 1, -1, -1.0, device=self.frequencies.device)
        if self.dialect.clamp_length is not None:
            distances.clamp_(max=self.dialect.clamp_length)
        angles = distances[:, None] * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.dtype)

    def tables(self, rows: int) -> list[Tensor]:
        """Return the product W_r·R of distances rows-1 … 0 for each layer, [H, d_head, rows].

        For example, `tables(21)` has [2, 16, 21] for each layer.
        """
        positions = self.positions(rows)
        projected = (self.linear(f"{name}.position", positions) for name in self.attention)
        return [x.view(rows, *self.heads).permute(1, 2, 0).contiguous() for x in projected]

    def sees_all(self, length: int, remembered: int) -> bool:
        """Return True if every query may see every key.

        Only sizes decide this, because reading a tensor would make the host wait for the device.
        """
        window = self.dialect.window_of(length, self.memory_length)
        return length == 1 and (window is None or window > remembered)

    def unseen(self, length: int, remembered: int) -> Tensor:
        """Return a mask that is True for each key that a query may not see: bool [L, remembered + L].

        For example, `unseen(5, 16)` is [5, 21].
        """
        ones = torch.ones(length, remembered + length, dtype=torch.bool, device=self.frequencies.device)
        unseen = ones.triu(remembered + 1)
        if (window := self.dialect.window_of(length, self.memory_length)) is not None:
            unseen |= ones.tril(remembered - window)
        return unseen

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the scaled embeddings of tokens, [...] → [..., D], e.g. [4, 5] → [4, 5, 32]."""
        c = self.config
        if c.div_val == 1:
            rows = F.embedding(tokens, self.state["embedding.tables.0"])
            projection = self.state.get("embedding.projections.0")
            return (rows if projection is None else F.linear(rows, projection)) * c.embedding_scale
        flat = tokens.flatten()
        embedded = self.zeros(len(flat), c.d_model)
        for cluster, (first, last) in enumerate(c.clusters):
            table, projection = (self.state[f"embedding.{part}.{cluster}"] for part in ("tables", "projections"))
            inside = (flat >= first) & (flat < last)
            if len(index := inside.nonzero().flatten()):
                embedded.index_copy_(0, index, F.linear(F.embedding(flat[index] - first, table), projection))
        return embedded.view(*tokens.shape, -1) * c.embedding_scale

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply the projection of this name, with its bias if it has one: [..., in] → [..., out].

        For example, [4, 5, 32] → [4, 5, 96].
        """
        return F.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def joined(self, factors: Mapping[str, float]) -> list[tuple[Tensor, Tensor | None]]:
        """Join each layer's projections, times their factors: q, k and v become one weight [3·H·d_head, D] and bias."""

        def join(name: str, kind: str) -> Tensor:
            return torch.cat([self.state[f"{name}.{part}.{kind}"] * factor for part, factor in factors.items()])

        bias = self.config.attention_bias
        return [(join(name, "weight"), join(name, "bias") if bias else None) for name in self.attention]

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply the layer norm of this name, over [..., D]. For example, [4, 5, 32]."""
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return F.layer_norm(x, (self.config.d_model,), weight, bias, self.config.layer_norm_epsilon)

    def feed_forward(self, i: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Compute the part of layer i after attention: residual, norms and the feed-forward layer, over [..., D].

        For example, [4, 5, 32].
        """
        name = f"{layer_name(i)}.feed_forward"
        if self.config.pre_lnorm:
            hidden = hidden + attended
            inner = activate(self.config, self.linear(f"{name}.inner", self.norm(f"{name}.norm", hidden)))
            return hidden + self.linear(f"{name}.outer", inner)
        hidden = self.norm(f"{self.attention[i]}.norm", hidden + attended)
        inner = activate(self.config, self.linear(f"{name}.inner", hidden))
        return self.norm(f"{name}.norm", hidden + self.linear(f"{name}.outer", inner))

    def final(self, hidden: Tensor) -> Tensor:
        """Apply the last norm, if the model has one, over [..., D]. For example, [4, 5, 32]."""
        return self.norm("final_norm", hidden) if self.config.final_norm else hidden

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Compute log-probabilities of the whole vocabulary: [N, D] → float32 [N, V].

        For example, [20, 32] → [20, 256].
        """
        head, clusters = self._head(hidden), self.config.clusters
        if len(clusters) == 1:
            return head
        first = self.config.cutoffs[0]
        tails = [
            head[:, first + c - 1, None] + self._logits(c, hidden).log_softmax(dim=-1) for c in range(1, len(clusters))
        ]
        return torch.cat([head[:, :first], *tails], dim=-1)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Compute negative log-likelihoods in nats: hidden rows [N, D] and target ids [N] → float32 [N].

        For example, [20, 32] and [20] → [20]. The tail of a cluster runs only for rows whose target is in this cluster.
        """
        clusters = self.config.clusters
        if len(clusters) == 1:
            return -self.log_probabilities(hidden).gather(1, targets.long()[:, None])[:, 0]
        head, first = self._head(hidden), self.config.cutoffs[0]
        result = head.new_empty(len(targets))
        for cluster, (low, high) in enumerate(clusters):
            index = ((targets >= low) & (targets < high)).nonzero().flatten()
            if not len(index):
                continue
            rows, inside = head[index], (targets[index] - low).long()[:, None]
            if cluster == 0:
                logprobs = rows.gather(1, inside)[:, 0]
            else:
                tail = self._logits(cluster, hidden[index]).log_softmax(dim=-1)
                logprobs = rows[:, first + cluster - 1] + tail.gather(1, inside)[:, 0]
            result.index_copy_(0, index, -logprobs)
        return result

    def read_bytes(self, *unread: str) -> int:
        """Return the bytes of all parameters that a step reads, except names that contain a string of `unread`."""
        tied = not any(name.startswith("softmax.tables.") for name in self.state)
        skipped = unread if tied else (*unread, "embedding.tables.")
        read = (t for name, t in self.state.items() if not any(part in name for part in skipped))
        return sum(tensor.numel() * tensor.element_size() for tensor in read)

    def _head(self, hidden: Tensor) -> Tensor:
        logits = self._logits(0, hidden)
        if len(self.config.clusters) > 1:
            clusters = self.linear("softmax.cluster", self._softmax_input(0, hidden)).float()
            logits = torch.cat([logits, clusters], dim=-1)
        return logits.log_softmax(dim=-1)

    def _logits(self, cluster: int, hidden: Tensor) -> Tensor:
        table = self.state.get(f"softmax.tables.{cluster}")
        if table is None and self.config.div_val == 1:
            first, last = self.config.clusters[cluster]
            table = self.state["embedding.tables.0"][first:last]
        elif table is None:
            table = self.state[f"embedding.tables.{cluster}"]
        bias = self.state.get(f"softmax.biases.{cluster}")
        return F.linear(self._softmax_input(cluster, hidden), table, bias).float()

    def _softmax_input(self, cluster: int, hidden: Tensor) -> Tensor:
        tied = f"embedding.projections.{0 if self.config.div_val == 1 else cluster}"
        projection = self.state.get(f"softmax.projections.{cluster}", self.state.get(tied))
        return hidden if projection is None else hidden @ projection


class Eager(TokenCompetitor):
    """The base of the PyTorch competitors; a subclass keeps the memory in its own form."""

    def __init__(self, parts: SharedLayers, batch_size: int) -> None:
        self.parts, self.batch_size = parts, batch_size
        self.reset()

    def segment(self, tokens: Tensor) -> Tensor:
        """Run one segment and update the memory: token ids [B, T] → hidden states [B, T, D].

        For example, [4, 5] → [4, 5, 32].
        """
        raise NotImplementedError

    def distribution(self, tokens: Tensor) -> Tensor:
        """Compute log-probabilities of the next token after each token: token ids [B, T] → [B, T, V].

        For example, [4, 5] → [4, 5, 256].
        """
        return self.parts.log_probabilities(self.segment(tokens).flatten(0, 1)).view(*tokens.shape, -1)

    def greedy(self, tokens: Tensor) -> Tensor:
        """Compute the most likely token after a segment: token ids [B, T] → int32 [B].

        For example, [4, 5] → [17, 4, 9, 2].
        """
        return self.parts.log_probabilities(self.segment(tokens)[:, -1]).argmax(dim=-1).int()

    def nats(self, tokens: Tensor) -> Tensor:
        """Compute the negative log-likelihoods of tokens[:, 1:] in nats: token ids [B, T] → [B, T-1]."""
        hidden = self.segment(tokens[:, :-1]).flatten(0, 1)
        return self.parts.nll(hidden, tokens[:, 1:].flatten()).view(len(tokens), -1)

    def logprobs(self, tokens: Ids) -> Floats:
        return self.on_arrays(self.distribution, tokens)

    def next_token(self, tokens: Ids) -> Ids:
        return self.on_arrays(self.greedy, tokens)

    def score(self, tokens: Ids) -> Floats:
        return self.on_arrays(self.nats, tokens)

    @torch.inference_mode()
    def on_arrays(self, work: Work, tokens: Ids) -> Array:
        """Run `distribution`, `greedy` or `nats` on token ids [B, T], and return the result as an array.

        For example, `on_arrays(model.greedy, tokens)` turns [4, 5] into [17, 4, 9, 2].
        """
        return np.asarray(work(torch.from_numpy(tokens)))
