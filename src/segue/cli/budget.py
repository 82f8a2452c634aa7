"""How much KV fits on a device beside a model: weights, activations, blocks, tokens, jobs."""

from __future__ import annotations

import argparse
import json

from segue.base.errors import InvalidRequest
from segue.base.sizes import parse_bytes


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="a config.json, a folder with one, or a known name")
    memory = command.add_mutually_exclusive_group()
    memory.add_argument("--gpu", metavar="NAME", help="rtx6000, rtx5090, a100-40, l40s, h100, h200 or b200")
    memory.add_argument("--memory", metavar="SIZE", help="of the device, such as 31.34GiB")
    command.add_argument("--utilization", type=float, default=0.9, metavar="P", help="share of it to use (default: .9)")
    command.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a block (default: 16)")
    command.add_argument("--dtype", metavar="TYPE", help="of the weights (default: the config's)")
    command.add_argument("--kv-dtype", metavar="TYPE", help="of the KV (default: as the weights, 16 bits at least)")
    command.add_argument(
        "--max-step-tokens", type=int, default=8192, metavar="N", help="computed at once (default: 8192)"
    )
    command.add_argument("--context", type=int, default=2915, metavar="N", help="tokens of a job (default: 2915)")
    for name in ("weights", "activations", "other"):
        command.add_argument(f"--{name}", metavar="SIZE", help="if measured")
    command.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    from segue.sim.budget import budget
    from segue.sim.hardware import GIB, find_hardware
    from segue.sim.shapes import find_shape

    shape = find_shape(arguments.model)
    if arguments.memory is not None:
        memory = float(parse_bytes(arguments.memory, "memory"))
    else:
        memory = find_hardware(arguments.gpu or "rtx5090").memory_bytes
    if arguments.context < 1:
        raise InvalidRequest("context", f"must be at least 1, got {arguments.context}")
    given = {
        name: float(parse_bytes(text, name))
        for name in ("weights", "activations", "other")
        if (text := getattr(arguments, name)) is not None
    }
    found = budget(
        shape,
        memory,
        utilization=arguments.utilization,
        block_size=arguments.block_size,
        dtype=arguments.dtype,
        kv_dtype=arguments.kv_dtype,
        max_step_tokens=arguments.max_step_tokens,
        **given,
    )
    if arguments.json:
        sizes = {"memory": found.total, "usable": found.usable, "weights": found.weights, "kv": found.kv}
        sizes |= {"activations": found.activations, "other": found.other, "block": found.block}
        counts = {"blocks": found.num_blocks, "tokens": found.num_tokens, "jobs": found.num_jobs(arguments.context)}
        print(
            json.dumps(
                {"model": shape.name, "parameters": shape.num_params, "bytes": sizes}
                | counts
                | {"assumed": found.assumed}
            )
        )
        return 0
    rows = [("memory", found.total), (f"of it {arguments.utilization:g}", found.usable), ("weights", found.weights)]
    rows += [("activations", found.activations), ("other", found.other), ("left for KV", found.kv)]
    for title, size in rows:
        print(f"{title:16}{size / GIB:10.2f} GiB")
    print(f"{'a block':16}{found.block / 2**20:10.2f} MiB, {arguments.block_size} tokens")
    print(f"{'blocks':16}{found.num_blocks:10,}")
    print(f"{'tokens':16}{found.num_tokens:10,}")
    print(f"{'jobs at once':16}{found.num_jobs(arguments.context):10,} of {arguments.context:,} tokens")
    for each in found.assumed:
        print(f"assumed: {each}")
    return 0
