"""The ledger: entries that are never edited, the runs they speak of, and whether all of it still holds."""

from benchkit.ledger.entries import Entry
from benchkit.ledger.files import Layout
from benchkit.ledger.journal import Journal, unfinished
from benchkit.ledger.states import STATUSES, RunState, Status, Waiver
from benchkit.ledger.store import Banked, Ledger, Raw
from benchkit.ledger.verification import Problem, Verification, verify

__all__ = [
    "STATUSES",
    "Banked",
    "Entry",
    "Journal",
    "Layout",
    "Ledger",
    "Problem",
    "Raw",
    "RunState",
    "Status",
    "Verification",
    "Waiver",
    "unfinished",
    "verify",
]
