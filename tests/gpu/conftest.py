"""In Triton's interpreter every test of a kernel runs under the checks of :class:`interpreted.Memcheck`."""

from collections.abc import Iterator

import pytest

from interpreted import INTERPRETED, Memcheck, make_faithful

if INTERPRETED:
    make_faithful()

    @pytest.fixture(autouse=True)
    def _memcheck() -> Iterator[None]:
        with Memcheck():
            yield
