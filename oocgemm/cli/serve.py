"""The commands of whoever runs a service: serve and token."""

import os
import stat
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

import click

from oocgemm.cli.process import JSON, print_json, taking
from oocgemm.errors import InputError
from oocgemm.service.transport import default_socket, default_state
from oocgemm.system.text import plain

_STATE = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder of the queue, the logs and the timelines.  [default: ~/.local/state/oocgemm]",
)
_PEM = click.Path(exists=True, path_type=Path)
_SCOPES = ("read", "submit", "admin")
# The file in the state folder with the URL to sign in. It is written if the URL is not printed.
LOGIN = "login-url"


@click.command()
@taking(_STATE)
@click.option(
    "--root",
    "roots",
    multiple=True,
    metavar="NAME=FOLDER:MODE",
    help="A folder that jobs may use, with mode ro or rw, such as data=/srv/data:ro; may be repeated.",
)
@click.option(
    "--socket",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Path of the unix socket, for your user only.  [default: serve.sock in the state folder]",
)
@click.option("--listen", metavar="HOST:PORT", help="Also listen here, such as 127.0.0.1:8642, for tokens.")
@click.option("--allow-remote", is_flag=True, help="Let --listen be reachable from other machines.")
@click.option("--behind-proxy", is_flag=True, help="A proxy in front of --listen ends TLS.")
@click.option("--tls-cert", "certificate", type=_PEM, help="PEM file for TLS.")
@click.option("--tls-key", "key", type=_PEM, help="PEM file for TLS.")
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Host name that requests may use beside --listen.",
)
@click.option("--device-memory", metavar="SIZE", help="Memory per GPU for jobs.  [default: 90% of it]")
@click.option("--host-memory", metavar="SIZE", help="Host memory for jobs.  [default: half of it]")
@click.option("--disk-quota", metavar="SIZE", help="Disk space for running jobs.  [default: what is free]")
@click.option("--share-device", is_flag=True, help="Run several jobs on a GPU at a time if they fit.")
@click.option(
    "--keep-warm",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Keep a process, with its GPU context, for the next job; 0 starts one per job.",
)
@click.option(
    "--max-jobs",
    type=click.IntRange(1),
    default=100_000,
    show_default=True,
    metavar="N",
    help="Unfinished jobs per user.",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "cuda", "host"]),
    default="auto",
    show_default=True,
    help="What computes the jobs.",
)
@click.option(
    "--no-confine",
    "confine",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Do not restrict jobs to the roots by Landlock.",
)
def serve(
    state: Path | None,
    roots: tuple[str, ...],
    socket: Path | None,
    listen: str | None,
    hosts: tuple[str, ...],
    **options: Any,
) -> None:
    """Run a queue of products in front of the GPUs of this machine.

    The server runs until SIGTERM or Ctrl-C. Jobs that are running go on; the next server finds them.

    Example: oocgemm serve --root data=/srv/data:ro --root out=/srv/out:rw
    """
    try:
        from oocgemm.service.http import server
        from oocgemm.service.http.service import Config, make_state, parse_address
    except ImportError as error:
        raise _missing(error) from error
    from oocgemm.cli.display import use_plain_log
    from oocgemm.service.limits import Root

    parsed = [Root.parse(text) for text in roots]
    if len({root.name for root in parsed}) < len(parsed):
        raise InputError("two roots have the same name: give each its own")
    folder = (state or default_state()).expanduser().absolute()
    config = Config(
        state=folder,
        roots={root.name: root for root in parsed},
        socket=socket.absolute() if socket is not None else folder / "serve.sock",
        listen=None if listen is None else parse_address(listen),
        hosts=frozenset(hosts),
        **options,
    )
    make_state(folder)
    use_plain_log()
    server.serve(config, _ready)
    click.echo("the server has stopped; jobs that are running go on")


