"""Play a workload in the simulator, on an engine in this process, or against a server, and say what came of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from segue.base.errors import InvalidRequest
from segue.cli import two_stage

if TYPE_CHECKING:
    from segue.bench.sweep import Load

_COLUMNS = (
    ("mean s", "avg_duration_s"),
    ("p90 s", "p90_duration_s"),
    ("p95 s", "p95_duration_s"),
    ("TTFT s", "ttft_avg_s"),
    ("computed again", "recompute_ratio"),
    ("preempted", "preemptions"),
    ("jobs", "jobs"),
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    verbs = command.add_subparsers(dest="verb", metavar="WORKLOAD", required=True)
    agents = verbs.add_parser("agents", help="jobs of eight turns with tools in between")
    agents.add_argument("--prompt-tokens", metavar="LIST", help="of each turn, with all that was said before")
    agents.add_argument("--output-tokens", metavar="LIST", help="of each turn's answer")
    agents.add_argument("--gap-scale", type=float, default=1.0, metavar="X", help="of the tools' times (default: 1)")
    agents.add_argument("--usual", type=float, metavar="P", help="chance of an answer that other jobs got too")
    verbs.add_parser("chat", help="people who read and type")
    verbs.add_parser("shared-prefix", help="single requests under one of a few long prompts")
    verbs.add_parser("stages", help="think, then search: as two turns, without a task's items (two-stage has them)")
    replay = verbs.add_parser("replay", help="a recorded trace")
    replay.add_argument(
        "trace", type=Path, metavar="FILE", help="sessions, programs, Mooncake's or Azure's, gzipped or not"
    )
    replay.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="of the gaps between turns")
    for name, verb in verbs.choices.items():
        _add_common(verb)
        verb.set_defaults(kind="two-stage" if name == "stages" else name)
    two = verbs.add_parser("two-stage", help=two_stage.__doc__)
    two_stage.add_arguments(two)


def _add_common(verb: argparse.ArgumentParser) -> None:
    load = verb.add_argument_group("load")
    load.add_argument("--jps", default=None, metavar="LIST", help="jobs a second, several after commas (default: 2)")
    load.add_argument("--seconds", type=float, default=90.0, metavar="S", help="that jobs arrive for (default: 90)")
    load.add_argument("--arrivals", default="poisson", choices=["poisson", "bursty", "even"])
    load.add_argument("--concurrency", type=int, metavar="N", help="a closed loop: so many jobs at once")
    load.add_argument("--limit", type=int, metavar="N", help="the first so many jobs")
    load.add_argument("--seeds", default="0", metavar="LIST", help="of the workload; one run each (default: 0)")
    what = verb.add_argument_group("what serves it")
    what.add_argument("--policy", default="fcfs,continuum,adaptive", metavar="LIST",
        help="policies; POLICY+tiers has the tiers of --tier; also fixed-2s and oracle")  # fmt: skip
    what.add_argument("--tier", dest="tiers", action="append", default=[], metavar="TIER", help="such as host=64GiB")
    what.add_argument("--gpu", default="rtx5090", metavar="LIST", help="simulated devices (default: rtx5090)")
    what.add_argument("--engine", metavar="MODEL", help="no simulation: an engine in this process, in real time")
    what.add_argument("--url", metavar="URL", help="no simulation: this server, whose policy is its own")
    what.add_argument("--other", action="store_true", help="that server is not Segue: it knows no jobs")
    what.add_argument("--model", default="llama-3.1-8b", metavar="MODEL", help="simulated: a name or a config.json")
    what.add_argument("--blocks", type=int, metavar="N", help="of KV (default: what fits beside the model)")
    what.add_argument(
        "--max-model-len", type=int, default=32768, metavar="N", help="simulated; a trace's longer jobs are left out"
    )
    what.add_argument(
        "--utilization", type=float, default=0.9, metavar="P", help="of the device's memory (default: .9)"
    )
    what.add_argument(
        "--calibration", type=Path, metavar="FILE", help="the device and model that `segue sim calibrate` measured"
    )
    out = verb.add_argument_group("results")
    out.add_argument("--out", type=Path, metavar="FILE", help="add JSON lines to it")
    out.add_argument("--trace-out", type=Path, metavar="FILE", help="every turn, and what blocks are for over time")
    out.add_argument("--workers", type=int, default=1, metavar="N", help="simulations at once (default: 1)")
    out.add_argument("--json", action="store_true", help="as JSON lines instead of a table")


def run(arguments: argparse.Namespace) -> int:
    if arguments.verb == "two-stage":
        return two_stage.run(arguments)
    from segue.bench.records import provenance, write_lines

    if arguments.engine is not None and arguments.url is not None:
        raise InvalidRequest("engine", "and a URL: a workload is played on one of them")
    play = _served if arguments.url is not None else _local if arguments.engine is not None else _simulated
    made_with = provenance()
    records = []
    for file in (arguments.out, arguments.trace_out):
        if file is not None:
            write_lines(file, ())  # what cannot be written is better known now
    with _bar() as done:
        for record, trace in play(arguments, done):
            record |= made_with
            records.append(record)
            if arguments.out is not None:
                write_lines(arguments.out, [record])
            if arguments.trace_out is not None:
                write_lines(arguments.trace_out, trace)
    if arguments.json:
        for record in records:
            print(json.dumps(record))
    else:
        _print_table(records)
    return 0


Results = Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]
Done = Callable[[int, int], None]


def _simulated(arguments: argparse.Namespace, done: Done) -> Results:
    from segue.bench.sweep import Machine, cells, run_all
    from segue.sim.fitting import Calibration

    more: dict[str, Any] = {"num_blocks": arguments.blocks, "utilization": arguments.utilization}
    more["max_model_len"] = arguments.max_model_len
    if arguments.calibration is not None:
        found = Calibration.read(arguments.calibration)
        machines = [Machine(found.hardware.name, found.shape.name, calibration=found, turn_seconds=0.0, **more)]
    else:
        machines = [Machine(gpu, arguments.model, **more) for gpu in arguments.gpu.split(",")]
    sampled = 0.1 if arguments.trace_out is not None else None
    policies = arguments.policy.split(",")
    chosen = cells(
        _loads(arguments), machines, policies, arguments.tiers, _numbers("seeds", arguments.seeds, int), sampled
    )
    yield from run_all(chosen, arguments.workers, done)


def _local(arguments: argparse.Namespace, done: Done) -> Results:
    from segue.bench.local import play_locally
    from segue.bench.records import run_record, trace_records
    from segue.bench.sweep import TIERS_MARK

    sampled = 0.1 if arguments.trace_out is not None else None
    for load in _loads(arguments):
        for seed in _numbers("seeds", arguments.seeds, int):
            workload = load.make(seed, None)
            for named in arguments.policy.split(","):
                policy, tiers = named.removesuffix(TIERS_MARK), arguments.tiers if named.endswith(TIERS_MARK) else []
                played = play_locally(
                    workload,
                    arguments.engine,
                    policy,
                    tiers,
                    progress=done,
                    sample_seconds=sampled,
                    num_blocks=arguments.blocks,
                )
                settings = _settings(policy, tiers, "local", "this machine", arguments.engine, arguments.blocks)
                settings |= {"jps": load.rate, "seed": seed}
                yield run_record(workload, played, settings), list(trace_records(played, settings))


def _served(arguments: argparse.Namespace, done: Done) -> Results:
    try:
        from segue.bench.served import Server, play_served
    except ImportError as error:
        raise InvalidRequest("bench", f"needs the client's packages: pip install 'segue[client]' ({error})") from error
    from segue.bench.records import run_record, trace_records

    server = Server(arguments.url, ours=not arguments.other)
    for load in _loads(arguments):
        for seed in _numbers("seeds", arguments.seeds, int):
            workload = load.make(seed, None)
            played = play_served(workload, server, progress=done)
            settings = _settings("server", [], "server", arguments.url, server.model, None)
            settings |= {"jps": load.rate, "seed": seed}
            yield run_record(workload, played, settings), list(trace_records(played, settings))


def _settings(
    policy: str, tiers: list[str], gpu: str, title: str, model: str | None, blocks: int | None
) -> dict[str, Any]:
    return {"policy": policy, "tiers": tiers, "gpu": gpu, "gpu_title": title, "model": model, "blocks": blocks}


def _loads(arguments: argparse.Namespace) -> list[Load]:
    from segue.bench.sweep import Load

    default = "1" if arguments.kind == "replay" else "2"
    rates: list[Any] = _numbers("jps", arguments.jps or default, float)
    if arguments.kind == "replay" and arguments.jps is None:
        rates = [None]
    trace = getattr(arguments, "trace", None)
    return [
        Load(
            arguments.kind,
            rate,
            arguments.seconds,
            arguments.arrivals,
            arguments.concurrency,
            trace,
            arguments.limit,
            getattr(arguments, "time_scale", 1.0),
            _options(arguments),
        )
        for rate in rates
    ]


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.kind != "agents":
        return {}
    options: dict[str, Any] = {"gap_scale": arguments.gap_scale}
    for name in ("prompt_tokens", "output_tokens"):
        if (text := getattr(arguments, name)) is not None:
            options[name] = tuple(_numbers(name, text, int))
    if arguments.usual is not None:
        options["usual"] = arguments.usual
    return options


def _numbers(field: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequest(field, f"{text!r:.60} is no list of numbers: write 1,2,5") from error
    if any(number < 0 or number != number for number in found):
        raise InvalidRequest(field, f"{text!r:.60} has a number below 0")
    return found


def _print_table(records: list[dict[str, Any]]) -> None:
    width = max(len(_series(record)) for record in records) + 2
    print(f"{'device':10}{'jobs/s':>8}  {'policy':{width}}" + "".join(f"{title:>16}" for title, _ in _COLUMNS))
    for record in records:
        rate = f"{record['jps']:g}" if record.get("jps") is not None else "-"
        cells = "".join(_cell(record[name]) for _, name in _COLUMNS)
        print(f"{record['gpu']:10}{rate:>8}  {_series(record):{width}}{cells}")
    failed = sum(record["failed_jobs"] for record in records)
    if failed:
        print(f"{failed} jobs ended with an error")


def _series(record: dict[str, Any]) -> str:
    return " + ".join([str(record["policy"]), *record["tiers"]])


def _cell(value: Any) -> str:
    return f"{value:16.3f}" if isinstance(value, float) else f"{value:16}"


@contextmanager
def _bar() -> Iterator[Done]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("runs", total=None)

        def done(number: int, count: int) -> None:
            progress.update(task, completed=number, total=count)

        yield done
