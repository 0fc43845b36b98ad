"""Server-sent events, read over connections that may break."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from oocgemm.service.client.problems import error_of
from oocgemm.service.client.transport import BUSY, LONG_PATIENCE, LOST, Backoff, Transport, retry_after


@dataclass(frozen=True)
class Message:
    """A server-sent event: its ``id:``, ``event:`` and ``data:``. `id` is None if the event has none."""

    id: str | None
    kind: str
    data: str

    def json(self) -> dict[str, Any]:
        """Return the data as an object; an empty one if it is something else."""
        try:
            found = json.loads(self.data)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def parse(lines: Iterable[bytes]) -> Iterator[Message]:
    """Yield the events of a stream. An event that is cut off is left out.

    >>> list(parse([b"id: 3\\n", b"event: running\\n", b"data: {}\\n", b"\\n", b"data: cut"]))
    [Message(id='3', kind='running', data='{}')]
    """
    number, kind, data = None, "message", list[str]()
    for raw in lines:
        line = raw.decode(errors="replace").rstrip("\r\n")
        if not line:
            if data:
                yield Message(number, kind, "\n".join(data))
            number, kind, data = None, "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "id":
                number = value
            case "event":
                kind = value
            case "data":
                data.append(value)


def messages(transport: Transport, path: str, patience: float = LONG_PATIENCE) -> Iterator[Message]:
    """Yield all events of a path, from the first one that is stored. The stream never ends by itself.

    After a lost connection, the stream continues with the event after the last one.

    Args:
        transport: sends the requests.
        path: such as ``/v1/jobs/ID/events``.
        patience: how long to connect again without an event, in seconds.

    Raises:
        UnavailableError: the connection was lost for longer than that.
        OocGemmError: the server refuses the stream.
    """
    last, backoff = "0", Backoff(patience)
    failed: Exception | None = None
    while True:
        pause = 0.0
        headers = {"Accept": "text/event-stream", "Last-Event-ID": last}
        try:
            with transport.open("GET", path, headers=headers) as response:
                if response.status >= 400:
                    failed = error_of(response.status, response.read())
                    if response.status not in BUSY:
                        raise failed
                    pause = retry_after(response.headers)
                else:
                    for message in parse(response):
                        backoff.restart()
                        last = message.id or last
                        yield message
        except LOST as error:
            failed = transport.failure(error)
            if not transport.may_retry(error):
                raise failed from error
        if not backoff.wait(pause):
            raise failed or transport.failure(ConnectionError("the stream of events ends at once"))
