"""What a board can do: profiles, probing, execution providers."""
