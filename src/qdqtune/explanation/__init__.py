"""Why each node runs as it does: facts of a finished run, reasons, and the HTML report."""
