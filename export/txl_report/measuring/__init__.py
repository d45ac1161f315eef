"""Measure a bundle on a text: losses, the gain from its memory, and the length of context that it uses."""

from txl_report.measuring.context_length import measure_context
from txl_report.measuring.datastore import Searched, measure_datastore
from txl_report.measuring.results import ContextMeasure, DatastoreMeasures, TextMeasures
from txl_report.measuring.text import measure_text

__all__ = [
    "ContextMeasure",
    "DatastoreMeasures",
    "Searched",
    "TextMeasures",
    "measure_context",
    "measure_datastore",
    "measure_text",
]
