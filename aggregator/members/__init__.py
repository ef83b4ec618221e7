"""Who belongs to a fleet: certificates, the table of members, and the broker's rules for them."""
