"""The states of a running server: list, show, fork, hold, release, save, load, and move a request to another."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from segue.base.config import Environment
from segue.base.errors import InvalidRequest, SegueError

if TYPE_CHECKING:
    from segue.client import Client


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default="http://127.0.0.1:8000", help="default: http://127.0.0.1:8000")
    command.add_argument("--key", help="API key (default: the first of SEGUE_API_KEYS)")
    command.add_argument("--cache-salt", default="", metavar="SALT", help="of the requests whose states are meant")
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True, dest="verb")
    verbs.add_parser("list", help="every state that can be continued")
    verbs.add_parser("saved", help="saved states, by name")
    for name, help in (("show", "one state"), ("release", "give up a hold")):
        verbs.add_parser(name, help=help).add_argument("id", metavar="STATE")
    fork = verbs.add_parser("fork", help="a state of its own from a state's first tokens")
    fork.add_argument("id", metavar="STATE")
    fork.add_argument("--at", type=int, metavar="N", help="tokens to keep (default: all)")
    hold = verbs.add_parser("hold", help="keep a state's KV")
    hold.add_argument("id", metavar="STATE")
    for verb in (fork, hold):
        verb.add_argument("--seconds", type=float, help="default: until it is released")
    save = verbs.add_parser("save", help="write a state to the server's folder")
    save.add_argument("id", metavar="STATE")
    save.add_argument("--name", help="default: the state's id")
    load = verbs.add_parser("load", help="bring a saved state back")
    load.add_argument("name", metavar="NAME")
    move = verbs.add_parser("move", help="let another server go on with a running request, and print the rest")
    move.add_argument("id", metavar="REQUEST")
    move.add_argument("--to", required=True, metavar="URL")


def run(arguments: argparse.Namespace) -> int:
    try:
        import httpx

        from segue.client import Client
    except ImportError as error:
        raise InvalidRequest("remote", "needs httpx: pip install 'segue[client]'") from error
    key = arguments.key or next(iter(Environment.read().api_keys), None)
    try:
        with Client(arguments.url, key) as client:
            if arguments.verb == "move":
                with Client(arguments.to, key) as destination:
                    _move(client, destination, arguments)
            else:
                _print(_ask(client, arguments))
    except httpx.HTTPError as error:
        raise SegueError(f"{arguments.url} does not answer: {error}") from error
    return 0


def _ask(client: Client, arguments: argparse.Namespace) -> Any:
    salt = {"cache_salt": arguments.cache_salt}
    if arguments.verb == "list":
        return client.states(**salt)
    if arguments.verb == "saved":
        return client.saved()
    if arguments.verb == "show":
        return client.state(arguments.id, **salt)
    if arguments.verb == "fork":
        return client.fork(arguments.id, arguments.at, arguments.seconds, **salt)
    if arguments.verb == "hold":
        return client.hold(arguments.id, arguments.seconds, **salt)
    if arguments.verb == "release":
        return client.release(arguments.id, **salt)
    if arguments.verb == "save":
        return f"{client.save(arguments.id, arguments.name, **salt):,} bytes"
    return client.load(arguments.name, **salt)


def _move(client: Client, destination: Client, arguments: argparse.Namespace) -> None:
    for piece in client.move(arguments.id, destination, cache_salt=arguments.cache_salt):
        if isinstance(piece, str):
            print(piece, end="", flush=True)
    print()


def _print(answer: Any) -> None:
    for entry in answer if isinstance(answer, list) else [answer]:
        if isinstance(entry, str):
            print(entry)
            continue
        fields = asdict(entry)
        expires = "until released" if fields["expires_in"] is None else f"{fields['expires_in']:.0f} s"
        held = f"{fields['num_held']} held {expires}" if fields["num_held"] else "none held"
        job = f", job {fields['job_id']}" if fields["job_id"] else ""
        print(f"{fields['id']}  {fields['num_tokens']} tokens, {held}{job}")
