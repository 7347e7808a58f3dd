"""An engine with tiny random models."""

from __future__ import annotations

import pytest

from parse_infer.engine import ParseEngine


@pytest.fixture
def engine(make_engine) -> ParseEngine:
    return make_engine()
