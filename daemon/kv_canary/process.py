"""The process that sidecars live in: its end, and its forks. Stateless but for the list of those that run.

Both hooks are registered once, when the first sidecar starts, and do nothing while none runs; Python has no way to take
a fork hook back.
"""

from __future__ import annotations

import atexit
import os
import weakref
from functools import cache
from typing import Protocol


class Resident(Protocol):
    """Something that has threads in this process."""

    def at_exit(self) -> None:
        """The interpreter is about to end. On the main thread; must not take long."""

    def after_fork(self) -> None:
        """This is a forked child: the threads are not here. Must not wait for anything they held."""


_running: weakref.WeakSet[Resident] = weakref.WeakSet()


def follow(resident: Resident) -> None:
    """Tells `resident` of the process's end and forks from now on."""
    _register()
    _running.add(resident)


def unfollow(resident: Resident) -> None:
    """Takes `follow` back; nothing if it was taken back already."""
    _running.discard(resident)


@cache
def _register() -> None:
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    for resident in list(_running):
        resident.at_exit()


def _after_fork() -> None:
    for resident in list(_running):
        resident.after_fork()
    _running.clear()  # the child's exit is none of ours
