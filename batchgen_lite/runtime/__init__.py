"""The coroutine model: sequences, slices, sweeps, scheduler, planner, clock."""
