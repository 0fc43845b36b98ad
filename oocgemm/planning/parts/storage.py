"""The storage that all workers share: how fast it serves one of them while others use it too."""

from dataclasses import dataclass, replace

from oocgemm.planning.cost.machine import MachineModel, scaled


@dataclass(frozen=True, slots=True)
class Storage:
    """Total rates of the storage, in bytes per second, for all workers together.

    Workers that read at the same time get equal shares of `read`, and those that write get equal shares of
    `write`. No worker is served faster than its machine model says.
    """

    read: float
    write: float

    @classmethod
    def of(cls, machine: MachineModel, read: float | None = None) -> "Storage":
        """Return the storage that delivers `read` bytes per second in total, by default to one worker.

        Only total rates of reads are known to most users. A storage that can serve the reads of x workers at
        their full rate is assumed to serve the writes of x workers too.
        """
        workers = 1.0 if read is None else read / machine.read
        return cls(workers * machine.read, workers * machine.write)

    def shared(self, machine: MachineModel, workers: int, part: float = 1.0) -> MachineModel:
        """Return the model of a machine on which one of `workers` equal workers runs.

        If the storage is too slow for all, the model's reads get a fraction `part` of the worker's share. The
        uncompressed bytes of compressed chunks count as read, since their compressed size is not known.
        """
        share = self.read / workers
        factors = {
            "read": 1.0 if machine.read <= share else part * share / machine.read,
            "write": min(1.0, self.write / workers / machine.write),
        }
        decode = min(machine.decode, share)
        if decode == machine.decode and set(factors.values()) == {1.0}:
            return machine
        return replace(scaled(machine, factors), decode=decode)

    def limits(self, machine: MachineModel, workers: int, lane: str) -> bool:
        """Tell whether sharing the storage slows `lane` down ("read", "decode" or "write")."""
        if lane not in ("read", "decode", "write", "encode"):
            return False
        total, own = (self.write, machine.write) if lane in ("write", "encode") else (self.read, machine.read)
        if lane == "decode":
            own = machine.decode
        return total < workers * own
