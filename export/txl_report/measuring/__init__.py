"""Measures a bundle on a text: losses, what the memory gains, how far the context reaches, what the heads look at."""

from txl_report.measuring.context_length import measure_context
from txl_report.measuring.heads import look_at_heads
from txl_report.measuring.results import ContextMeasure, HeadsLook, TextMeasures
from txl_report.measuring.text import measure_text

__all__ = ["ContextMeasure", "HeadsLook", "TextMeasures", "look_at_heads", "measure_context", "measure_text"]
