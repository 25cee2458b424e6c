"""Pure decisions: who runs, how far, on which pages. Never imports torch, reads no clock, does no I/O.

The engine's loop asks a `Scheduler` for plans and hands it outcomes; nothing here knows how either is carried out.
"""

from legato.schedule.limits import Limits
from legato.schedule.pages import Pages
from legato.schedule.pool import Pool
from legato.schedule.request import NeverFits, Progress, QueueFull, Request, RequestError
from legato.schedule.scheduler import Scheduler

__all__ = ["Limits", "NeverFits", "Pages", "Pool", "Progress", "QueueFull", "Request", "RequestError", "Scheduler"]
