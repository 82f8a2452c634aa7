"""Judge policies on recorded tool calls, and train what `context_serve` can use."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from segue.base.errors import InvalidRequest
from segue.policies.evaluate import BENEFITS, judge, read_trace
from segue.policies.learned import write_json


def add_arguments(command: argparse.ArgumentParser) -> None:
    verbs = command.add_subparsers(dest="verb", metavar="VERB", required=True)
    evaluate = verbs.add_parser("evaluate", help="each rule's share of what an oracle would gain by keeping KV")
    evaluate.add_argument(
        "--benefit",
        default=",".join(f"{benefit:g}" for benefit in BENEFITS),
        metavar="SECONDS,…",
        help="what finding its KV is worth to a job (default: %(default)s)",
    )
    evaluate.add_argument("--json", action="store_true", help="as JSON")
    train = verbs.add_parser("train", help="a model of how long commands take, for `serve --policy context_serve`")
    train.add_argument("--out", type=Path, required=True, metavar="FILE", help="for `serve --policy-model`")
    for verb in (evaluate, train):
        verb.add_argument("--trace", type=Path, required=True, metavar="FILE", help="CSV with run, tool, dur and cmd")


def run(arguments: argparse.Namespace) -> int:
    return _train(arguments) if arguments.verb == "train" else _evaluate(arguments)


def _train(arguments: argparse.Namespace) -> int:
    from segue.policies.training import train

    trained = train(read_trace(arguments.trace))
    try:
        write_json(arguments.out, trained.trees.to_json())
    except OSError as error:
        raise InvalidRequest("out", f"{arguments.out} cannot be written: {error}") from error
    print(f"{trained.num_calls:,} calls of {trained.num_runs:,} runs. Of calls in runs it had not seen, it takes")
    for name, (count, right) in (("fast", trained.fast), ("slow", trained.slow)):
        share = f", {right / count:.1%} of them rightly" if count else ""
        print(f"  {count / trained.num_calls:6.1%} for {name}{share}")
    print(f"and is uncertain of the rest. Its typical error is a factor of {math.exp(trained.trees.sigma):.1f}.")
    print(f"Use it: segue serve --policy context_serve --policy-model {arguments.out}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    try:
        benefits = [float(part) for part in arguments.benefit.split(",")]
    except ValueError:
        benefits = []
    if not benefits or not all(0 < benefit < 1e6 for benefit in benefits):
        raise InvalidRequest("benefit", f"must be seconds over 0, separated by commas, got {arguments.benefit!r:.60}")
    records = read_trace(arguments.trace)
    shares = judge(records, benefits)
    if arguments.json:
        print(json.dumps({"num_calls": len(records), "benefits": benefits, "shares": shares}))
        return 0
    print(f"{len(records):,} calls of {len({record.run for record in records}):,} runs; share of the oracle's utility:")
    print(f"{'benefit, s':20}" + "".join(f"{benefit:>8g}" for benefit in benefits) + f"{'mean':>8}")
    for name, values in {**shares, "oracle": [1.0] * len(benefits)}.items():
        print(f"{name:20}" + "".join(f"{value:8.3f}" for value in [*values, sum(values) / len(values)]))
    return 0
