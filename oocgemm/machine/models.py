"""The machine models that plans are made with: default, calibrated and learned rates."""

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from time import monotonic

from oocgemm import backends
from oocgemm.backends import Backend
from oocgemm.planning import RATES, Calibration, MachineModel, Plan, default_model
from oocgemm.planning.cost.learned import ON_HOST, Learned
from oocgemm.stores import Matrix
from oocgemm.stores.objects.address import bucket_of
from oocgemm.system import cache, learning
from oocgemm.system.compiled import compiled
from oocgemm.timeline import Recorder
from oocgemm.timeline.observed import observed_rates

logger = logging.getLogger("oocgemm")

# Rates besides those of kernels. A plan that relies on one of them needs to know whether it is only assumed.
LINKS = ("h2d", "d2h", "read", "remote", "decode", "memory", "write", "prepare")
# Shorter runs teach nothing: they are dominated by the start-up, and storing rates would take a visible part
# of their time.
MIN_WALL_NS = 100_000_000
# Runs of one plan teach the same. So one of them in this many seconds is learned from, which takes 3 ms.
# Up to MAX_TEACHERS plans are remembered.
TEACHES_AGAIN, MAX_TEACHERS = 10.0, 16
# If other programs used more than this share of the CPU cores, nothing is learned of what the cores do.
MAX_OTHERS = 0.1


@dataclass(frozen=True, slots=True)
class Places:
    """Where the operands of a run are.

    `reads` and `writes` are the ids of file systems, `codecs` the names of codecs, `buckets` those of buckets
    in object stores.
    """

    reads: Collection[str] = ()
    writes: Collection[str] = ()
    codecs: Collection[str] = ()
    buckets: Collection[str] = ()

    @property
    def by_rate(self) -> Mapping[str, Collection[str]]:
        """For each rate that depends on a place, the places."""
        return {"read": self.reads, "write": self.writes, "decode": self.codecs, "remote": self.buckets}


@dataclass(frozen=True)
class Models:
    """The models of a machine, from the default rates to the rates that are known best.

    - `machines`: the default model, that of the calibration, and that with learned rates. Models that do not
      differ from the one before are left out.
    - `assumed`: the names of the rates that the last model only assumes.
    - `calibration`, `learned`: what was loaded; None if there is none.
    """

    machines: tuple[MachineModel, ...]
    assumed: frozenset[str]
    calibration: Calibration | None
    learned: Learned | None

    @property
    def best(self) -> MachineModel:
        """The model with the rates that are known best."""
        return self.machines[-1]


def models(backend: str, device: str | None = None, places: Places | None = None) -> Models:
    """Return the models that predict run times on a device.

    Args:
        backend: "host" or "cuda".
        device: identity of the device, as `backends.identity` returns it.
        places: where the operands are.
    """
    places = places or Places()
    hashable = Places(*map(frozenset, (places.reads, places.writes, places.codecs, places.buckets)))
    versions = cache.version(), learning.version()
    defaults = default_model(backend, len(os.sched_getaffinity(0)), compiled() is not None)
    return _models(backend, device, hashable, defaults, versions)


@lru_cache(16)
def _models(
    backend: str, device: str | None, places: Places, defaults: MachineModel, versions: object
) -> Models:
    """Read the files of calibrated and learned rates. `versions` differ if the files may have changed."""
    calibration, note = cache.load(backend, device)
    if calibration is None:
        best = replace(defaults, name="; ".join(filter(None, (defaults.name, note))))
        found, assumed = [best], {*LINKS, *RATES}
    else:
        best = calibration.model(defaults, places.reads, places.writes)
        found = [defaults, best]
        measured = {*calibration.rates, *calibration.kernels}
        assumed = {*LINKS, *RATES} - measured - ({"read", "write"} if best.storage_calibrated else set())
    learned = learning.load(backend, device)
    if learned is not None:
        with_learned, names = learned.apply(best, places.by_rate)
        if names:
            found.append(replace(with_learned, name=f"{best.name}; learned from runs: {', '.join(names)}"))
        assumed -= learned.known(places.by_rate)
    return Models(tuple(found), frozenset(assumed), calibration, learned)


