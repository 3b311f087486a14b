"""A report of studies: one HTML page with pictures, Markdown and CSV, from what MLflow holds."""
