"""Who sends a request, and what they may do."""

import os
import pwd
from dataclasses import dataclass
from enum import IntEnum

from oocgemm.service.errors import AccessError
from oocgemm.service.schema import Job


class Scope(IntEnum):
    """What a user may do. Each scope includes the ones before."""

    READ = 1
    SUBMIT = 2
    ADMIN = 3


@dataclass(frozen=True)
class Identity:
    """A user: the owner of the jobs that they submit. `local` users have connected to the unix socket.

    `token` is the id of the token with which they have identified themselves.
    """

    name: str
    scope: Scope
    local: bool = False
    token: str | None = None

    def may_change(self, job: Job) -> bool:
        """Return whether the user may change a job: their own, or any as an admin."""
        return self.scope >= Scope.ADMIN or (self.scope >= Scope.SUBMIT and job.owner == self.name)

    def check_change(self, job: Job) -> None:
        """Raise `AccessError` if the user may not change a job."""
        if not self.may_change(job):
            raise AccessError(
                f"job {job.id} belongs to {job.owner}, and you are {self.name}: ask its owner, or use a "
                "token with the scope admin"
            )


def own_name() -> str:
    """Return the name of the user of this process; the number if it has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