def _ready(service: Any, addresses: list[str]) -> None:
    devices = ", ".join(f"{each.number}: {each.name}" for each in service.devices)
    click.echo(f"devices: {devices} ({service.backend})")
    for root in service.config.roots.values():
        click.echo(f"root {root.name}: {root.folder} ({'rw' if root.writable else 'ro'})")
    if not service.config.confine:
        click.echo("jobs are not confined to the roots")
    click.echo(f"listening on {addresses[0]}")
    if Path(addresses[0]) != default_socket():
        click.echo(f"for other commands: export OOCGEMM_SERVICE={addresses[0]}")
    for url in addresses[1:]:
        place = service.config.state / LOGIN
        shown = _login(url, place, service.login.code)
        click.echo(f"listening on {url}; sign in once: {shown}")
        service.login.changed = partial(_next_login, url, place)


def _next_login(url: str, place: Path, code: str) -> None:
    with suppress(OSError):  # nobody reads what the server prints
        click.echo(f"to sign in once more: {_login(url, place, code)}")


def _login(url: str, place: Path, code: str) -> str:
    """Return the URL to sign in as an admin; or where it is stored, if others may read what is printed."""
    shown = f"{url}/login?code={code}"
    if _is_private(sys.stdout):
        return shown
    place.unlink(missing_ok=True)
    with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{shown}\n")
    return f"open the URL in {place}"


def _is_private(output: IO[str]) -> bool:
    """Return whether an output is neither a file that others may read, nor the socket of a system log."""
    try:
        mode = os.fstat(output.fileno()).st_mode
    except (OSError, ValueError):
        return True
    return not stat.S_ISSOCK(mode) and not (stat.S_ISREG(mode) and mode & 0o077)


@click.group()
def token() -> None:
    """Make, list and revoke the tokens with which users reach `oocgemm serve --listen`."""


@token.command()
@click.argument("name")
@click.option(
    "--scope", type=click.Choice(_SCOPES), default="submit", show_default=True, help="What its holder may do."
)
@click.option("--days", type=click.FloatRange(0, min_open=True), help="Days until it ends.  [default: never]")
@taking(_STATE, JSON)
def create(name: str, scope: str, days: float | None, state: Path | None, as_json: bool) -> None:
    """Make a token for the user NAME, and print it. It cannot be shown again."""
    from oocgemm.service.http.security import Scope

    with _tokens(state) as tokens:
        expires = None if days is None else time.time() + days * 86400
        made, secret = tokens.create(name, Scope[scope.upper()], expires)
    if as_json:
        print_json(_shown(made) | {"token": secret})
    else:
        click.echo(secret)


@token.command("list")
@taking(_STATE, JSON)
def list_(state: Path | None, as_json: bool) -> None:
    """List the tokens."""
    with _tokens(state) as tokens:
        found = [_shown(each) for each in tokens.list()]
    if as_json:
        print_json({"tokens": found})
        return
    for each in found:
        end = "never ends" if each["expires"] is None else f"ends {time.ctime(each['expires'])}"
        used = "not used" if each["last_used"] is None else f"used {time.ctime(each['last_used'])}"
        click.echo(plain(f"{each['id']}  {each['scope']:6}  {each['name']}  {end}  {used}"))


@token.command()
@click.argument("id_", metavar="ID")
@taking(_STATE)
def revoke(id_: str, state: Path | None) -> None:
    """Make a token invalid."""
    with _tokens(state) as tokens:
        tokens.revoke(id_)
    click.echo(f"revoked {id_}")


def _tokens(state: Path | None) -> Any:
    try:
        from oocgemm.service.http.security import Tokens
        from oocgemm.service.http.service import DATABASE, make_state
    except ImportError as error:
        raise _missing(error) from error
    folder = (state or default_state()).expanduser().absolute()
    make_state(folder)
    return closing(Tokens(folder / DATABASE))


def _missing(error: ImportError) -> InputError:
    return InputError(f"{error.name} is missing: pip install 'oocgemm[service]'")


def _shown(made: Any) -> dict[str, Any]:
    return asdict(made) | {"scope": made.scope.name.lower()}
