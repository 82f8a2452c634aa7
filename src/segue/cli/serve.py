"""Serve a model over HTTP: OpenAI's API, and states that can be continued, forked, held, saved and loaded."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        _apply_config(arguments)
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
    body = json.dumps({"model": service.name, "messages": [{"role": "user", "content": "Say hello."}]})
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


def _apply_config(arguments: argparse.Namespace) -> None:
    """A flag that was given goes before the file; which were is found by comparing with the defaults."""
    try:
        given: dict[str, Any] = tomllib.loads(arguments.config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest("config", f"{arguments.config} cannot be read: {error}") from error
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    for name, value in given.items():
        option = name.replace("-", "_")
        if option not in defaults or option == "config":
            raise InvalidRequest("config", f"{name!r} in {arguments.config} is not an option of `segue serve`")
        kind = type(defaults[option])
        if defaults[option] is not None and type(value) is not kind:
            raise InvalidRequest("config", f"{name} in {arguments.config} must be {kind.__name__}, got {value!r}")
        if getattr(arguments, option) == defaults[option]:
            setattr(
                arguments,
                option,
                Path(value) if option in ("keys", "state_dir", "policy_state", "policy_model") else value,
            )
