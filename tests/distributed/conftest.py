"""The group of processes, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Group


@pytest.fixture(scope="session")
def group() -> Iterator[Group]:
    started = Group()
    yield started
    started.close()
