"""Measure a bundle on a text: losses, the gain from its memory, and the reach of its context."""

from txl_report.measuring.context_length import measure_context
from txl_report.measuring.results import ContextMeasure, TextMeasures
from txl_report.measuring.text import measure_text

__all__ = ["ContextMeasure", "TextMeasures", "measure_context", "measure_text"]