def learn(plan: Plan, log: Recorder, operands: Mapping[str, Matrix], kernel: str, engine: Backend) -> None:
    """Store the rates that a run observed, for later plans. Never raises: the product is complete.

    Args:
        plan: the plan of the run.
        log: the record of the run, which has ended.
        operands: A, B and C.
        kernel: the kernel that the caller chose. Only the rates of the default one are learned.
        engine: the backend of the run.
    """
    # With several devices, spans of one lane overlap, which would falsify the rates.
    if log.wall < MIN_WALL_NS or plan.devices > 1 or not learning.enabled() or _has_taught(plan):
        log.sample.clear()
        return
    try:
        places = {name: place_of(matrix) for name, matrix in operands.items()}
        rates = _observed(plan, log, places, kernel in ("auto", "cublas", "blas"))
        defaults = default_model(engine.name, plan.machine.cores, plan.machine.compiled)
        learning.update(
            engine.name,
            backends.identity(engine),
            lambda learned: learned.with_run(rates, plan.machine, defaults, engine.link_limit()),
        )
    except Exception:
        logger.debug("the rates of this run were not learned", exc_info=True)
    finally:
        log.sample.clear()  # the log lives as long as the result of the run


# By the id of its plan, the plan of a run that was learned from, and the time of `monotonic` then.
_teachers: dict[int, tuple[Plan, float]] = {}


def _has_taught(plan: Plan) -> bool:
    """Return whether a run of the same plan was learned from just now. Otherwise the present one counts."""
    now = monotonic()
    _, at = _teachers.get(id(plan), (None, -inf))
    if now - at < TEACHES_AGAIN:
        return True
    if len(_teachers) >= MAX_TEACHERS:
        _teachers.clear()
    _teachers[id(plan)] = plan, now
    return False


def _observed(
    plan: Plan, log: Recorder, places: Mapping[str, str], kernel: bool
) -> dict[tuple[str, str], tuple[float, float]]:
    spans = log.sample.spans(together=plan.machine.shares_cores)
    flush = max(0, log.wall - max((span.end for span in spans), default=log.wall)) / 1e9
    found = observed_rates(plan, spans, places, flush, kernel)
    used = log.header.get("cpu") or {"busy_seconds": 0.0, "own_seconds": 0.0, "cores": 1}
    others = (used["busy_seconds"] - used["own_seconds"]) / (used["cores"] * log.wall / 1e9)
    return {
        key: (one.rate, one.busy)
        for key, one in found.items()
        if others <= MAX_OTHERS or not (plan.machine.shares_cores or key[0] in ON_HOST)
    }


def place_of(matrix: Matrix) -> str:
    """Return the codec of a matrix whose chunks are decoded, or else the ids of its file systems.

    For a matrix in an object store, return the name of its bucket.
    """
    if matrix.layout.requests:
        return bucket_of(str(matrix.describe()["path"]))
    return codec_of(matrix) or "+".join(sorted(stored_on(matrix)))


def buckets_of(*matrices: Matrix | None) -> set[str]:
    """Return the names of the buckets of matrices in object stores."""
    return {place_of(matrix) for matrix in matrices if matrix is not None and matrix.layout.requests}


def codec_of(matrix: Matrix | None) -> str:
    """Return the names of the codecs of a matrix whose chunks are decoded; "" if they are not."""
    if matrix is None or not matrix.layout.decode_bytes:
        return ""
    names = matrix.describe().get("codecs")
    found = [str(name) for name in names if name != "BytesCodec"] if isinstance(names, list) else []
    return "+".join(found) or "unknown"


def stored_on(*matrices: Matrix | None) -> set[str]:
    """Return the ids of the file systems that store these matrices. Others are left out."""
    found = set()
    for matrix in matrices:
        if matrix is not None and not matrix.layout.in_memory and not matrix.layout.requests:
            numbers = [i[1] for i in matrix.identities() if isinstance(i, tuple) and i[0] == "file"]
            found |= {cache.device_id(number) for number in numbers} or {"elsewhere"}
    return found
