"""The simulator: fit it to an engine of this machine, or simulate a fleet."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from segue.base.errors import InvalidRequest
from segue.cli import fleet
from segue.cli.options import add_engine_options, open_engine


def add_arguments(command: argparse.ArgumentParser) -> None:
    verbs = command.add_subparsers(dest="verb", metavar="VERB", required=True)
    calibrate = verbs.add_parser("calibrate", help="measure an engine's steps, and fit the cost model to them")
    add_engine_options(calibrate)
    calibrate.add_argument("--rounds", type=int, default=3, metavar="N", help="of steps of all sizes (default: 3)")
    calibrate.add_argument("--out", type=Path, metavar="FILE", help="where the coefficients go, for --calibration")
    fleet.add_arguments(verbs.add_parser("fleet", help="many engines behind a router"))


def run(arguments: argparse.Namespace) -> int:
    return fleet.run(arguments) if arguments.verb == "fleet" else _calibrate(arguments)


def _calibrate(arguments: argparse.Namespace) -> int:
    from segue.bench.local import LOCAL, calibrate, costs_of
    from segue.sim.fitting import Calibration

    if arguments.rounds < 1:
        raise InvalidRequest("rounds", f"must be at least 1, got {arguments.rounds}")
    with open_engine(arguments) as engine:
        found = calibrate(engine, rounds=arguments.rounds)
        calibration = Calibration(LOCAL, costs_of(engine).shape, found.coefficients)
    about = {
        "steps": found.num_steps,
        "mean_error": round(found.mean_error, 4),
        "scaled": round(found.scaled, 4),
    }
    text = json.dumps(about | calibration.to_json(), indent=2)
    if arguments.out is not None:
        try:
            arguments.out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest("out", f"{arguments.out} cannot be written: {error}") from error
    print(text)
    return 0
