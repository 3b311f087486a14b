"""Search: spaces, samplers, scheduler, placement, studies and their results."""
