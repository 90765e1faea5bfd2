"""Admission: weighted fair shares of the workers' slots, with leases that several orchestrators share."""

from orchestrator.admission.base import Admission, Slot, Unlimited
from orchestrator.admission.pauses import PausableAdmission
from orchestrator.admission.shared import SharedAdmission
from store.slots import Priority, SlotRequest

__all__ = ["Admission", "PausableAdmission", "Priority", "SharedAdmission", "Slot", "SlotRequest", "Unlimited"]
