"""Who is let in: so many requests at once, and of one client a share of them.

The batcher has such a rule for its queue. This is the same one for what goes past it: whoever does not fit in
is refused at once, with a hint when to try again, and no client can take the places of all the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import aiogpu


class Admission:
    """`with admission.place(client):` one request of this client is under way.

    `places` in all, `share` of them for one client. Nobody waits here: those who are in compute at the same
    time, on streams of their own.
    """

    def __init__(self, name: str, places: int, share: int) -> None:
        self.name = name
        self.places = places
        self.share = share
        self.taken: Counter[str] = Counter()
        self._seconds = 1.0  # how long a place is held, smoothed

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """Raises `aiogpu.OverloadedError`, which the middleware answers with 429, when there is none."""
        if self.taken.total() >= self.places:
            raise self._refusal(f"all {self.places} places are taken", self.places)
        if self.taken[client] >= self.share:
            raise self._refusal(f"one client may have {self.share}", self.share)
        start = perf_counter()
        self.taken[client] += 1
        try:
            yield
        finally:
            self.taken[client] -= 1
            if not self.taken[client]:
                del self.taken[client]  # an address that is never seen again shall not stay
            self._seconds += (perf_counter() - start - self._seconds) / 8

    def _refusal(self, why: str, places: int) -> aiogpu.OverloadedError:
        # One of so many places is free again after that part of the time that each is held.
        return aiogpu.OverloadedError(f"{self.name}: {why}", self._seconds / places)
