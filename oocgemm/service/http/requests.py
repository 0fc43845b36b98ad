"""What routes take from a request beside its content."""

from typing import Annotated

from fastapi import Depends, Request

from oocgemm.service.http.identity import Identity
from oocgemm.service.http.service import Service

# What anyone may read. The page has no data of its own.
OPEN = frozenset({"/", "/livez", "/readyz", "/login"})


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


def _user(request: Request) -> Identity:
    found: Identity = request.scope["identity"]
    return found


# The service, and who sends the request (`security.Guard` finds that out).
Shared = Annotated[Service, Depends(_service)]
User = Annotated[Identity, Depends(_user)]
