"""Ablations: fixed configurations trained side by side and compared on the test split; nothing is selected on it.

``settings.py`` says which ablations there are, ``transforms.py`` what some do to the data, ``run.py`` runs them on Ray,
``records.py`` keeps what each run gave, ``summary.py`` makes the tables. Importing this package imports nothing heavy.
"""
