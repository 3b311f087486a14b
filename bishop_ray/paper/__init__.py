"""The paper: its printed figures, its tables again, ablations, theory of retrieval."""
