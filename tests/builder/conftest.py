"""Engines of random pairs, built once a session."""

import pytest

from .models import CASES, Pair, make_pair


@pytest.fixture(scope="session", params=CASES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """An engine of each kind of target."""
    return make_pair(tmp_path_factory.mktemp(request.param.name), request.param)
