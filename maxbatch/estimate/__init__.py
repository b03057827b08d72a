"""What a compiled program costs, read from its HLO text, before a chip is rented."""
