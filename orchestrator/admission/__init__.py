"""Admission: weighted fair shares of the workers' slots, with leases that several orchestrators share."""

from orchestrator.admission.base import Admission, Priority, Slot, SlotRequest, Unlimited
from orchestrator.admission.pauses import PausableAdmission
from orchestrator.admission.shared import SharedAdmission

__all__ = ["Admission", "PausableAdmission", "Priority", "SharedAdmission", "Slot", "SlotRequest", "Unlimited"]
