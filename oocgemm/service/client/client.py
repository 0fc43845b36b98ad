"""The client: submits jobs to a service, and finds them again."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any
from urllib.parse import quote, urlencode
from uuid import uuid4

from oocgemm.service.client.address import TOKEN, Address
from oocgemm.service.client.job import Job
from oocgemm.service.client.operands import is_local, operand, plain_options
from oocgemm.service.client.transport import Transport

# Jobs per page of a list.
PAGE = 100
_Path = str | os.PathLike[str]


class Client:
    """Submits products to a service, and finds its jobs.

    Args:
        url: the address of the server: ``http://HOST:PORT``, ``https://HOST:PORT``, or the path of a unix
            socket. By default $OOCGEMM_SERVICE, or else the socket in the default state folder.
        token: the secret of ``oocgemm token create``, which a server at a URL asks for. By default
            $OOCGEMM_TOKEN.

    All methods raise `OocGemmError`: for example `InputError` for a request that the server refuses,
    `BudgetError` if a memory budget is too small, and `UnavailableError` if no server answers. A request
    whose connection is lost is repeated for up to 60 s. It is never carried out twice.

    One client may be used by several threads.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._transport = Transport(Address.parse(url), token or os.environ.get(TOKEN))

    def submit(
        self,
        a: _Path,
        b: _Path,
        c: _Path,
        *,
        name: str = "",
        priority: int = 0,
        deadline: float | datetime | None = None,
        needs: Sequence[Job | str] = (),
        held: bool = False,
        **options: Any,
    ) -> Job:
        """Submit a product, and return its job.

        Args:
            a, b, c: arrays, as ``root:path`` or as a local path beneath a root of the service.
            name: what the job is called in lists.
            priority: jobs with a higher one start first.
            deadline: the job fails if it has not succeeded by then. A number is in seconds since 1970.
            needs: jobs, or their ids, that must succeed before.
            held: do not start the job before it is released.
            **options: those of `oocgemm.gemm` that say what is computed, such as ``alpha``, ``trans_a``,
                ``device_memory`` and ``overwrite``. The server chooses backend, device and default budgets.
        """
        given = {"name": name, "priority": priority, "deadline": deadline, "needs": needs, "held": held}
        body = self._body({"a": a, "b": b, "c": c} | given | options, self._roots((a, b, c)))
        return Job(self._transport, self._post("/v1/jobs", body))

    def plan(self, a: _Path, b: _Path, c: _Path, **options: Any) -> dict[str, Any]:
        """Return what would happen if a product were submitted. Nothing is stored.

        Args:
            a, b, c: as for `submit`.
            **options: as for `submit`.

        Returns:
            The ``plan``; ``device_bytes``, ``host_bytes`` and ``disk_bytes`` that the job would occupy; the
            predicted time ``predicted_s``, in seconds; and ``predicted_start``, in seconds since 1970.
        """
        body = self._body({"a": a, "b": b, "c": c} | options, self._roots((a, b, c)))
        found: dict[str, Any] = self._transport.call("POST", "/v1/jobs?dry_run=1", body).json()
        return found

    def map(self, products: Iterable[Sequence[_Path] | Mapping[str, Any]], **options: Any) -> list[Job]:
        """Submit several products, all or none, and return their jobs in the same order.

        Args:
            products: each is ``(a, b, c)``, or a dict of arguments of `submit`. A job may need an earlier one
                of the same call by ``needs=["#0"]``, ``["#1"]`` and so on. At most 1000.
            **options: arguments of `submit` for all of them.
        """
        listed = [
            dict(each) if isinstance(each, Mapping) else dict(zip("abc", each, strict=True))
            for each in products
        ]
        roots = self._roots([each.get(name) for each in listed for name in "abc"])
        body = {"jobs": [self._body(options | each, roots) for each in listed]}
        return [Job(self._transport, info) for info in self._post("/v1/batches", body)["jobs"]]

    def job(self, id: str) -> Job:  # noqa: A002
        """Return a job by its id.

        Raises:
            UnknownJobError: there is no such job.
        """
        return Job(self._transport, self._transport.call("GET", f"/v1/jobs/{quote(id, safe='')}").json())

    def jobs(
        self, states: Collection[str] = (), owner: str | None = None, limit: int | None = None
    ) -> Iterator[Job]:
        """Yield jobs from the newest to the oldest.

        Args:
            states: only jobs in one of these states, such as ``["queued", "running"]``; all if empty.
            owner: only jobs of this user.
            limit: the maximum number of jobs.
        """
        query = [("state", str(state)) for state in states]
        query += [("owner", owner)] if owner is not None else []
        return islice(self._pages([*query, ("limit", str(min(limit or PAGE, PAGE)))]), limit)

    def _pages(self, query: list[tuple[str, str]]) -> Iterator[Job]:
        """Yield the jobs of all pages of a list."""
        cursor: list[tuple[str, str]] = []
        while True:
            page = self._transport.call("GET", f"/v1/jobs?{urlencode(query + cursor)}").json()
            for info in page["jobs"]:
                yield Job(self._transport, info)
            if not page["next"]:
                return
            cursor = [("cursor", page["next"])]

    def devices(self) -> dict[str, Any]:
        """Return the devices of the service, with the memory that its jobs reserve.

        Returns:
            ``devices``, each with ``index``, ``name``, ``state`` ("idle", "warm" or "running"), ``memory``,
            ``reserved`` (bytes) and ``jobs``; the
            same of ``host`` and ``disk``; and ``draining``.
        """
        found: dict[str, Any] = self._transport.call("GET", "/v1/devices").json()
        return found

    def _post(self, path: str, body: object) -> Any:
        """Submit something once, however often the request must be sent."""
        return self._transport.call("POST", path, body, headers={"Idempotency-Key": str(uuid4())}).json()

    def _roots(self, paths: Iterable[object]) -> list[dict[str, Any]] | None:
        """Return the roots of the service if a path needs them; None if the server is at a URL."""
        if self._transport.address.path is None:
            return None
        if not any(isinstance(path, str | os.PathLike) and is_local(path) for path in paths):
            return []
        found: list[dict[str, Any]] = self._transport.call("GET", "/v1/roots").json()["roots"]
        return found

    @staticmethod
    def _body(given: Mapping[str, Any], roots: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Return the description of a job as the server takes it."""
        body: dict[str, Any] = {}
        rest = dict(given)
        for name in "abc":
            body[name] = operand(name, rest.pop(name, None), roots)
        for name in ("name", "priority", "held"):
            if name in rest:
                body[name] = rest.pop(name)
        if (deadline := rest.pop("deadline", None)) is not None:
            body["deadline"] = deadline.timestamp() if isinstance(deadline, datetime) else deadline
        body["needs"] = [each.id if isinstance(each, Job) else each for each in rest.pop("needs", ())]
        return body | {"options": plain_options(rest)}
