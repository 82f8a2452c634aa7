"""Every error that Segue raises on purpose, each with the HTTP status a server answers with.

SegueError
├── InvalidRequest          400  a field of a request is wrong; names the field
│   └── RequestTooLong      400  prompt + max_tokens over a limit; names the limit
├── ModelError              400  a model cannot be used
│   ├── UnknownModel        404  no such built-in, folder or file
│   ├── UnsupportedModel    400  its architecture, or an option it needs, is not ours
│   └── WeightsError        400  corrupt, truncated or missing tensors
├── StateError              400  a state cannot be used as asked
│   ├── UnknownState        404  never known here, or not to this caller
│   ├── ForgottenState      410  known once; its tokens have left the bounded ledger
│   ├── ParentFailed        409  the request to continue was aborted or failed
│   ├── SnapshotError       400  a saved or shipped state is damaged, foreign, too new or of another model
│   └── NoRoom              503  memory cannot take an imported state now
├── UnknownCatalogue        404  no catalogue of this name
├── StepFailed              500  the executor failed while this request was in the step
├── EngineClosed            503  submitted after shutdown
└── IntegrityError          500  check() found the KV core in a state it must never be in
"""

from __future__ import annotations


class SegueError(Exception):
    """The root of the tree; `status` is the HTTP status that fits."""

    status = 500


class InvalidRequest(SegueError):
    """A value the caller passed is wrong. `field` names it, so that a client can show where."""

    status = 400

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class RequestTooLong(InvalidRequest):
    """The request could never run here, whatever else is going on."""


class ModelError(SegueError):
    status = 400


class UnknownModel(ModelError):
    status = 404


class UnsupportedModel(ModelError):
    pass


class WeightsError(ModelError):
    pass


class StateError(SegueError):
    status = 400


class UnknownState(StateError):
    status = 404


class ForgottenState(StateError):
    status = 410


class ParentFailed(StateError):
    status = 409


class SnapshotError(StateError):
    pass


class NoRoom(StateError):
    status = 503


class UnknownCatalogue(SegueError):
    status = 404


class StepFailed(SegueError):
    status = 500


class DeviceLost(SegueError):
    """The device can compute nothing more in this process. What is in memory of the host, on disk or elsewhere is whole."""


class EngineClosed(SegueError):
    status = 503


class IntegrityError(SegueError):
    status = 500


class TierError(SegueError):
    """A tier cannot be used, or what it had is not what was stored."""

    status = 500
