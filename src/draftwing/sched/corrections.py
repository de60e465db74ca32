"""How far prices are off in operation: a machine is faster or slower than when it was measured, and single shapes are.

The logarithm of what a step takes beside what was measured is the sum of two that change. One is of all shapes of a
bucket of batch sizes, for a machine has other things to do and its clock changes; one is of the shape alone. The first
changes fast, the second slowly, and what is known of the second fades while the shape does not run. A sample moves each
by its share of what is uncertain (a Kalman filter without covariances). So where one shape runs for long the machine's
speed follows it, and one that runs rarely is corrected at once for what it differs from that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from draftwing.core import TreeShape

MOST = 3.0  # limit of a shape's correction in either direction; what is further off was measured wrong (`prices.DOUBT`)
MAX_SHARED = 16.0  # the same of all shapes' correction: a machine may have been busy while it was measured
NOISE = 0.05**2  # variance of a sample's logarithm
SPEED, SPEED_DRIFT = 0.2**2, 0.005**2  # variance of the machine's speed at first, and by how much it grows at each step
OWN, OWN_DRIFT = 0.1**2, 0.0005**2  # the same of a shape's own correction while the shape runs
IDLE_DRIFT = 0.0045**2  # and while it does not
SURPRISE = 0.2  # most of a logarithm that one sample says
STALL = 1.5  # the same upwards, in standard deviations: what stalls a step says nothing of the next, and nothing makes
# a step take less than it needs. What is dearer than it seems is chosen, and has more samples soon.


class Correction:
    """A factor; `variance` of its logarithm, as of sample number `at` of the bucket."""

    __slots__ = ("at", "factor", "most", "variance")

    def __init__(self, most: float, variance: float, at: int, factor: float = 1.0) -> None:
        self.most, self.variance, self.at = most, variance, at
        self.factor = min(max(factor, 1 / most), most)

    def learn(self, error: float, share: float) -> None:
        """error: a logarithm; share: of it, this one's."""
        self.factor = min(max(self.factor * math.exp(share * error), 1 / self.most), self.most)
        self.variance *= 1 - share


class Corrections:
    """Factors of prices, by shape and bucket."""

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}  # of a bucket
        self._shared: dict[int, Correction] = {}
        self._own: dict[tuple[TreeShape, int], Correction] = {}

    def shared(self, bucket: int) -> float:
        """Returns the factor of a shape of which nothing is known."""
        found = self._shared.get(bucket)
        return 1.0 if found is None else found.factor

    def factor(self, shape: TreeShape, bucket: int) -> float:
        """Returns what a price is multiplied with."""
        own = self._own.get((shape, bucket))
        return self.shared(bucket) if own is None else self.shared(bucket) * own.factor

    def learn(self, shape: TreeShape, bucket: int, ratio: float) -> None:
        """ratio: seconds that a step took, relative to what was expected with the factor."""
        now = self._samples[bucket] = self._samples.get(bucket, 0) + 1
        shared, own = self._shared.get(bucket), self._own.get((shape, bucket))
        if shared is None:
            shared = self._shared[bucket] = Correction(MAX_SHARED, SPEED, now)
        if own is None:
            own = self._own[shape, bucket] = Correction(MOST, OWN, now)
        shared.variance = min(shared.variance + SPEED_DRIFT * (now - shared.at), SPEED)
        own.variance = min(own.variance + OWN_DRIFT + IDLE_DRIFT * max(now - own.at - 1, 0), OWN)
        shared.at = own.at = now
        total = shared.variance + own.variance + NOISE
        error = min(max(math.log(ratio), -SURPRISE), SURPRISE, STALL * math.sqrt(total))
        shared.learn(error, shared.variance / total)
        own.learn(error, own.variance / total)

    def restore(self, shape: TreeShape | None, bucket: int, factor: float) -> None:
        """Takes a factor of another day; shape: None for that of all."""
        if shape is None:
            self._shared[bucket] = Correction(MAX_SHARED, SPEED, 0, factor)
        else:
            self._own[shape, bucket] = Correction(MOST, OWN / 4, 0, factor)

    def items(self) -> Iterator[tuple[TreeShape | None, int, float]]:
        """Yields what `restore` takes."""
        for bucket, one in self._shared.items():
            yield None, bucket, one.factor
        for (shape, bucket), one in self._own.items():
            yield shape, bucket, one.factor

    def forget(self, shape: TreeShape) -> None:
        """What is of the shape alone."""
        self._own = {key: one for key, one in self._own.items() if key[0] != shape}

    def clear(self) -> None:
        self._samples.clear()
        self._shared.clear()
        self._own.clear()
