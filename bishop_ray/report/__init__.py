"""Report of studies: one HTML page with figures, Markdown and CSV, from what MLflow holds."""
