"""recurrent-memory-transformer-pytorch in one graph: options beside the package's own calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from growing import bundle_error, step_error
from support import package
from torch import Tensor, nn
from txl_export.adapters.recurrent_memory import build, step_spec
from txl_export.adapters.registry import adapt
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states
from txl_runtime.errors import UsageError

LIMIT, EXACT = 1e-4, 1e-9
SMALL = {"dim": 16, "num_tokens": 21, "depth": 2, "num_memory_tokens": 2, "seq_len": 6, "heads": 2, "dim_head": 8}
ROTARY = {"rotary_pos_emb": True}
ROWS = 3
"""The axis of rows in keys and values."""


def module(options: Mapping[str, Any]) -> Any:
    """The package's module; weights N(0, 0.2), and what begins as an identity or as ones near that."""
    package("recurrent_memory_transformer_pytorch")
    built = build({**SMALL, **options})
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            drawn = torch.randn(parameter.shape, generator=draws)
            near = any(word in name for word in ("static", "dynamic", "norm", "branch.0"))
            parameter.copy_(parameter + drawn * 0.1 if near else drawn * 0.2)
    return built.eval()


def called(plain: Any) -> Any:
    """The package's own call, which is given nothing before the first segment."""

    def own(given: Tensor, carried: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
        memories, caches = carried or (None, None)
        logits, memories, caches = plain(given, memories, xl_memories=caches)
        held = {f"layers.{number:02d}.xl_kv": cache for number, cache in enumerate(caches or ())}
        assert memories.shape[1:] == (2, 16)
        return logits, held, (memories, caches)

    return own


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="memory of keys and values"),
        pytest.param({"use_xl_memories": False}, id="memory tokens alone"),
        pytest.param({"xl_mem_len": 4, **ROTARY}, id="rotary"),
        pytest.param({"seq_len": 12, "abs_pos_emb": False, **ROTARY}, id="rotary, rows not full"),
        pytest.param({"always_have_read_memories": False}, id="no memory at first"),
        pytest.param({"always_have_read_memories": False, "use_xl_memories": False, **ROTARY}, id="none, rotary"),
        pytest.param({"add_write_to_next_write_mem": True, "num_residual_streams": 1}, id="written on"),
        pytest.param({"enhanced_xl_recurrence": True, "use_flash_attn": True}, id="flash"),
        pytest.param({"causal": False}, id="not causal"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*sdp_kernel:FutureWarning")
def test_one_graph_computes_what_the_package_computes(options: Mapping[str, Any]) -> None:
    plain = module(options)
    spec = step_spec(plain)
    assert (spec.outputs[0].role == "logits") == plain.causal  # type: ignore[union-attr]
    segments = (6, 5, 6, 6, 4, 6) if not plain.always_have_read_memories else (6, 3, 6, 1, 6, 6)
    assert step_error(spec, called(plain), segments, ROWS) <= EXACT


@pytest.mark.slow
def test_a_bundle_beside_the_package(tmp_path: Path) -> None:
    plain = module({"xl_mem_len": 5, "always_have_read_memories": False, **ROTARY})
    assert bundle_error(step_spec(plain), called(plain), tmp_path / "bundle.txl", (6,), ROWS) <= LIMIT


def test_memories_are_what_was_written() -> None:
    plain = module({})
    spec = step_spec(plain)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]] * 2, dtype=torch.int32)
    _, after = Eager(spec)({"tokens": tokens}, fresh_states(spec, 2))
    assert torch.equal(after["fill"], torch.tensor([6, 6], dtype=torch.int32))
    with torch.no_grad():
        _, written, _ = plain(tokens)
    torch.testing.assert_close(after["read_memories"], written)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in plain.modules())


def test_segments_that_would_keep_memories_which_are_none_are_refused() -> None:
    plain = module({"always_have_read_memories": False})
    spec = step_spec(plain)
    with pytest.raises(UsageError, match=r"rows of xl_mem_len.*always_have_read_memories=False.*at least 4"):
        Eager(spec)({"tokens": torch.zeros(2, 3, dtype=torch.int32)}, fresh_states(spec, 2))


@pytest.mark.filterwarnings("ignore:.*sdp_kernel:FutureWarning")
def test_what_cannot_be_carried_is_refused() -> None:
    with pytest.raises(UsageError, match="memory_not_causal is False, expected True"):
        adapt("recurrent-memory", module({"memory_not_causal": False, "use_flash_attn": True}))


def test_a_wrapper_around_it_is_looked_through() -> None:
    plain = module({"use_xl_memories": False})
    wrapper = package("recurrent_memory_transformer_pytorch").RecurrentMemoryTransformerWrapper(plain)
    assert step_spec(wrapper).module is plain


def test_another_module_is_refused() -> None:
    with pytest.raises(UsageError, match="this Linear has no read_memory_emb"):
        step_spec(nn.Linear(2, 2))
