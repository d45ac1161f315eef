"""Tests of checkpoints read hundreds of files, and share the process that reads their pickles."""

import contextlib

import pytest
from pickle_programs import in_one_process


@pytest.fixture(autouse=True)
def one_process(request):
    """All but those that ask for `own_processes`."""
    with contextlib.nullcontext() if "own_processes" in request.fixturenames else in_one_process():
        yield


@pytest.fixture
def own_processes():
    """Each file's pickles are read in a process of their own, as a user's are."""
