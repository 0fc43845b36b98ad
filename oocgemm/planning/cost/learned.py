"""Learned rates: what earlier runs observed on a machine, how samples are combined, and their JSON format."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median
from typing import Any

from oocgemm.planning.cost.fits import MAX_LINK
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.cost.rates import scaled, value_of

FORMAT, VERSION = "oocgemm-learned-rates", 1
# The rates of how many runs are kept, the latest last. A rate's value is their median.
SAMPLES = 5
# The value in use changes only if the median differs from it by more than this fraction. Otherwise plans, and
# the cache of plans, would change after each run.
HYSTERESIS = 0.1
# A learned rate replaces another one only if they differ by more than this fraction, and by more than the
# samples differ among each other.
MIN_CHANGE = 0.1
# Maximum ratio of an observed rate to the default, and the minimum ratio by name. Rates outside are rejected.
# A read far below the default is a read from a disk, but `read` is the rate of the page cache. The copies and
# kernels of slow GPUs really are that much slower, and the device times them itself.
MAX_RATIO = 4.0
MIN_RATIOS = {
    "read": 0.2,
    "memory": 0.1,
    "decode": 0.1,
    "write": 0.1,
    "remote": 0.002,
    "h2d": 0.02,
    "d2h": 0.02,
}
MIN_KERNEL_RATIO = 0.001
# The same for the kernels of the CPU. A core that is 50 times as slow as the default has been used by others.
MIN_HOST_KERNEL_RATIO = 0.02
# A rate lower than the one in use is believed if the lane was busy for at least this share of the run. If it
# was not, its operations may have had too few blocks in flight. This applies to the rates in ON_HOST. The
# device times its own operations one by one.
MIN_BUSY = 0.5
ON_HOST = ("read", "memory", "decode", "write", "remote")
# Maximum number of rates that are kept.
MAX_RATES = 200


@dataclass(frozen=True, slots=True)
class LearnedRate:
    """A rate that runs observed: the value in use, and the rates of the last runs, the latest last."""

    value: float
    samples: tuple[float, ...]

    @property
    def spread(self) -> float:
        """The range of the samples, relative to the value."""
        return (max(self.samples) - min(self.samples)) / self.value

    def with_sample(self, rate: float) -> "LearnedRate":
        """Add the rate of one more run.

        >>> LearnedRate(10.0, (10.0,)).with_sample(11.0)
        LearnedRate(value=10.0, samples=(10.0, 11.0))
        >>> LearnedRate(10.0, (10.0, 16.0)).with_sample(14.0)
        LearnedRate(value=14.0, samples=(10.0, 16.0, 14.0))
        """
        samples = (*self.samples, rate)[-SAMPLES:]
        middle = median(samples)
        return LearnedRate(middle if _differ(middle, self.value, HYSTERESIS) else self.value, samples)


@dataclass(frozen=True)
class Learned:
    """The learned rates of a device.

    A key is the name of a rate. It is followed by " @ " and the id of a file system, codec or bucket if the
    rate depends on one. Examples are "h2d", "float64" (a kernel), "read @ 8:1", "decode @ ZstdCodec" and
    "remote @ s3://bucket".
    """

    machine: str
    backend: str
    device: str
    rates: Mapping[str, LearnedRate]

    def with_run(
        self,
        observed: Mapping[tuple[str, str], tuple[float, float]],
        model: MachineModel,
        defaults: MachineModel,
        limit: float | None,
    ) -> "Learned":
        """Add the rates of one run.

        Args:
            observed: per name and place, the rate, and the share of the time in which the lane was busy.
            model: the model that the run was planned with.
            defaults: the uncalibrated model, to which the rates are compared.
            limit: maximum rate of the link to the device; None if unknown.
        """
        rates = dict(self.rates)
        for (name, place), (rate, busy) in observed.items():
            lowest, highest = bounds(name, defaults, limit)
            known = rates.pop(key := key_of(name, place), None)
            in_use = known.value if known is not None else value_of(model, name)
            if lowest <= rate <= highest and not (name in ON_HOST and busy < MIN_BUSY and rate < in_use):
                known = known.with_sample(rate) if known is not None else LearnedRate(rate, (rate,))
            if known is not None:
                rates[key] = known  # the rates that were observed last are the last ones
        return replace(self, rates=dict(list(rates.items())[-MAX_RATES:]))

    def apply(
        self, model: MachineModel, places: Mapping[str, Iterable[str]] | None = None
    ) -> tuple[MachineModel, list[str]]:
        """Replace the rates of a model that differ clearly from the learned ones.

        Args:
            model: the default model, or that of a calibration.
            places: per name of a rate, the ids of the file systems or codecs that a run uses. A rate without
                an entry is not replaced, unless it depends on no place. The slowest of several places counts.

        Returns:
            The model, and the names of the rates that were replaced.
        """
        factors: dict[str, float] = {}
        for name in (*model.kernels, *MIN_RATIOS, "prepare"):
            found = {self.rates.get(key_of(name, place)) for place in (places or {}).get(name, ("",))}
            now, known = value_of(model, name), [rate for rate in found if rate is not None]
            if not known:
                continue
            slowest = min(known, key=lambda rate: rate.value)
            value = slowest.value if len(known) == len(found) else min(now, slowest.value)
            if _differ(value, now, max(MIN_CHANGE, slowest.spread)):
                factors[name] = value / now
        return (scaled(model, factors) if factors else model), list(factors)

    def known(self, places: Mapping[str, Iterable[str]]) -> set[str]:
        """Return the names of the rates that runs observed, on all of the given places."""
        names = {key.partition(" @ ")[0] for key in self.rates}
        return {
            name
            for name in names
            if all(key_of(name, place) in self.rates for place in places.get(name, ("",)))
        }

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "machine": self.machine,
            "backend": self.backend,
            "device": self.device,
            "rates": {k: {"value": rate.value, "samples": rate.samples} for k, rate in self.rates.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> "Learned":
        """Rebuild learned rates from the output of `to_dict`. Raises `ValueError` for other data."""
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
            raise ValueError("the content is not a file of learned rates of this version")
        try:
            rates = {
                str(key): LearnedRate(_positive(rate["value"]), tuple(map(_positive, rate["samples"])))
                for key, rate in data["rates"].items()
            }
            texts = {name: str(data[name]) for name in ("machine", "backend", "device")}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is incomplete: {error}") from error
        if not all(rate.samples for rate in rates.values()):
            raise ValueError("a rate has no samples")
        return cls(**texts, rates=rates)


def key_of(name: str, place: str) -> str:
    """Return the key of a rate in `Learned.rates`."""
    return f"{name} @ {place}" if place else name


def bounds(name: str, defaults: MachineModel, limit: float | None = None) -> tuple[float, float]:
    """Return the lowest and the highest rate that is believed. `limit` is that of the link to the device."""
    default = value_of(defaults, name)
    highest = MAX_RATIO * default
    if name in ("h2d", "d2h"):
        highest = min(highest, limit or MAX_LINK)
    kernel = MIN_HOST_KERNEL_RATIO if defaults.shares_cores else MIN_KERNEL_RATIO
    return MIN_RATIOS.get(name, kernel) * default, highest


def _differ(one: float, other: float, fraction: float) -> bool:
    return max(one, other) > (1 + fraction) * min(one, other)


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise ValueError(f"{value!r} is not a positive finite number")
    return float(value)
