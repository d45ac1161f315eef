"""Whether a module is a step: a function of what it is given, which keeps nothing that was not declared."""

from __future__ import annotations
