"""Run a plan that was made earlier."""

from dataclasses import replace

from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Layouts, MachineModel, Plan


def as_planned(planned: Plan, problem: GemmProblem, machine: MachineModel, layouts: Layouts) -> Plan:
    """Return an earlier plan, with the present machine model and layouts.

    Raises `InputError` if the product or the layouts of its operands have changed since it was planned.
    """
    before = planned.layouts
    layouts = layouts.cached_as(before.a.page_cached, before.b.page_cached)
    now = replace(planned, machine=machine, layouts=layouts)

    def operands(found: Layouts) -> tuple[object, ...]:
        # `pinned` is not compared: the caller may have pinned or unpinned the memory since planning.
        a, b = (layout.in_run(in_place=True, pinned=False) for layout in (found.a, found.b))
        return a, b, found.codings.a, found.codings.b

    if (problem, operands(layouts), now.chunks) != (
        *(planned.problem, operands(planned.layouts), planned.chunks),
    ):
        raise InputError(
            "A, B or C have other shapes, dtypes or chunks than at planning time: call oocgemm.plan again"
        )
    return now
