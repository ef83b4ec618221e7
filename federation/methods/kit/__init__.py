"""What every method is made of: records, packing, seeding, checks. Knows no method."""
