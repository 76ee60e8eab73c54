from kvdock_conformance.faults.fault import Faults

FAULTS = Faults()
