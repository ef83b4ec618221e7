"""What people see of a fleet: status, the journal of events, metrics."""
