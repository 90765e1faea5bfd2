"""Admission: weighted fair shares of the workers' slots, with leases that several orchestrators share."""

from orchestrator.admission.base import Admission, Priority, Slot, SlotRequest, Unlimited

__all__ = ["Admission", "Priority", "Slot", "SlotRequest", "Unlimited"]
