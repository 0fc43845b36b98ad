"""Errors of the service."""

from oocgemm.errors import OocGemmError


class ServiceError(OocGemmError):
    """A request to the service failed."""


class UnknownJobError(ServiceError):
    """There is no job with this id."""


class ConflictError(ServiceError):
    """The state of a job does not allow the request, or another live job writes the same C."""


class StaleError(ConflictError):
    """A job has changed since it was read."""


class KeyReusedError(ServiceError):
    """An Idempotency-Key was used before, with another request."""


class StoreError(ServiceError):
    """The database cannot be read or written."""


class UnavailableError(ServiceError):
    """No server answers, or the server cannot answer now."""


class AccessError(ServiceError):
    """The server does not allow this user, this token or this host name to do that."""


class TooManyJobsError(ServiceError):
    """The user has as many jobs as the service allows."""


class WaitTimeoutError(ServiceError, TimeoutError):
    """A job has not ended in the given time."""
