"""Models in use: a service over HTTP on Ray Serve, and predictions of files. The only Ray Serve and FastAPI code.

Importing this package imports none of them; the modules do.
"""
