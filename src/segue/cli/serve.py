"""Serve a model over HTTP: OpenAI's API, and states that can be continued, forked, held, saved and loaded."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from segue.base.config import Environment
from segue.base.errors import InvalidRequest
from segue.cli.options import add_engine_options, engine_options
from segue.cli.progress import FetchProgress
from segue.kv.tiers.specs import parse_tiers
from segue.policies import make_policy, policy_names

if TYPE_CHECKING:
    from segue.server.service import Service

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", default="smollm2", metavar="MODEL", help="as --model elsewhere")
    group = command.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    group.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any free one")
    group.add_argument("--config", type=Path, metavar="FILE", help="options from a TOML file; flags go first")
    group.add_argument("--served-name", metavar="NAME", help="what clients call the model")
    group.add_argument("--keys", type=Path, metavar="FILE", help="API keys and limits: TOML, one [[tenant]] each")
    group.add_argument("--public", action="store_true", help="listen beyond this machine although there are no keys")
    group.add_argument("--state-dir", type=Path, metavar="FOLDER", help="where saved states go")
    group.add_argument("--policy", metavar="NAME", help=f"who runs, and what is kept: {', '.join(policy_names())}")
    group.add_argument("--policy-state", type=Path, metavar="FILE", help="what the policy learns, kept over restarts")
    group.add_argument("--policy-model", type=Path, metavar="FILE", help="of `segue policies train`, for context_serve")
    group.add_argument(
        "--catalogue", dest="catalogues", action="append", default=[], metavar="NAME=FILE",
        help="items that searches can be limited to: JSON, CSV, or compiled by `segue catalogue`; may be repeated",
    )  # fmt: skip
    group.add_argument("--max-requests", type=int, metavar="N", help="under way at once (default: 1024)")
    group.add_argument("--head-seconds", type=float, metavar="S", help="for a request's head to come (default: 10)")
    group.add_argument("--vllm-metrics", action="store_true", help="metrics under vLLM's names as well")
    group.add_argument("--otlp", metavar="URL", help="send traces to an OpenTelemetry collector (default: no traces)")
    group.add_argument("--quiet", action="store_true", help="no line for each request")
    add_engine_options(command, model=False)


def run(arguments: argparse.Namespace) -> int:
    if arguments.config is not None:
        arguments = _with_file(arguments)
    try:
        from segue.server.app import create_app
        from segue.server.metrics import Metrics
        from segue.server.remote_engine import RemoteEngine
        from segue.server.runner import Server
        from segue.server.service import Limits, Service
        from segue.server.tenants import read_tenants
        from segue.server.tracing import Traced, otlp_tracer
    except ImportError as error:
        raise InvalidRequest("serve", f"needs the server's packages: pip install 'segue[server]' ({error})") from error
    from segue.model.loading import open_model

    policy = make_policy(arguments.policy)  # what is not known is refused before anything is loaded
    if arguments.policy_model is not None:
        policy.use_model(arguments.policy_model)
    parse_tiers(arguments.tiers)
    catalogues = _catalogue_files(arguments.catalogues)
    environment = Environment.read()
    tenants = read_tenants(arguments.keys, environment.api_keys)
    if tenants.open_to_all and arguments.host not in _LOOPBACK and not arguments.public:
        raise InvalidRequest("host", f"{arguments.host} is open to others: give --keys, or say --public")
    _configure_log(quiet=arguments.quiet)
    tracer = None if arguments.otlp is None else otlp_tracer(arguments.otlp)
    with FetchProgress(f"Fetching {arguments.model}") as progress:
        model = open_model(arguments.model, environment.cache_dir, progress=progress)
    given = {name: getattr(arguments, name) for name in ("max_requests", "head_seconds")}
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    if not limits.head_seconds > 0:
        raise InvalidRequest("head_seconds", f"must be over 0, got {limits.head_seconds}")
    service = Service(
        model,
        RemoteEngine(
            arguments.model,
            engine_options(arguments),
            policy=arguments.policy,
            policy_state=arguments.policy_state,
            policy_model=arguments.policy_model,
            catalogues=catalogues,
        ),
        tenants,
        Metrics(vllm_names=arguments.vllm_metrics),
        limits=limits,
        served_name=arguments.served_name,
        state_dir=arguments.state_dir,
    )
    app = create_app(service)
    if tracer is not None:
        app.add_middleware(Traced, tracer=tracer)
    return Server(
        app, service, arguments.host, arguments.port, lambda port: _greet(service, arguments.host, port)
    ).run()


def _catalogue_files(texts: list[str]) -> dict[str, str]:
    files = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise InvalidRequest("catalogue", f"{text!r:.60} is not NAME=FILE")
        if not Path(path).is_file():
            raise InvalidRequest("catalogue", f"there is no file {path}")
        files[name] = str(Path(path).absolute())
    return files


def _greet(service: Service, host: str, port: int) -> None:
    """Where it listens, and a line to try."""
    if (ready := service.engine.ready) is not None:
        print(f"{service.name}: {ready.backend}\n{ready.budget}", file=sys.stderr)
    place = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    hello = [{"role": "user", "content": "Say hello."}]
    body = json.dumps({"model": service.name, "max_tokens": 60, "messages": hello})  # small models ramble
    key = "" if service.tenants.open_to_all else " -H 'Authorization: Bearer KEY'"
    print(
        f"Serving at {place}. Try it:\n"
        f"  curl {place}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        flush=True,
    )


def _configure_log(*, quiet: bool) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if quiet:
        logging.getLogger("segue.access").setLevel(logging.WARNING)


def _with_file(arguments: argparse.Namespace) -> argparse.Namespace:
    """What the command line gives goes before the file, even where it says what is the default anyway."""
    chosen = vars(arguments) | _read_config(arguments.config) | _given(arguments.words)
    return argparse.Namespace(**chosen)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        entries: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest("config", f"{path} cannot be read: {error}") from error
    found: dict[str, Any] = {}
    for name, value in entries.items():
        try:
            found |= _entry(name, value)
        except ValueError as error:
            raise InvalidRequest("config", f"{name!r} in {path}: {error}") from error
    return found


def _entry(name: str, value: Any) -> dict[str, Any]:
    """One entry of the file, read as the flag of its name would be: the same values are taken, and the same refused."""
    flag, default = f"--{name.replace('_', '-')}", _defaults().get(name.replace("-", "_"))
    if name == "config":
        raise ValueError("a file does not name another")
    if isinstance(value, bool):
        if not isinstance(default, bool):
            raise ValueError("is no option that is true or false")
        return _named([flag if value else flag.replace("--", "--no-", 1)] if value is not default else [])
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in values):
        raise ValueError("must be text, a number, or a list of them")
    found = _named([str(value)] if name == "model" else [f"{flag}={each}" for each in values or [""]])
    if not isinstance(value, list):
        return found
    if not all(isinstance(made, list) for made in found.values()):
        raise ValueError("is not a list")
    return {option: made[: len(value)] for option, made in found.items()}


def _named(words: Sequence[str]) -> dict[str, Any]:
    return _given(words, allow_abbrev=False)


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _given(words: Sequence[str], **rules: Any) -> dict[str, Any]:
    """The options that these words give, and no others."""
    parser = _Words(add_help=False, **rules)
    add_arguments(parser)
    parser.set_defaults(**dict.fromkeys(_defaults()))
    return {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}


def _defaults() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return vars(parser.parse_args([]))
