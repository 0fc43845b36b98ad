"""Calibrations: the rates that `oocgemm calibrate` measured, their JSON format, and their names."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from typing import Any

from oocgemm.planning.cost.machine import RATES, KernelRate, MachineModel, check_link, default_model, fit_link

# Name and version in the JSON of a calibration. Files with another name or version are rejected.
FORMAT = "oocgemm-calibration"
VERSION = 3
# The names that reports use for fields of `MachineModel` and `StoreRates`, in the order in which data flow.
LINKS = {
    "read_cold": "read, disk",
    "read": "read, page cache",
    "read_scattered": "read, parts of chunks",
    "decode": "decode, zstd",
    "memory": "read, memory",
    "h2d": "h2d",
    "prepare": "prepare, residues",
    "d2h": "d2h",
    "write": "write",
}


@dataclass(frozen=True, slots=True)
class StoreRates:
    """Measured bytes per second of one file system.

    `read` and `read_scattered` are rates from the page cache: of whole uncompressed chunks, and of half of
    the columns of each chunk. `read_cold` is the rate from the disk. `write` includes the flush to the disk.
    """

    read: float
    read_scattered: float
    read_cold: float
    write: float


@dataclass(frozen=True)
class Calibration:
    """Measured rates of a machine, and the samples that they were fitted to.

    `rates` has values for fields of `MachineModel`, by name; fields without a value keep their defaults.
    `stores` has the rates of file systems by id, in the order in which they were measured. `samples` has the
    measurements to which the rates were fitted.
    """

    machine: str
    backend: str
    device: str
    date: str
    multiprocessors: int
    kernels: Mapping[str, KernelRate]
    rates: Mapping[str, float]
    stores: Mapping[str, StoreRates] = field(default_factory=dict)
    samples: Mapping[str, Any] = field(default_factory=dict)

    def model(
        self, defaults: MachineModel, reads: Collection[str] = (), writes: Collection[str] = ()
    ) -> MachineModel:
        """Build the model of this machine for a run that uses the file systems with ids `reads` and `writes`.

        A file system that was never measured gets the rates of the one measured last, and the model's name
        says so.
        """
        name = f"{self.device}, calibrated on {self.date}"
        measured_rates: dict[str, Any] = dict(self.rates)
        if self.stores:
            latest = list(self.stores.values())[-1]
            sources = [self.stores.get(system, latest) for system in reads] or [latest]
            targets = [self.stores.get(system, latest) for system in writes] or [latest]
            measured_rates |= {
                "read": min(s.read for s in sources),
                "read_scattered": min(s.read_scattered for s in sources),
                "write": min(s.write for s in targets),
            }
        measured = all(system in self.stores for system in (*reads, *writes))
        if not measured:
            name += "; storage not calibrated: run oocgemm calibrate --path DIR"
        return replace(
            defaults,
            name=name,
            kernels={**defaults.kernels, **self.kernels},
            multiprocessors=self.multiprocessors,
            calibrated=True,
            storage_calibrated=measured,
            **measured_rates,
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        return {"format": FORMAT, "version": VERSION} | asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Calibration":
        """Rebuild a calibration from the output of `to_dict` or of ``oocgemm calibrate --json``.

        Keys may have underscores instead of spaces, as in that JSON. Raises `ValueError` for other data.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("the content is not a calibration")
        if data.get("version") != VERSION:
            raise ValueError(f"it has version {data.get('version')!r}, this program reads version {VERSION}")
        try:
            texts = {name: str(data[name]) for name in ("machine", "backend", "device", "date")}
            kernels = {
                name.replace("_", " "): KernelRate(**_numbers(rate)) for name, rate in data["kernels"].items()
            }
            stores = {system: StoreRates(**_numbers(rate)) for system, rate in data["stores"].items()}
            rates, samples = _numbers(data["rates"]), dict(data["samples"])
            multiprocessors = max(1, int(data["multiprocessors"]))
            _check_links(texts["backend"], rates, samples)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is incomplete: {error}") from error
        known = {f.name for f in fields(MachineModel) if f.type is float}
        unknown = (rates.keys() - known) | (kernels.keys() - RATES.keys())
        if unknown or any(rate.peak <= 0 for rate in kernels.values()):
            raise ValueError(f"it has invalid rates: {', '.join(sorted(unknown)) or 'a peak of 0'}")
        return cls(
            **texts,
            multiprocessors=multiprocessors,
            kernels=kernels,
            rates=rates,
            stores=stores,
            samples=samples,
        )


def _check_links(backend: str, rates: Mapping[str, float], samples: Mapping[str, Any]) -> None:
    """Raise `ValueError` for impossible rates of links, or for rates that do not fit the measured samples."""
    for link in ("h2d", "d2h"):
        # The host backend copies within memory, so that no limit of a link applies.
        if backend != "host" and link in rates:
            check_link(link, rates[link], samples.get("link_limit"))
        copies = samples.get("copies", {}).get(link)
        if copies:
            fit_link(link, {int(size): rate for size, rate in copies.items()}, samples.get("link_limit"))


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Convert rates and costs to floats. Raises `ValueError` for negative values, and for a rate of 0."""
    may_be_0 = ("half_depth", "copy_latency", "arena_seconds_per_byte")
    for name, value in data.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number or value < 0 or (value == 0 and name not in may_be_0):
            raise ValueError(f"{name} = {value!r} is not a positive finite number")
    return {name: float(value) for name, value in data.items()}


def link_rates(machine: MachineModel, store: StoreRates | None) -> dict[str, float]:
    """Return the rates of `LINKS` that apply to a machine, in bytes per second.

    "read_cold", the rate of reads from the disk, is included only if `store` is given.
    """
    found = {name: getattr(machine, name) for name in LINKS if hasattr(machine, name)}
    if store is not None:
        found["read_cold"] = store.read_cold
    return {
        name: found[name]
        for name in LINKS
        if name in found and not (machine.unified and name in ("h2d", "d2h"))
    }


def calibrated_rates(found: Calibration) -> dict[str, float]:
    """Return the rates of `LINKS` in a calibration, with those of the file system measured last."""
    return link_rates(found.model(default_model(found.backend, 1)), list(found.stores.values())[-1])
