"""Measures a bundle on a text: losses, what the memory gains, and how far the context reaches."""

from txl_report.measuring.context_length import measure_context
from txl_report.measuring.results import ContextMeasure, TextMeasures
from txl_report.measuring.text import measure_text

__all__ = ["ContextMeasure", "TextMeasures", "measure_context", "measure_text"]
