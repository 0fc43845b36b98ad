"""Scale rates of a machine model by name: a field, or the dtype of a kernel whose peak is meant."""

from collections.abc import Mapping
from dataclasses import fields, replace

from oocgemm.planning.cost.machine import KernelRate, MachineModel

_FIELDS = {field.name for field in fields(MachineModel)}
# Rates that are changed by the same factor: one is measured, and the others follow.
_TOGETHER = {"read": ("read", "read_scattered")}


def scaled(model: MachineModel, factors: Mapping[str, float]) -> MachineModel:
    """Multiply rates of a model, by name, by factors. The rate of scattered reads follows that of reads."""
    kernels, changed = dict(model.kernels), dict[str, float]()
    for name, factor in factors.items():
        if name in _FIELDS:
            changed |= {part: factor * getattr(model, part) for part in _TOGETHER.get(name, (name,))}
        else:
            kernels[name] = KernelRate(factor * kernels[name].peak, kernels[name].half_depth)
    return replace(model, kernels=kernels, **changed)  # type: ignore[arg-type]
