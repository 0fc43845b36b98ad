"""The machine: its devices and what jobs reserve of them, health, and metrics."""

from collections.abc import Iterator

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oocgemm.service.errors import AccessError
from oocgemm.service.http.identity import Scope
from oocgemm.service.http.requests import Shared, User
from oocgemm.service.http.service import Service
from oocgemm.service.http.views import (
    DevicesView,
    DeviceView,
    DiskView,
    DrainBody,
    DrainView,
    HealthView,
    HostView,
    RootsView,
    RootView,
    UserView,
)


def routes() -> APIRouter:
    """Return the routes of the machine."""
    router = APIRouter(tags=["machine"])

    @router.get("/v1/devices")
    def get_devices(service: Shared) -> DevicesView:
        """Return the devices, and what the running jobs reserve."""
        return devices(service)

    @router.get("/v1/roots")
    def get_roots(service: Shared, user: User) -> RootsView:
        """Return the folders of operands and results. Users of the unix socket see where they lie."""
        found = [
            RootView(name=root.name, folder=str(root.folder) if user.local else None, writable=root.writable)
            for root in service.roots.values()
        ]
        return RootsView(roots=found)

    @router.get("/v1/user")
    def get_user(user: User) -> UserView:
        """Return who sends the request."""
        return UserView.model_validate({"name": user.name, "scope": user.scope.name.lower()})

    @router.post("/v1/drain")
    def drain(body: DrainBody, service: Shared, user: User) -> DrainView:
        """Start no more jobs, or start jobs again. Running jobs go on."""
        if user.scope < Scope.ADMIN:
            raise AccessError("only an admin may drain the service: use a token with the scope admin")
        service.dispatcher.draining = body.draining
        return DrainView(draining=body.draining)

    @router.get("/livez")
    async def live() -> HealthView:
        """Answer while the server works."""
        return HealthView(status="ok")

    @router.get("/readyz", responses={503: {"model": HealthView}})
    def ready(service: Shared, response: Response) -> HealthView:
        """Say whether the database can be written and there is disk space."""
        found = service.problems()
        response.status_code = 503 if found else 200
        return HealthView(status="unavailable" if found else "ok", problems=found)

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics(service: Shared) -> Response:
        """Return the metrics for Prometheus."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Figures(service))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def devices(service: Service) -> DevicesView:
    """Return the devices, and what the running jobs reserve."""
    limits, active, warm = service.limits(), service.store.active(), service.dispatcher.workers.warm
    shown = []
    for device in service.devices:
        jobs = [job for job in active if job.device == device.number]
        shown.append(
            DeviceView(
                index=device.number,
                name=device.name,
                state="running" if jobs else "warm" if device.number in warm else "idle",
                memory=limits.devices.get(device.number, 0),
                reserved=sum(job.need.device for job in jobs),
                jobs=[job.id for job in jobs],
            )
        )
    return DevicesView(
        devices=shown,
        host=HostView(memory=limits.host, reserved=sum(job.need.host for job in active)),
        disk=DiskView(quota=limits.disk, reserved=sum(job.need.disk for job in active)),
        draining=service.dispatcher.draining,
    )


class _Figures(Collector):
    """The metrics of a service, computed when they are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        states = GaugeMetricFamily("oocgemm_jobs", "Jobs by state.", labels=["state"])
        for state, number in service.store.counts().items():
            states.add_metric([state], number)
        yield states
        found = devices(service)
        for name, what, of in (
            ("memory", "Memory for jobs", "memory"),
            ("reserved", "Memory that the running jobs reserve", "reserved"),
        ):
            family = GaugeMetricFamily(
                f"oocgemm_device_{name}_bytes", f"{what}, per device.", labels=["device"]
            )
            for device in found.devices:
                family.add_metric([str(device.index)], getattr(device, of))
            yield family
            yield GaugeMetricFamily(
                f"oocgemm_host_{name}_bytes", f"{what}, of the host.", getattr(found.host, of)
            )
        yield GaugeMetricFamily("oocgemm_disk_quota_bytes", "Disk space for results.", found.disk.quota)
        yield GaugeMetricFamily("oocgemm_disk_reserved_bytes", "Of it, reserved.", found.disk.reserved)
        usage = CounterMetricFamily("oocgemm_events", "Changes of jobs since the state folder was created.")
        usage.add_metric([], service.store.newest())
        yield usage
