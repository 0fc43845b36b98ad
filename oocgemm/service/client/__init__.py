"""The client of the service, with the standard library only.

- `address`: where the server listens.
- `transport`: sends requests, and repeats them when an answer is lost.
- `problems`: turns error responses into exceptions.
- `stream`: reads server-sent events.
- `operands`: turns paths and options into what the service takes.
- `client`, `job`: what users call.
"""

from oocgemm.service.client.client import Client
from oocgemm.service.client.job import Job, Progress

__all__ = ["Client", "Job", "Progress"]
