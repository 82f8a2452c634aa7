"""What devices are said to do by those who make them."""

from __future__ import annotations

from dataclasses import dataclass

from segue.base.errors import InvalidRequest

GB, TB, TFLOP, GIB = 1e9, 1e12, 1e12, 2**30
_PCIE3, _PCIE4, _PCIE5 = 15.75 * GB, 31.5 * GB, 63.0 * GB  # sixteen lanes, one way


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peaks: a dense product in 16 bits with sums in 32, reads of the device's memory, copies to and from the host, one way.

    `memory_bytes` is what the device reports where a log says so, and its nominal size otherwise.
    """

    name: str
    title: str
    memory_bytes: float
    bytes_per_second: float
    flops: float
    host_bytes_per_second: float
    link_bytes_per_second: float = 0.0  # to a neighbour, one way; 0: there is none
    source: str = ""


HARDWARE = {
    each.name: each
    for each in (
        Hardware(
            "rtx6000",
            "RTX 6000 (24 GB)",
            24 * GIB,
            672 * GB,
            130.5 * TFLOP,
            _PCIE3,
            50 * GB,
            "NVIDIA, Quadro RTX 6000 data sheet (Turing)",
        ),
        Hardware(
            "rtx5090",
            "RTX 5090 (32 GB)",
            31.34 * GIB,
            1792 * GB,
            209.5 * TFLOP,
            _PCIE5,
            0.0,
            "NVIDIA, RTX Blackwell architecture paper; memory as vLLM's log reports it",
        ),
        Hardware(
            "a100-40",
            "A100 (40 GB)",
            39.4 * GIB,
            1555 * GB,
            312 * TFLOP,
            _PCIE4,
            300 * GB,
            "NVIDIA, A100 data sheet",
        ),
        Hardware("l40s", "L40S (48 GB)", 44.4 * GIB, 864 * GB, 362 * TFLOP, _PCIE4, 0.0, "NVIDIA, L40S data sheet"),
        Hardware(
            "h100", "H100 (80 GB)", 79.2 * GIB, 3350 * GB, 989 * TFLOP, _PCIE5, 450 * GB, "NVIDIA, H100 SXM data sheet"
        ),
        Hardware(
            "h200",
            "H200 (141 GB)",
            139.8 * GIB,
            4800 * GB,
            989 * TFLOP,
            _PCIE5,
            450 * GB,
            "NVIDIA, H200 SXM data sheet",
        ),
        Hardware(
            "b200", "B200 (180 GB)", 178 * GIB, 8000 * GB, 2250 * TFLOP, _PCIE5, 900 * GB, "NVIDIA, DGX B200 data sheet"
        ),
    )
}


def find_hardware(name: str) -> Hardware:
    if name not in HARDWARE:
        raise InvalidRequest("gpu", f"{name!r:.40} is not known: there are {', '.join(HARDWARE)}")
    return HARDWARE[name]
