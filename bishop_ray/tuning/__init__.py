"""How trials are chosen, run and recorded: spaces, searcher, studies."""
