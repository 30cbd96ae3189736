"""User code in worker processes with limits: reward functions (stateless calls) and environments (sessions)."""
