"""The product's own scheduler, KV core, tiers and policies on hardware that is only calculated: costs and time, no scheduling."""

from segue.sim.costs import Coefficients, StepCosts
from segue.sim.engine import SimulatedEngine
from segue.sim.hardware import HARDWARE, Hardware, find_hardware
from segue.sim.shapes import ModelShape, find_shape

__all__ = [
    "HARDWARE",
    "Coefficients",
    "Hardware",
    "ModelShape",
    "SimulatedEngine",
    "StepCosts",
    "find_hardware",
    "find_shape",
]
