"""A command that asks a running server something."""

from __future__ import annotations

import argparse
from typing import Any

from segue.base.config import Environment
from segue.base.errors import SegueError


def add_server_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="default: http://127.0.0.1:8000")
    command.add_argument("--key", help="API key (default: the first of SEGUE_API_KEYS)")


def ask(arguments: argparse.Namespace, method: str, path: str, **options: Any) -> Any:
    """What it answers; an error says why it does not."""
    try:
        import httpx
    except ImportError as error:
        raise SegueError("this needs httpx: pip install 'segue[client]'") from error
    key = arguments.key or next(iter(Environment.read().api_keys), None)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.request(method, f"{arguments.url}{path}", headers=headers, timeout=30, **options)
    except httpx.HTTPError as error:
        raise SegueError(f"{arguments.url} does not answer: {error}") from error
    if response.status_code != 200:
        raise SegueError(f"{arguments.url} answers {response.status_code}: {response.text[:300]}")
    return response.json()
