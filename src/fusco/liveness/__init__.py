"""No wait without a limit, no failure without a name: who is alive, who waits for whom, who is at fault."""
