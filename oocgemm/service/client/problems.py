"""Error responses (RFC 9457) as exceptions."""

import json
from typing import Any

from oocgemm.errors import BudgetError, InputError, OocGemmError
from oocgemm.service.errors import (
    AccessError,
    ConflictError,
    KeyReusedError,
    ServiceError,
    StaleError,
    TooManyJobsError,
    UnavailableError,
    UnknownJobError,
)

# The last part of a problem's type -> the exception. `ServiceError` stands for all others.
ERRORS: dict[str, type[OocGemmError]] = {
    **dict.fromkeys(("invalid-request", "path-refused", "too-large"), InputError),
    **dict.fromkeys(("unauthorized", "forbidden", "host-refused", "cross-site"), AccessError),
    "not-found": UnknownJobError,
    "conflict": ConflictError,
    "stale": StaleError,
    "key-reused": KeyReusedError,
    "too-many-jobs": TooManyJobsError,
    **dict.fromkeys(("unavailable", "too-slow"), UnavailableError),
}
# For problems whose detail addresses users of a browser.
MESSAGES = {
    "unauthorized": "the token is missing, wrong, revoked or has expired: set $OOCGEMM_TOKEN, or pass "
    "token=, to one that oocgemm token create has made"
}


def error_of(status: int, body: bytes) -> OocGemmError:
    """Return the exception for a response.

    Args:
        status: the HTTP status, 400 or above.
        body: the body of the response. One that is no problem document becomes a `ServiceError`.
    """
    problem = _problem(body)
    slug = str(problem.get("type", "")).rpartition("/")[2]
    message = MESSAGES.get(slug) or str(problem.get("detail") or problem.get("title") or "")
    if not message:
        message = (
            f"the server answered with HTTP status {status}: see that the address is that of oocgemm serve"
        )
    if slug == "budget-too-small":
        smallest = problem.get("smallest")
        needed = None
        if isinstance(smallest, dict) and {"device_memory", "host_memory"} <= smallest.keys():
            needed = int(smallest["device_memory"]), int(smallest["host_memory"])
        return BudgetError(message, needed=needed)
    default = UnavailableError if status in (502, 503, 504) else ServiceError
    return ERRORS.get(slug, default)(message)


def _problem(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
