"""Fixtures of the tests of laws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.laws.planting import Plant, planting


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plant]:
    with planting(tmp_path_factory.mktemp("planted")) as plant:
        yield plant
