"""Tables of the aggregator's store that have a meaning of their own: members, and what operators did."""
