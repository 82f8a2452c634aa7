"""A progress bar that appears only if there is progress to show."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn


class FetchProgress:
    """Called with (bytes done, bytes in all), as the model catalog does."""

    def __init__(self, label: str) -> None:
        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> FetchProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("fetch", total=total)
        self._bar.update(self._task, completed=done)
