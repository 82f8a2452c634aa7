"""Continue one or more prompts, batched together."""

from __future__ import annotations

import argparse
import sys

from segue.cli.options import add_engine_options, add_sampling_options, open_engine, sampling_params


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue (default: standard input)")
    command.add_argument("-n", type=int, default=1, metavar="N", help="answers per prompt")
    command.add_argument("--chat", action="store_true", help="treat each prompt as a user's message")
    add_sampling_options(command, max_tokens=64, temperature=0.0)
    add_engine_options(command)


def run(arguments: argparse.Namespace) -> int:
    params = sampling_params(arguments, n=arguments.n)
    prompts = arguments.prompts or [sys.stdin.read()]
    with open_engine(arguments) as engine:
        ready = (
            [engine.chat_prompt([{"role": "user", "content": text}]) for text in prompts] if arguments.chat else prompts
        )
        if len(ready) == 1 and arguments.n == 1:
            for delta in engine.stream(ready[0], params):
                print(delta.text, end="", flush=True)
            print()
            return 0
        for prompt, result in zip(prompts, engine.generate(ready, params), strict=True):
            for completion in result.completions:
                print(f"--- {prompt!r} [{completion.index}] ({completion.finish_reason})\n{completion.text}")
    return 0
