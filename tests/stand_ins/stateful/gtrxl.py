"""GTrXL as DI-engine and RLlib have it: Transformer-XL's attention, gates in place of residual sums, zeros attended."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, distances, join_heads, sinusoids, split_heads


def relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor, bias: tuple[Tensor, Tensor]) -> Tensor:
    """Attention with relative positions: q [B, H, T, d], k and v [B, H, K, d], table [H, K, d] by distance."""
    behind = distances(q.shape[2], k.shape[2], q.device)
    by_content = (q + bias[0][None, :, None]) @ k.transpose(-1, -2)
    by_distance = (q + bias[1][None, :, None]) @ table.transpose(-1, -2)
    by_distance = by_distance.gather(-1, behind.clamp(min=0).expand(by_distance.shape))
    scores = (by_content + by_distance) * q.shape[-1] ** -0.5
    return join_heads(attend(scores, v, behind >= 0))


class DiEngine(Loaded):
    """obs [L, B, n], memory [layers+1, M, B, D] → features [L, B, D], memory."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth, self.heads, self.mlp = config["layer_num"], config["head_num"], config["mlp_num"]

    def _gate(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        r = torch.sigmoid(self.linear(y, f"{name}.Wr") + self.linear(x, f"{name}.Ur"))
        z = torch.sigmoid(self.linear(y, f"{name}.Wz") + self.linear(x, f"{name}.Uz") - self.tensor(f"{name}.bg"))
        h = torch.tanh(self.linear(y, f"{name}.Wg") + self.linear(r * x, f"{name}.Ug"))
        return (1 - z) * x + z * h

    def forward(self, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One segment."""
        x = F.relu(self.linear(obs, "embedding.0")).transpose(0, 1)
        old, rows = memory.transpose(1, 2), memory.shape[1]
        keys = rows + x.shape[1]
        table = sinusoids(torch.arange(keys, device=x.device), self.tensor("pos_embedding.inv_freq"))
        kept = [torch.cat((old[0], x), 1)]
        for layer in range(self.depth):
            name = f"layers.{layer}"
            full = self.normed(torch.cat((old[layer], x), 1), f"{name}.layernorm1")
            k, v = self.linear(full, f"{name}.attention.attention_kv.0").chunk(2, -1)
            q = self.linear(x, f"{name}.attention.attention_q.0")
            far = split_heads(self.linear(table, f"{name}.attention.project_pos.0")[None], self.heads)[0]
            q, k, v = (split_heads(part, self.heads) for part in (q, k, v))
            found = relative(q, k, v, far, (self.tensor("u"), self.tensor("v")))
            found = F.relu(self.linear(found, f"{name}.attention.project.0"))
            x = self._gate(x, found, f"{name}.gate1")
            wide = self.normed(x, f"{name}.layernorm2")
            for part in range(self.mlp):
                wide = F.relu(self.linear(wide, f"{name}.mlp.{2 * part}.0"))
            x = self._gate(x, wide, f"{name}.gate2")
            kept.append(torch.cat((old[layer + 1], x), 1))
        new = torch.stack([part[:, -rows:] for part in kept])
        return x.transpose(0, 1), new.transpose(1, 2)


class RlLib(Loaded):
    """obs [B, L, n], memory [B, M, D] of each unit → logits [B, L, a], value [B, L], memories."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.units, self.heads = config["num_transformer_units"], config["num_heads"]

    def _gate(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        w = {part: self.tensor(f"{name}._{part}") for part in ("w_r", "w_z", "w_h", "u_r", "u_z", "u_h", "bias_z")}
        r = torch.sigmoid(y @ w["w_r"] + x @ w["u_r"])
        z = torch.sigmoid(y @ w["w_z"] + x @ w["u_z"] - w["bias_z"])
        return (1 - z) * x + z * torch.tanh(y @ w["w_h"] + (r * x) @ w["u_h"])

    def forward(self, obs: Tensor, *memories: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        x = self.linear(obs, "linear_layer._model.0")
        kept = []
        for unit, memory in enumerate(memories):
            name, full = f"attention_layers.{2 * unit}", torch.cat((memory, x), 1)
            kept.append(full[:, -memory.shape[1] :])
            q, k, v = self._projected(full, f"{name}._layer")
            positions = torch.arange(full.shape[1], device=x.device)
            table = sinusoids(positions, self.tensor(f"{name}._layer._rel_pos_embedding.inverse_freq"))
            far = split_heads(self.linear(table, f"{name}._layer._pos_proj._model.0")[None], self.heads)[0]
            bias = (self.tensor(f"{name}._layer._uvar"), self.tensor(f"{name}._layer._vvar"))
            found = relative(q[:, :, -x.shape[1] :], k, v, far, bias)
            found = F.relu(self.linear(found, f"{name}._layer._linear_layer._model.0"))
            x = self._gate(x, found, f"{name}._fan_in_layer")
            name = f"attention_layers.{2 * unit + 1}"
            wide = F.relu(self.linear(self.normed(x, f"{name}._layer.0"), f"{name}._layer.1._model.0"))
            x = self._gate(x, F.relu(self.linear(wide, f"{name}._layer.2._model.0")), f"{name}._fan_in_layer")
        logits = F.relu(self.linear(x, "logits._model.0"))
        return logits, self.linear(x, "values_out._model.0").squeeze(-1), *kept

    def _projected(self, full: Tensor, name: str) -> list[Tensor]:
        normed = self.normed(full, f"{name}._input_layernorm")
        return [
            split_heads(part, self.heads) for part in self.linear(normed, f"{name}._qkv_layer._model.0").chunk(3, -1)
        ]


def build_di_engine(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case gd01."""
    width, layers = config["embedding_dim"], config["layer_num"]
    return StepSpec(
        DiEngine(weights, config).eval(),
        [InputSpec("obs", ("L", "B", config["input_dim"]))],
        [StateSpec("memory", (layers + 1, config["memory_len"], "B", width))],
        [OutputSpec("features", ("L", "B", width))],
    )


def build_rllib(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case gr01."""
    shape = ("B", config["memory_inference"], config["attention_dim"])
    return StepSpec(
        RlLib(weights, config).eval(),
        [InputSpec("obs", ("B", "L", config["observation"]))],
        [StateSpec(f"units.{unit:02d}.memory", shape) for unit in range(config["num_transformer_units"])],
        [OutputSpec("logits", ("B", "L", config["num_outputs"])), OutputSpec("value", ("B", "L"))],
    )
