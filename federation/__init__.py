"""What both ends of the fleet and the simulator share: methods, protocol, transport, scenarios, services."""
