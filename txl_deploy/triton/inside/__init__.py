"""Modules that run inside Triton; every package has copies of these modules and of the runtime that they import."""
