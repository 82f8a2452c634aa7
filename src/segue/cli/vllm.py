"""Serve a model with vLLM and Segue's scheduler: leases, continuations and policies on its engine."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys

from segue.base.errors import SegueError
from segue.policies import make_policy, policy_names


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=["serve"], help="as `vllm serve`, with the flags that the plugin needs")
    command.add_argument("model", metavar="MODEL", help="as vLLM calls it")
    command.add_argument("--policy", metavar="NAME", help=f"who runs, and what is kept: {', '.join(policy_names())}")
    command.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="further flags are vLLM's own")


def run(arguments: argparse.Namespace) -> int:
    from segue.vllm.versions import check_version

    check_version()
    found = shutil.which("vllm", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", ""))))
    if found is None:
        raise SegueError("there is no `vllm` command beside this Python: pip install 'segue[vllm]'")
    os.execv(found, [found, *serve_flags(arguments.model, arguments.policy, arguments.rest)])


def serve_flags(model: str, policy: str | None, rest: list[str]) -> list[str]:
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
    return ["serve", model, *added, *rest]
